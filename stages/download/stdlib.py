"""Code prompts in HumanEval's form: signatures and docstrings of the installed standard library.

Every Python brings them, their licence is known, and HumanEval is not among them. The text depends on the
Python version, which therefore stands in the corpus file's provenance.
"""

import ast
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

from stages.download.items import Item
from stages.download.params import Stdlib


def from_stdlib(source: Stdlib) -> list[Item]:
    """Public functions and methods with docstrings of min_words to max_words words, in the modules' order."""
    items = [
        item
        for module in source.modules
        for item, length in functions(module)
        if source.min_words <= length <= source.max_words
    ]
    if not items:
        raise ValueError("download.corpus: no function of `modules` has a docstring of min_words to max_words")
    return items


def functions(module: str) -> Iterator[tuple[Item, int]]:
    """Signature and docstring of each public function of a module, with the docstring's count of words."""
    path = _source(module)
    with tokenize.open(path) as file:
        text = file.read()
    lines = text.splitlines()
    tree = ast.parse(text)
    owners: list[tuple[str, list[ast.stmt]]] = [(module, tree.body)]
    owners += [
        (f"{module}.{node.name}", node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    seen: set[str] = set()
    for owner, body in owners:
        for node in body:
            name = f"{owner}.{node.name}" if isinstance(node, ast.FunctionDef) else ""
            # A setter or an overload repeats the name of the function before it.
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and name not in seen:
                head, doc = node.body[0], ast.get_docstring(node)
                if doc and head.lineno > node.lineno and head.end_lineno is not None:
                    seen.add(name)
                    code = textwrap.dedent("\n".join(lines[node.lineno - 1 : head.end_lineno])) + "\n"
                    yield Item(name, code, None, module), len(doc.split())


def _source(module: str) -> Path:
    """The file of a module: by its place, not by import, because some modules are frozen into the interpreter."""
    base = Path(sysconfig.get_path("stdlib")).joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise ValueError(
        f"download.corpus: this Python's standard library has no source for {module!r}; take it off `modules`"
    )
