"""A value that is read but not declared never reruns its stage; one declared but not read reruns it in vain."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.code.imports import ROOT
from stages.code.programs import programs
from tests.pipeline.project import STARTED
from tests.pipeline.test_closure import program_of


@pytest.fixture(scope="module")
def notes(smoke) -> dict[tuple[str, ...], dict[str, Any]]:
    """What each process of the smoke run read and imported, by its words."""
    found = [json.loads(file.read_text()) for file in smoke.project.notes.iterdir()]
    return {tuple(note["words"]): note for note in found}


def declared(key: str, params: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in params)


def leaves(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}")
    elif node not in ({}, []):  # an empty section or list hands out no value
        yield key


def test_every_key_of_params_is_declared_by_a_stage(graph):
    document = YAML(typ="safe").load(ROOT / "params.yaml")
    names = tuple(name for stage in graph for name in stage.params)
    matrix = {
        "profiles",
        "benchmarks",
        "methods",
        "objectives",
        "features",
        "baselines",
        "exports",
        "sizes",
        "sweeps",
        "reasoning",
        "graded",
    }
    profiles = [name for name, node in document.items() if "models" in (node if isinstance(node, dict) else ())]
    names += tuple(f"{name}.plan" for name in profiles)  # read by stages/plan, which is no stage of the graph
    idle = {key for top, node in document.items() for key in leaves(node, top)} - matrix
    assert not {key for key in idle if not declared(key, names)}


def test_every_declared_param_exists(graph):
    """DVC takes a missing one for a value of its own and reruns when it appears."""
    document = YAML(typ="safe").load(ROOT / "params.yaml")
    for stage in graph:
        for name in stage.params:
            node = document
            for part in name.split("."):
                assert part in node, f"{stage.name}: {name} is not in params.yaml"
                node = node[part]


@pytest.mark.slow
def test_stages_declare_what_they_read(graph, smoke, notes):
    stages = [stage for stage in graph if stage.words in notes]
    assert {stage.name for stage in stages} == set(STARTED.findall(smoke.output)) - {"code"}  # which reads no params
    undeclared = {
        stage.name: lost
        for stage in stages
        if (lost := [key for key in notes[stage.words]["read"] if not declared(key, stage.params)])
    }
    assert not undeclared


@pytest.mark.slow
def test_stages_read_what_they_declare(graph, smoke, notes):
    """Lists of names that span the matrix are read as names, not handed out as values."""
    document = smoke.project.params()
    names = {"benchmarks", "methods", "objectives", "soft_objectives", "baselines", "features"}
    names |= {"sweeps", "reasoning", "graded", "sizes"}
    idle = {}
    for stage in graph:
        if stage.words not in notes:
            continue
        # a grid may be of any method, and reads the sections of those it is of
        ours = {f"{stage.words[1]}.evaluate"} if stage.name.startswith(("grid@", "export@")) else set()
        keys = {key for name in set(stage.params) - names - ours for key in leaves(value(document, name), name)}
        if unread := keys - set(notes[stage.words]["read"]):
            idle[stage.name] = sorted(unread)
    assert not idle


def value(document: dict[str, Any], name: str) -> Any:
    node: Any = document
    for part in name.split("."):
        node = node[part]
    return node


@pytest.mark.slow
def test_stages_load_only_code_of_their_program(graph, notes):
    """The same as the check of the import closure, by what was really loaded."""
    files = {name: {file.as_posix() for file in found} for name, found in programs().items()}
    for stage in graph:
        for file in notes.get(stage.words, {"modules": []})["modules"]:
            assert file.endswith("__init__.py") or file in files[program_of(stage.words)], (stage.name, file)
