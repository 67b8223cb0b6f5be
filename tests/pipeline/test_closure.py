"""DVC does not follow imports: whatever code a stage reaches must be among its deps, and nothing beyond it."""

from functools import cache
from pathlib import Path

from tests.pipeline.imports import ROOT, closure, imports_of, imports_of_target, only_words

DOWNLOAD, METHODS = "stages.download", "stages/evaluate/methods"


@cache
def code_of(words: tuple[str, ...]) -> frozenset[str]:
    """Project files that a command line can reach, packages without content left out."""
    module, _profile, *rest = words
    start = Path(*module.split(".")) / "__main__.py"
    if module == DOWNLOAD:
        target = rest[0] if rest[0] in ("models", "corpus") else "benchmark"
        names = imports_of_target(start, f"_{target}")
    else:
        names = imports_of(start)
    if module == "stages.evaluate":
        names |= {f"stages.evaluate.methods.{rest[1]}"}
    if module in ("stages.plan", "stages.sweep"):  # which methods, the sweep says
        names |= {f"stages.evaluate.methods.{file.stem}" for file in (ROOT / METHODS).glob("*.py")}
    if module == "stages.baselines":
        names |= {f"stages.baselines.{rest[0]}"}
    return reached(start, names | {module})


@cache
def reached(start: Path, names: frozenset[str]) -> frozenset[str]:
    """The instances of a matrix mostly reach the same."""
    return frozenset(file.as_posix() for file in closure(start, names) if not only_words(file))


def covers(dep: str, file: str) -> bool:
    return file == dep or file.startswith(f"{dep}/")


def is_code(dep: str) -> bool:
    return dep.split("/")[0] in ("kernels", "stages")


def test_deps_cover_what_a_stage_imports(graph):
    missing = {
        stage.name: sorted(lost)
        for stage in graph
        if (lost := {file for file in code_of(stage.words) if not any(covers(dep, file) for dep in stage.deps)})
    }
    assert not missing


def test_deps_name_no_code_that_a_stage_does_not_import(graph):
    """A superfluous one reruns a stage for nothing, training included. The instances of a matrix share their list."""

    def kind(stage):
        return stage.name.split("@")[0]

    named = {(kind(stage), dep) for stage in graph for dep in stage.deps if is_code(dep)}
    used = {
        (kind(stage), dep)
        for stage in graph
        for dep in stage.deps
        if any(covers(dep, file) for file in code_of(stage.words))
    }
    assert not named - used


def test_deps_that_are_code_exist(graph):
    absent = {(stage.name, dep) for stage in graph for dep in stage.deps if is_code(dep) and not (ROOT / dep).exists()}
    assert not absent


def test_deps_cover_files_that_lie_beside_the_code(graph):
    """Tables, style sheets and templates are read by the stage in whose folder they lie."""
    beside = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "stages").rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    ]
    assert beside
    for stage in graph:
        own = stage.words[0].replace(".", "/")
        for file in beside:
            assert not covers(own, file) or any(covers(dep, file) for dep in stage.deps), (stage.name, file)


def test_every_method_and_benchmark_has_its_cell(graph):
    """The graph above is the whole one: a check over an empty list would hold too."""
    words = {stage.words for stage in graph}
    assert ("stages.evaluate", "cpu", "humaneval", "specdiff2_tree") in words
    assert ("stages.download", "smoke", "corpus") in words
    assert ("stages.baselines", "cpu", "eagle") in words
    assert {("stages.sweep", "cpu", "nodes"), ("stages.plan", "smoke", "window"), ("stages.points", "cpu")} <= words
