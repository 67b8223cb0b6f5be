"""Which programs the pipeline runs, and the files each is made of.

A program is what a command line of dvc.yaml starts: a stage, or one target, method or baseline of it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from stages.code.imports import ROOT, closure, imports_of, imports_of_function, only_words, tree

STAGES = Path("stages")
METHODS = STAGES / "evaluate" / "methods"
NO_STAGE = ("code", "generate", "plan")  # this one, the terminal front end, and the estimator
DOWNLOADS = ("models", "corpus", "benchmark")  # functions of one program, which import what they need
OF_ANY_METHOD = ("export", "grid", "sweep")


def programs() -> dict[str, list[Path]]:
    """Files of each program, by name: `adapt`, `download/corpus`, `evaluate/specdiff2_tree`, `baselines/eagle`."""
    return dict(_programs())


def _programs() -> Iterator[tuple[str, list[Path]]]:
    methods = [_module(file) for file in _modules(METHODS)]
    for main in sorted((ROOT / STAGES).glob("*/__main__.py")):
        start = main.relative_to(ROOT)
        stage = start.parent.name
        if stage in NO_STAGE:
            continue
        if stage == "download":
            for target in DOWNLOADS:
                yield f"{stage}/{target}", _files(start, imports_of_function(start, f"_{target}"))
        elif stage == "evaluate":
            for method in methods:
                yield f"{stage}/{method.split('.')[-1]}", _files(start, imports_of(start) | {method})
        elif stage == "baselines":
            for file in filter(_trains, _modules(start.parent)):
                yield f"{stage}/{file.stem}", _files(start, imports_of(start) | {_module(file)})
        else:
            chosen = methods if stage in OF_ANY_METHOD else []
            yield stage, _files(start, imports_of(start).union(chosen))


def _files(start: Path, names: frozenset[str]) -> list[Path]:
    """The code reached, and tables, style sheets and templates that lie beside that of the stage."""
    code = {file for file in closure(start, names) if not only_words(file)}
    folder = ROOT / start.parent
    beside = {
        file.relative_to(ROOT) for file in folder.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    return sorted(code | beside)


def _modules(folder: Path) -> list[Path]:
    return sorted(file.relative_to(ROOT) for file in (ROOT / folder).glob("*.py") if not file.stem.startswith("__"))


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)


def _trains(file: Path) -> bool:
    """Whether a module of the baselines is one of them, and not what they share."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "train" for node in tree(file).body)
