"""The form of a sweep: what its lines spell, and that every mistake is named by its key."""

import json
from pathlib import Path

import pytest

from stages.common import entry, params, store, studies, sweeps
from stages.points.__main__ import main

BASE = {"benchmark": "b", "split": "s", "prompts": 2, "method": "m", "x": "gamma", "vary": {"gamma": [2, 4]}}


LISTS = {"benchmarks": ["b"], "reasoning": [], "graded": [], "features": [], "soft_objectives": []}


def write(*names, lists=None, **forms):
    """params.yaml with these sections, of which those named are measured."""
    profile = {"models": {}, "sweeps": forms, "score": {"graders": {"c": "answer"}}}
    document = LISTS | {"sweeps": list(names), "p": profile} | (lists or {})
    Path(params.PARAMS).write_text(json.dumps(document))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(**changes):
    write(some={key: value for key, value in (BASE | changes).items() if value is not None})
    return sweeps.read("p", "some")


def test_a_product_of_lists_makes_the_points_and_their_series():
    vary = {"method": ["m", "n"], "gamma": [2, 4], "shared.temperature": [0.0, 0.5]}
    found = sweeps.points(read(method=None, vary=vary, set={"width": 3, "n.nodes": 8}))
    assert [point.index for point in found] == list(range(8))
    assert found[0].name == "method-m+gamma-2+shared.temperature-0.0"
    assert len({point.name for point in found}) == 8
    assert [point.x for point in found] == [2, 2, 4, 4] * 2
    assert found[1].series == "m, temperature 0.5"
    assert found[1].settings == {"width": 3, "gamma": 2, "shared.temperature": 0.5}
    assert found[7].settings == {"width": 3, "nodes": 8, "gamma": 4, "shared.temperature": 0.5}
    assert (found[7].method, found[7].series) == ("n", "n, temperature 0.5")


def test_one_varied_key_makes_one_series_called_after_the_method():
    assert [point.series for point in sweeps.points(read())] == ["m", "m"]


def test_the_drafter_may_give_the_number_on_the_axis():
    vary = {"drafter": ["streak@0", "streak@6", "first@6"], "drafts": [1, 2]}
    found = sweeps.points(read(x="drafter.steps", vary=vary))
    assert [point.x for point in found] == [None] * 6
    assert [point.series for point in found][::2] == ["streak, drafts 1", "streak, drafts 1", "first, drafts 1"]
    assert found[2].name == "drafter-streak_6+drafts-1"
    sizes = sweeps.points(read(x="drafter.layers", vary={"drafter": ["size.a", "adapt"]}))
    assert {point.series for point in sizes} == {"m"}


def test_over_positions_a_point_is_a_curve():
    found = sweeps.points(read(x="position", vary={"drafter": ["adapt", "streak"]}))
    assert [(point.x, point.series) for point in found] == [("adapt", "adapt"), ("streak", "streak")]


def test_a_line_of_one_method_wins_over_one_of_all():
    form = read(method=None, vary={"method": ["m", "n"], "gamma": [1]}, set={"m.nodes": 8, "nodes": 2})
    assert [point.settings["nodes"] for point in sweeps.points(form)] == [8, 2]
    assert (form.where("nodes", "m"), form.where("nodes", "n")) == ("set.m.nodes", "set.nodes")
    assert (form.where("gamma", "n"), form.where("method", "n"), form.where("width", "m")) == (
        "vary.gamma",
        "vary.method",
        "",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vary": {}}, r"vary: empty"),
        ({"vary": {"gamma": []}}, r"vary\.gamma: an empty list"),
        ({"vary": {"gamma": [2, 4, 2]}}, r"vary\.gamma: .*twice"),
        ({"vary": {"gamma": 2}}, r"p\.sweeps\.some\.vary\.gamma: 2 is not a list"),
        ({"set": {"gamma": 3}}, r"set\.gamma: varied as well"),
        ({"set": {"method": "n"}}, r"set\.method: write it as `method`"),
        ({"method": None}, r"method: write it here or vary it"),
        ({"vary": {"method": ["m", "n"], "gamma": [2]}}, r"method: write it here or vary it"),
        ({"x": "nodes"}, r"x: 'nodes' is not varied; write one of gamma"),
        ({"x": "drafter.steps"}, r"x: drafter\.steps needs drafters"),
        ({"set": {"shared.excuse_multiple": 1.0}}, r"set\.shared\.excuse_multiple: not among.*temperature"),
        ({"vary": {"gamma": [2], "m.nodes": [3]}}, r"vary\.m\.nodes: of one method only.*vary nodes"),
        ({"set": {"other.nodes": 3}}, r"set\.other\.nodes: no method 'other' in this sweep; it has m"),
        ({"prompts": 0}, r"p\.sweeps\.some\.prompts: 0 is out of range"),
        ({"wrong": 1}, r"p\.sweeps\.some\.wrong: unknown"),
        ({"split": None}, r"p\.sweeps\.some\.split: missing"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(params.ParamError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("name", "found"), [("streak", ("streak", None)), ("streak@6", ("streak", 6)), ("a@0", ("a", 0))]
)
def test_names_of_checkpoints(name, found):
    assert sweeps.steps_of(name) == found


@pytest.mark.parametrize("name", ["streak@", "streak@last", "streak@-1"])
def test_a_checkpoint_without_a_number_is_refused(name):
    with pytest.raises(params.ParamError, match="number of steps, as in streak@6"):
        sweeps.steps_of(name)


def points():
    main(entry.Run(profile="p", words={}))
    return store.read_json(studies.points_file("p"))


def test_the_list_of_points_is_there_without_a_sweep():
    write(idle=BASE)
    assert points() == {}


def test_the_list_names_what_is_measured_and_checks_the_rest():
    write("some", some=BASE | {"title": "Window", "beside": ["Figure 10"]}, idle=BASE)
    assert points() == {"some": {"title": "Window", "beside": ["Figure 10"], "points": ["gamma-2", "gamma-4"]}}
    write("some", some=BASE, idle=BASE | {"x": "nodes"})
    with pytest.raises(params.ParamError, match=r"p\.sweeps\.idle: x: 'nodes' is not varied"):
        points()
    write("absent", some=BASE)
    with pytest.raises(params.ParamError, match=r"p\.sweeps\.absent: missing"):
        points()
    write(**{"Not a name": BASE})
    with pytest.raises(params.ParamError, match="'Not a name' names files"):
        points()


METHODS = {"method": ["vanilla", "m"]}
BUDGET = {key: value for key, value in BASE.items() if key != "method"} | {"x": "method", "vary": METHODS}


@pytest.mark.parametrize(
    ("form", "lists", "message"),
    [
        (BASE | {"benchmark": "c"}, {}, r"p\.sweeps\.some\.benchmark: 'c' is not downloaded; name it in reasoning"),
        (BUDGET, {"graded": ["other"]}, r"graded: 'other' is not among sweeps"),
        (BUDGET, {"graded": ["some"]}, r"p\.score\.graders\.b: missing; graded sweep 'some'"),
        (
            BASE | {"benchmark": "c"},
            {"graded": ["some"], "reasoning": ["c"]},
            r"p\.sweeps\.some: a graded sweep varies",
        ),
        (BASE, {"soft_objectives": ["soft"]}, r"soft_objectives: .* write features: \[verifier\]"),
    ],
)
def test_what_cannot_be_measured_or_graded_is_refused_ahead_of_everything(form, lists, message):
    write("some", lists=lists, some=form)
    with pytest.raises(params.ParamError, match=message):
        points()
    allowed = {"reasoning": ["c"], "graded": ["some"], "soft_objectives": ["soft"], "features": ["verifier"]}
    write("some", lists=allowed, some=BUDGET | {"benchmark": "c"})
    assert points()["some"]["points"] == ["method-vanilla", "method-m"]


def test_a_section_left_blank_is_named():
    Path(params.PARAMS).write_text(json.dumps(LISTS | {"sweeps": [], "p": {"models": {}, "sweeps": None}}))
    with pytest.raises(params.ParamError, match=r"p\.sweeps: None is not a section"):
        points()
