"""What a module imports, read from its text: nothing is executed, and a lazy import counts like any other.

Files are relative to the folder of the project, `ROOT`.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = ("kernels", "stages")


def project_files(*folders: str) -> list[Path]:
    """Python files of the given folders, in order."""
    return sorted(file.relative_to(ROOT) for name in folders for file in (ROOT / name).rglob("*.py"))


def module_file(name: str) -> Path | None:
    """The project file of a module; None for anything else."""
    if name.split(".")[0] not in PROJECT:
        return None
    base = Path(*name.split("."))
    found = [path for path in (base.with_suffix(".py"), base / "__init__.py") if (ROOT / path).exists()]
    return found[0] if found else None


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Dotted names of every import of a file; `from a import b` may mean a.b as well as a."""
    return _imported(tree(file).body, file)


def imports_of_function(file: Path, function: str) -> frozenset[str]:
    """Imports at the top level of a file and inside one of its functions, leaving the other functions alone.

    ValueError if there is no such function.
    """
    body = tree(file).body
    kept = [node for node in body if not isinstance(node, ast.FunctionDef) or node.name == function]
    if not any(isinstance(node, ast.FunctionDef) for node in kept):
        raise ValueError(f"{file}: no function {function}")
    return _imported(kept, file)


def closure(start: Path, names: Iterable[str]) -> set[Path]:
    """`start`, and every project file reached from `names`, packages on the way included."""
    seen, waiting = {start}, list(names)
    while waiting:
        parts = waiting.pop().split(".")
        for depth in range(1, len(parts) + 1):
            file = module_file(".".join(parts[:depth]))
            if file is not None and file not in seen:
                seen.add(file)
                waiting += imports_of(file)
    return seen


@cache
def only_words(file: Path) -> bool:
    """A package's __init__ that holds nothing but a docstring and its version: no result hangs on it."""
    if file.name != "__init__.py":
        return False
    return all(_is_docstring(node) or _is_version(node) for node in tree(file).body)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=str(file))


def _imported(nodes: Iterable[ast.AST], file: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in (child for top in nodes for child in ast.walk(top)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = file.parts[: len(file.parts) - node.level]
                base = ".".join([*above, base]).rstrip(".")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_version(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]
