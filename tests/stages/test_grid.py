"""A grid: all settings of every point, everything it stands on pinned, and every mistake named by its key."""

import pytest

from stages.common import entry, params, store, studies
from stages.grid import drafters
from stages.grid.__main__ import grid, main
from tests.stages import laboratory
from tests.stages.laboratory import EVALUATE, PROFILE, SHARED


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """One profile for all tests: a grid changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("grid"))
        laboratory.prepare()
        yield


def made(**form):
    laboratory.write_params(some=form)
    return grid(PROFILE, "some")


def test_a_point_has_all_its_settings_and_what_it_stands_on():
    found = made(vary={"nodes": [2, 8]}, set={"width": 3, "threshold": 0})
    assert (found["benchmark"], found["split"], found["x_name"]) == ("sums", "test", "nodes")
    assert [prompt["id"] for prompt in found["prompts"]] == ["sums/0", "sums/1"]
    first, second = found["points"]
    assert first["params"] == EVALUATE["specdiff2_tree"] | {"nodes": 2, "width": 3, "threshold": 0.0}
    assert (second["name"], second["index"], second["x"], second["series"]) == ("nodes-8", 1, 8, "specdiff2_tree")
    assert first["settings"] == {"nodes": 2, "width": 3, "threshold": 0}
    assert first["shared"] == SHARED
    folder = store.drafter_folder(PROFILE, "streak")
    pinned = {"name": "streak", "folder": folder.as_posix(), "sha256": store.sha256_folder(folder)}
    assert first["drafter"] == second["drafter"] == pinned
    assert first["reference"]["file"] == store.cell_file(PROFILE, "sums", "vanilla").as_posix()


def test_other_sampling_has_no_vanilla_cell():
    temperatures = {"x": "shared.temperature", "vary": {"shared.temperature": [0, 0.5]}}
    cold, warm = made(**temperatures)["points"]
    assert cold["reference"] is not None
    assert warm["reference"] is None
    assert warm["shared"] == SHARED | {"temperature": 0.5}
    assert made(benchmark="apart", vary={"nodes": [2]})["points"][0]["reference"] is None


def test_the_drafters_steps_and_layers_stand_on_the_axis():
    drafters = ["streak@0", "streak@2", "streak"]
    found = made(x="drafter.steps", vary={"drafter": drafters})["points"]
    assert [(point["x"], point["series"]) for point in found] == [(0, "streak"), (2, "streak"), (6, "streak")]
    assert found[0]["drafter"]["folder"] == store.drafter_folder(PROFILE, "adapt").as_posix()
    assert found[1]["drafter"]["folder"] == store.checkpoint_folder(PROFILE, "streak", 2).as_posix()
    found = made(x="drafter.layers", vary={"drafter": ["size.small", "adapt"]})["points"]
    assert [point["x"] for point in found] == [1, 2]
    assert found[0]["drafter"]["folder"] == studies.size_folder(PROFILE, "small").as_posix()


def test_methods_may_be_varied_and_some_draft_without_a_model():
    methods = ["vanilla", "prompt_lookup", "specdiff2"]
    found = made(method="", x="method", vary={"method": methods}, set={"specdiff2.drafts": 4})["points"]
    assert [point["drafter"] and point["drafter"]["name"] for point in found] == [None, None, "streak"]
    assert found[2]["params"]["drafts"] == 4


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"method": "other", "vary": {"nodes": [2]}}, r"p\.sweeps\.some\.method: no method 'other'; .*dyspec"),
        ({"vary": {"nodes": [2]}, "set": {"drafts": 2}}, r"some\.set\.drafts: not a setting of specdiff2_tree"),
        ({"vary": {"nodes": [2, 0]}}, r"some\.vary\.nodes: 0 is out of range"),
        ({"vary": {"nodes": [2, 2.5]}}, r"some\.vary\.nodes: 2\.5 is not of type int"),
        ({"vary": {"nodes": [2]}, "set": {"shared.repeats": 0}}, r"some\.set\.shared\.repeats: 0 is out of range"),
        ({"vary": {"nodes": [2], "drafter": ["none"]}}, r"some\.vary\.drafter: no drafter 'none'; .*adapt"),
        ({"vary": {"nodes": [2]}, "set": {"drafter": "size.x"}}, r"some\.set\.drafter: no drafter 'size\.x'.*small"),
        ({"vary": {"nodes": [2]}, "set": {"drafter": "streak@3"}}, r"no checkpoint of step 3; it kept 0, 2"),
        ({"vary": {"nodes": [2]}, "set": {"drafter": "first@3"}}, r"no checkpoints of 'first'"),
        ({"vary": {"nodes": [2]}, "set": {"drafter": "streak@x"}}, r"some\.set\.drafter: 'streak@x': what follows @"),
        ({"vary": {"nodes": [2]}, "benchmark": "none"}, r"some\.benchmark: no benchmark 'none'; .*sums"),
        ({"vary": {"nodes": [2]}, "split": "none"}, r"some\.split: no split 'none'; there are test"),
        ({"vary": {"nodes": [2]}, "prompts": 4}, r"some\.prompts: 4, but the split has 3;.*splits\.test\.limit"),
        ({"method": "speculative", "x": "gamma", "vary": {"gamma": [2]}}, r"p\.evaluate\.speculative\.drafter: "),
        ({"method": "specdiff2_steps", "x": "steps", "vary": {"steps": [4]}}, r"steps: 4 for a window of 3"),
        ({"method": "prompt_lookup", "x": "gamma", "vary": {"gamma": [2]}, "set": {"drafter": "adapt"}}, r"type null"),
        ({"method": "eagle", "x": "nodes", "vary": {"nodes": [2]}}, r"p\.evaluate\.eagle: missing"),
    ],
)
def test_mistakes_are_named(form, message):
    with pytest.raises(params.ParamError, match=message):
        made(**form)


def test_a_drafter_that_is_trained_no_longer_is_not_used(monkeypatch):
    """It may lie on disk still, as another run left it."""
    monkeypatch.setattr(drafters, "keys_at", lambda name: [])
    assert made(vary={"nodes": [2]}, set={"drafter": "adapt"})["points"]
    for name in ("streak", "streak@2", "size.small"):
        with pytest.raises(params.ParamError, match=rf"set\.drafter: '{name}' is not trained any more"):
            made(vary={"nodes": [2]}, set={"drafter": name})


def test_the_stage_writes_the_grid_and_a_new_drafter_changes_it():
    laboratory.write_params(some={"vary": {"nodes": [2]}, "set": {"drafter": "streak@2"}})
    main(entry.Run(profile=PROFILE, words={"sweep": "some"}))
    before = store.read_json(studies.grid_file(PROFILE, "some"))
    card = store.checkpoint_folder(PROFILE, "streak", 2) / "drafter.json"
    text = card.read_text()
    card.write_text(text + "\n")
    try:
        main(entry.Run(profile=PROFILE, words={"sweep": "some"}))
    finally:
        card.write_text(text)
    after = store.read_json(studies.grid_file(PROFILE, "some"))
    assert before["points"][0].pop("drafter")["sha256"] != after["points"][0].pop("drafter")["sha256"]
    assert before == after
