"""One smoke run shared by the tests, and the stage graph of every profile."""

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from stages.code.imports import ROOT
from tests.pipeline import warm
from tests.pipeline.project import Project, clone, commit, isolated

STAND_IN = Path(__file__).with_name("stand_in.py")


BENCHMARKS = ["gsm_symbolic", "humaneval"]
FEW = {
    "methods": ["specdiff2", "specdiff2_tree", "eagle2"],
    "objectives": ["streak", "trie_streak"],
    "soft_objectives": [],
    "features": ["verifier"],
    "baselines": ["eagle"],
    "exports": [],
    "sizes": [],
    "sweeps": [],
    "reasoning": [],
    "graded": [],
}  # what is enough to see what reruns
SMOKE = FEW | {
    "methods": ["specdiff2_tree", "specdiff2_fed"],
    "objectives": ["trie_streak"],
    "baselines": ["fed"],
    "exports": ["trie_streak", "fed"],
    "sizes": ["small"],
    "sweeps": ["size", "products_budget"],
    "reasoning": ["products"],
    "graded": ["products_budget"],
}  # every stage, and both kinds of drafter


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
def graph() -> list[Instance]:
    """Every instance of every stage: all profiles, and all methods, objectives and baselines that have a section.

    Filled in here, since DVC takes minutes for so many; that it fills in the same is seen in the smoke run.
    """
    yaml = YAML(typ="safe")
    document, stages = yaml.load(ROOT / "params.yaml"), yaml.load(ROOT / "dvc.yaml")["stages"]
    profiles = [name for name, node in document.items() if "models" in keys(node)]
    found = dict[str, Instance]()
    for profile in profiles:
        lists = {"profiles": [profile], **everything(document[profile], document["benchmarks"])}
        found |= {made.name: made for name, stage in stages.items() for made in instances(name, stage, lists)}
    return list(found.values())


def everything(profile: dict[str, Any], listed: list[str]) -> dict[str, list[str]]:
    """The lists that make the graph whole: whatever a profile has a section for.

    listed: `benchmarks` of params.yaml; of a profile that wants others (`plan.lists`), every one has cells.
    """
    sections = {name: node for name, node in profile["distill"].items() if name != "training"}
    there = list(profile["download"]["benchmarks"])
    benchmarks = there if "plan" in profile else listed
    return {
        "benchmarks": benchmarks,
        "reasoning": [name for name in there if name not in benchmarks],
        "methods": [name for name in profile["evaluate"] if name not in ("shared", "vanilla")],
        "objectives": [name for name, node in sections.items() if not soft(name, node)],
        "soft_objectives": [name for name, node in sections.items() if soft(name, node)],
        "features": ["verifier"] if "features" in profile else [],
        "baselines": [*profile.get("baselines", ())],
        "exports": ["adapt", *sections, *profile.get("baselines", ())],
        "sizes": [*profile["sizes"]],
        "sweeps": [*profile["sweeps"]],
        "graded": [*profile["sweeps"]],
    }


def soft(name: str, section: dict[str, Any]) -> bool:
    """Whether a section of `distill` is of the objective that reads hidden states."""
    return section.get("objective", name) == "soft"


def keys(node: object) -> set[str]:
    return set(node) if isinstance(node, dict) else set()


def instances(name: str, stage: dict[str, Any], lists: dict[str, list[str]]) -> Iterator[Instance]:
    """A stage for every combination of its matrix, whose axes are lists of params.yaml."""
    matrix = stage.get("matrix", {})
    axes = {axis: lists[re.fullmatch(r"\$\{(\w+)\}", values)[1]] for axis, values in matrix.items()}
    for chosen in itertools.product(*axes.values()):
        item = dict(zip(axes, chosen, strict=True))

        def fill(text: str, item: dict[str, str] = item) -> str:
            return re.sub(r"\$\{item\.(\w+)\}", lambda found: item[found[1]], text)

        program, flag, *words = fill(stage["cmd"]).split()
        assert (program, flag) == ("python", "-m"), f"{name}: {stage['cmd']}"
        outs = [next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"]]
        deps, params, outs = (tuple(map(fill, texts)) for texts in (stage["deps"], stage.get("params", []), outs))
        yield Instance("@".join(filter(None, (name, "-".join(chosen)))), tuple(words), deps, params, outs)


@pytest.fixture(scope="session")
def smoke(tmp_path_factory) -> Iterator[Smoke]:
    """The smoke profile through every stage, run once, with a method for each kind of drafter.

    Who edits it puts it back, or takes a copy. DVC's own share grows with the square of the stages: with all methods it
    takes as long as they do.
    """
    aside = tmp_path_factory.mktemp("warm")
    project = clone(tmp_path_factory.mktemp("smoke"), programs=aside)
    project.keep("smoke")
    used = {
        "smoke.baselines": SMOKE["baselines"],
        "smoke.distill": {"training", *SMOKE["objectives"]},
        "smoke.download.benchmarks": {*BENCHMARKS, *SMOKE["reasoning"]},
        "smoke.evaluate": {"shared", "vanilla", "specdiff", *SMOKE["methods"]},
        "smoke.sweeps": SMOKE["sweeps"],
    }
    project.prune(**used)
    project.set(profiles=["smoke"], benchmarks=BENCHMARKS, **SMOKE)
    commit(project)
    with warm.started(aside, project.env()):
        yield Smoke(project, project.dvc("repro"))


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
    project.keep("smoke", "cpu")
    few = {
        "cpu": {"evaluate", "adapt", "trajectories"},
        "cpu.evaluate": {"specdiff2"},
        "smoke.distill": {"training", *FEW["objectives"]},
        "smoke.evaluate": {"shared", "vanilla", *FEW["methods"]},
        "smoke.baselines": FEW["baselines"],
        "smoke.sweeps": FEW["sweeps"],
        "smoke.sizes": FEW["sizes"],
    }
    project.prune(**few)
    project.set(profiles=["smoke"], benchmarks=BENCHMARKS, **FEW)
    commit(project)
    project.dvc("repro")
    return project
