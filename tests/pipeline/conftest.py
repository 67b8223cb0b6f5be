"""One smoke run shared by the tests, and the stage graph of every profile."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dvc.repo import Repo
from dvc.stage import PipelineStage
from ruamel.yaml import YAML

from tests.pipeline.imports import ROOT
from tests.pipeline.project import Project, clone, commit, isolated, name_of, set_params

STAND_IN = Path(__file__).with_name("stand_in.py")


FEW = {
    "methods": ["specdiff", "specdiff2", "specdiff2_trie", "specdiff2_tree", "eagle2"],
    "objectives": ["streak", "trie_streak"],
    "features": ["verifier"],
    "baselines": ["eagle"],
}  # what is enough to see what reruns


class Instance(NamedTuple):
    """A stage of dvc.yaml with its matrix values filled in."""

    name: str
    words: tuple[str, ...]  # of `python -m`
    deps: tuple[str, ...]
    params: tuple[str, ...]
    outs: tuple[str, ...]


class Smoke(NamedTuple):
    project: Project
    output: str  # of the one `dvc repro`


@pytest.fixture(scope="session", autouse=True)
def _without_settings_of_this_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in isolated(tmp_path_factory.mktemp("dvc")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def graph(tmp_path_factory) -> list[Instance]:
    """Every instance of every stage: all profiles, and all methods, objectives and baselines that have a section."""
    root = tmp_path_factory.mktemp("graph")
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy2(ROOT / name, root / name)
    document = YAML(typ="safe").load(root / "params.yaml")
    profiles = [name for name, node in document.items() if "models" in keys(node)]
    set_params(root / "params.yaml", {"profiles": profiles, **everything(document["smoke"])})
    with Repo.init(str(root), no_scm=True) as repo:
        return [instance(stage, root) for stage in repo.index.stages]


def everything(profile: dict[str, Any]) -> dict[str, list[str]]:
    """The lists that make the graph whole: whatever a profile has a section for."""
    return {
        "methods": [name for name in profile["evaluate"] if name not in ("shared", "vanilla")],
        "objectives": [name for name in profile["distill"] if name != "training"],
        "features": ["verifier"],
        "baselines": [*profile["baselines"]],
    }


def keys(node: object) -> set[str]:
    return set(node) if isinstance(node, dict) else set()


def instance(stage: PipelineStage, root: Path) -> Instance:
    assert isinstance(stage.cmd, str)
    program, flag, *words = stage.cmd.split()
    assert (program, flag) == ("python", "-m"), f"{stage.addressing}: {stage.cmd}"
    deps = [dep for dep in stage.deps if not hasattr(dep, "params")]
    params = [str(name) for dep in stage.deps if hasattr(dep, "params") for name in dep.params]

    def paths(items: list[Any]) -> tuple[str, ...]:
        return tuple(Path(item.fs_path).relative_to(root.resolve()).as_posix() for item in items)

    return Instance(
        name_of(stage.addressing), words=tuple(words), deps=paths(deps), params=tuple(params), outs=paths(stage.outs)
    )


@pytest.fixture(scope="session")
def smoke(tmp_path_factory) -> Smoke:
    """The smoke profile with one benchmark and all else there is, run once. Who edits it puts it back, or copies it."""
    project = clone(tmp_path_factory.mktemp("smoke"))
    project.set(profiles=["smoke"], benchmarks=["gsm_symbolic"], **everything(project.params()["smoke"]))
    commit(project)
    return Smoke(project, project.dvc("repro"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory, graph) -> Project:
    """The smoke profile with two benchmarks and a baseline, as after `dvc repro`, by a stand-in that takes no time."""
    aside = tmp_path_factory.mktemp("programs")
    stages = {" ".join(stage.words): stage._asdict() for stage in graph}
    (aside / "graph.json").write_text(json.dumps(stages))
    command = shlex.join([sys.executable, str(STAND_IN), str(aside / "graph.json")])
    (aside / "python").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (aside / "python").chmod(0o755)
    project = clone(tmp_path_factory.mktemp("finished"), programs=aside)
    project.set(profiles=["smoke"], benchmarks=["gsm_symbolic", "humaneval"], **FEW)
    commit(project)
    project.dvc("repro")
    return project
