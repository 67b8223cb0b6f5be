"""DVC does not follow imports: every stage hangs on the files of its own program, which stages/code finds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.code import imports
from stages.code.programs import METHODS, programs

TARGETS = ("models", "corpus")  # of download; whatever else it is asked for is a benchmark


@pytest.fixture(scope="module")
def files() -> dict[str, set[str]]:
    return {name: {file.as_posix() for file in found} for name, found in programs().items()}


def program_of(words: tuple[str, ...]) -> str:
    """The program that a stage's command line starts."""
    module, _profile, *rest = words
    name = module.removeprefix("stages.")
    if name == "download":
        return f"{name}/{rest[0] if rest[0] in TARGETS else 'benchmark'}"
    return f"{name}/{rest[-1]}" if name in ("evaluate", "baselines") else name


def test_every_stage_depends_on_its_own_program_and_on_no_other_code(graph):
    stages = [stage for stage in graph if stage.name != "code"]
    assert stages
    for stage in stages:
        code = [dep for dep in stage.deps if dep.split("/")[0] in imports.PROJECT or dep.startswith("data/code")]
        assert code == [f"data/code/{program_of(stage.words)}.json"], stage.name


def test_every_program_that_a_stage_starts_is_there(graph, files):
    started = {program_of(stage.words) for stage in graph if stage.name != "code"}
    assert started == set(files)
    assert {f"evaluate/{file.stem}" for file in (imports.ROOT / METHODS).glob("[!_]*.py")} <= started


def test_a_program_is_what_it_can_import_and_nothing_else(files):
    assert "kernels/objectives.py" in files["adapt"]
    assert "kernels/accept.py" not in files["adapt"]
    assert {"kernels/accept.py", "stages/evaluate/methods/eagle2.py"} <= files["evaluate/eagle2"]
    assert "stages/evaluate/methods/eagle.py" not in files["evaluate/eagle2"]
    assert "kernels/objectives.py" not in files["evaluate/eagle2"]
    assert {"stages/evaluate/methods/eagle.py", "stages/evaluate/methods/specdiff.py"} <= files["grid"] & files["sweep"]
    assert "stages/baselines/eagle.py" in files["baselines/eagle"] - files["baselines/medusa"]
    assert "stages/download/magpie.py" in files["download/corpus"] - files["download/benchmark"]


def test_files_beside_the_code_belong_to_the_program_in_whose_folder_they_lie(files):
    """Tables, style sheets and templates."""
    assert {"stages/report/page.css", "stages/report/page.js", "stages/report/published.csv"} <= files["report"]
    beside = {file for found in files.values() for file in found if Path(file).suffix != ".py"}
    assert all(file.startswith("stages/report/") for file in beside)


@pytest.fixture
def other_project(tmp_path, monkeypatch) -> Iterator[Path]:
    """The reader of imports on another folder than the project's."""
    readers = (imports.tree, imports.imports_of, imports.only_words)
    for reader in readers:
        reader.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(imports, "ROOT", tmp_path)
        yield tmp_path
    for reader in readers:
        reader.cache_clear()


def test_a_lazy_import_counts_but_that_of_another_target_does_not(other_project):
    package = other_project / "stages" / "one"
    package.mkdir(parents=True)
    (other_project / "stages" / "__init__.py").write_text('"""Words."""\n')
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import json\n\n\ndef _a():\n    from . import near\n\n\ndef _b():\n    import stages.one.far\n"
    )
    (package / "near.py").write_text("from stages.one.deep import name\n")
    (package / "far.py").write_text("")
    (package / "deep.py").write_text("name = 1\n")
    start = Path("stages/one/__main__.py")

    def reached(names: frozenset[str]) -> set[str]:
        return {file.name for file in imports.closure(start, names) if not imports.only_words(file)}

    assert reached(imports.imports_of(start)) == {"__main__.py", "near.py", "deep.py", "far.py"}
    assert reached(imports.imports_of_function(start, "_a")) == {"__main__.py", "near.py", "deep.py"}
    assert reached(imports.imports_of_function(start, "_b")) == {"__main__.py", "far.py"}
    with pytest.raises(ValueError, match="no function _c"):
        imports.imports_of_function(start, "_c")


def test_every_method_and_benchmark_has_its_cell(graph):
    """The graph above is the whole one: a check over an empty list would hold too."""
    words = {stage.words for stage in graph}
    assert ("stages.evaluate", "cpu", "humaneval", "specdiff2_tree") in words
    assert ("stages.download", "smoke", "corpus") in words
    assert ("stages.baselines", "cpu", "eagle") in words
    assert {("stages.sweep", "cpu", "nodes"), ("stages.grid", "smoke", "window"), ("stages.points", "cpu")} <= words
