"""Imports run kernels <- stages.common <- stages.<stage>; heavy libraries have one door each."""

import sys
from pathlib import Path

import pytest

from stages.code.imports import closure, imports_of, module_file, project_files

MAY_IMPORT = {
    "export": {"evaluate"},  # what is exported must be accepted by its engine as before
    "generate": {"evaluate"},  # a front end to the evaluate stage's engine, not a stage of the graph
    "grid": {"evaluate"},
    "sweep": {"evaluate"},  # cells at other settings, by the same engine
}
MODELS = {f"stages/common/{name}.py" for name in ("bodies", "convert", "foreign", "models", "tiny", "tokenizers")}
DOORS = {
    "transformers": MODELS,
    "tokenizers": MODELS,
    "pyarrow": {"stages/common/store.py", "stages/download/records.py"},
    "huggingface_hub": {"stages/common/hub.py", "stages/download/fetch.py", "stages/download/hub_errors.py"},
    "peft": {"stages/common/lora.py"},
}
REPORT_ONLY = ("pandas", "matplotlib")


def roots(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(file)}


def stage_of(name: str) -> str | None:
    """The stage a module belongs to; None outside the stages and in stages.common."""
    parts = name.split(".")
    return parts[1] if parts[0] == "stages" and len(parts) > 1 and parts[1] != "common" else None


@pytest.mark.parametrize("file", project_files("kernels"), ids=str)
def test_kernels_import_torch_and_the_standard_library(file):
    allowed = {"torch", "kernels"} | ({"triton"} if "fused" in file.parts else set())
    foreign = roots(file) - allowed - set(sys.stdlib_module_names)
    assert not foreign


@pytest.mark.parametrize("file", project_files("stages"), ids=str)
def test_stages_talk_through_files(file):
    own = file.parts[1]
    reached = {stage for name in imports_of(file) if module_file(name) and (stage := stage_of(name))}
    assert reached <= {own} | MAY_IMPORT.get(own, set())


@pytest.mark.parametrize("file", project_files("kernels", "stages"), ids=str)
def test_heavy_libraries_have_one_door(file):
    for library, doors in DOORS.items():
        assert library not in roots(file) or file.as_posix() in doors
    for library in REPORT_ONLY:
        assert library not in roots(file) or file.parts[:2] == ("stages", "report")


def test_no_stage_reaches_the_tests():
    assert not [file for file in project_files("kernels", "stages") if "tests" in roots(file)]


def test_the_reader_of_imports_sees_what_there_is():
    """The checks above must not pass because nothing was found."""
    assert {"torch", "kernels.cache"} <= imports_of(Path("stages/common/models.py"))
    reached = closure(Path("stages/adapt/__main__.py"), imports_of(Path("stages/adapt/__main__.py")))
    assert {Path("kernels/objectives.py"), Path("stages/common/models.py")} <= reached
