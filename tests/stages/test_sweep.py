"""A sweep: cells of every point with their place in it, vanilla's texts throughout, and a killed one goes on."""

import json
from pathlib import Path

import pytest

from stages.common import entry, store, studies
from stages.grid.__main__ import main as grid
from stages.sweep import bench
from stages.sweep.__main__ import main
from tests.stages import laboratory
from tests.stages.laboratory import EVALUATE, PROFILE, SHARED

RUN = entry.Run(profile=PROFILE, words={"sweep": "some"})
TEMPERATURES = {
    "method": "",
    "x": "shared.temperature",
    "vary": {"method": ["specdiff", "specdiff2_tree"], "shared.temperature": [0.0, 0.8]},
    "set": {"shared.repeats": 2, "shared.max_new_tokens": 6},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        laboratory.prepare()
    return folder


@pytest.fixture
def place(prepared, monkeypatch):
    """The prepared profile; a test leaves sweeps, which the next one replaces."""
    monkeypatch.chdir(prepared)


def made(**form):
    laboratory.write_params(some=form)
    grid(RUN)


def swept(**form):
    """(rows, provenance) of every point by name."""
    made(**form)
    main(RUN)
    return read()


def read():
    files = sorted(studies.sweep_folder(PROFILE, "some").iterdir())
    return {file.stem: (store.read_parquet(file, store.CELLS), store.read_provenance(file)) for file in files}


def counted(monkeypatch, *, stop_after=None):
    """The methods that get measured, in order; Ctrl-C once `stop_after` were."""
    measured, whole = [], bench.Bench.measure

    def measure(self, method, *rest):
        if len(measured) == stop_after:
            raise KeyboardInterrupt
        measured.append(method)
        return whole(self, method, *rest)

    monkeypatch.setattr(bench.Bench, "measure", measure)
    return measured


def test_a_point_is_a_cell_with_its_place_in_the_sweep(place):
    found = swept(vary={"nodes": [2, 6]}, set={"width": 3})
    assert list(found) == ["nodes-2", "nodes-6"]
    vanilla = store.read_parquet(store.cell_file(PROFILE, "sums", "vanilla"), store.CELLS)
    for rows, _ in found.values():
        assert [row["prompt_id"] for row in rows] == ["sums/0", "sums/1"]
        assert [row["output_ids"] for row in rows] == [row["output_ids"] for row in vanilla[:2]]
        assert all(row["matches_vanilla"] and row["method"] == "specdiff2_tree" for row in rows)
        assert all(row["yardstick_tokens"] > 0 and row["text"] for row in rows)
    rows, facts = found["nodes-6"]
    assert max(row["nodes"] for row in rows) == 6
    assert facts["sweep"] == {
        "name": "some",
        "point": "nodes-6",
        "index": 1,
        "x": 6,
        "x_name": "nodes",
        "series": "specdiff2_tree",
        "settings": {"nodes": 6, "width": 3},
    }
    assert facts["params"] == {
        "shared": SHARED,
        "specdiff2_tree": EVALUATE["specdiff2_tree"] | {"nodes": 6, "width": 3},
    }
    assert facts["drafter"] == {"parameters": 7, "objective": "streak"}
    assert {"stamp", "rounding", "peak_rss_mb", "profile", "benchmark", "method", "command"} <= set(facts)
    assert not [file for file in Path("data/scratch").rglob("*") if file.is_file()]


def test_vanilla_is_decoded_once_for_each_setting_that_has_no_cell(place, monkeypatch):
    measured = counted(monkeypatch)
    found = swept(**TEMPERATURES)
    assert sorted(measured) == ["specdiff", "specdiff", "specdiff2_tree", "specdiff2_tree", "vanilla", "vanilla"]
    warm, cold = (found[f"method-specdiff2_tree+shared.temperature-{t}"][0] for t in (0.8, 0.0))
    told = [(row["repeat"], row["new_tokens"], row["temperature"]) for row in warm]
    assert told == [(n // 2, 6, 0.8) for n in range(4)]
    assert all(row["matches_vanilla"] for row in warm + cold)
    assert [row["output_ids"] for row in warm] != [row["output_ids"] for row in cold]
    own_coins = found["method-specdiff+shared.temperature-0.8"][0]
    assert all(row["first_difference"] == -1 for row in own_coins), "Leviathan's coins are its own"


def test_a_killed_sweep_goes_on_with_the_next_point(place, monkeypatch):
    made(**TEMPERATURES)
    with monkeypatch.context() as patch:
        counted(patch, stop_after=3)
        with pytest.raises(KeyboardInterrupt):
            main(RUN)
    kept = {file.name: file.read_bytes() for file in Path("data/scratch").rglob("*specdiff*.parquet")}
    assert len(kept) == 1, "two settings of vanilla and a point"
    rest = counted(monkeypatch)
    main(RUN)
    assert rest == ["specdiff", "specdiff2_tree", "specdiff2_tree"]
    assert len(read()) == 4
    for name, content in kept.items():
        assert (studies.sweep_folder(PROFILE, "some") / name).read_bytes() == content, "measured once"


def test_what_was_kept_of_another_grid_is_not_used(place, monkeypatch):
    made(vary={"nodes": [2, 6]})
    with monkeypatch.context() as patch:
        counted(patch, stop_after=1)
        with pytest.raises(KeyboardInterrupt):
            main(RUN)
    measured = counted(monkeypatch)
    swept(vary={"nodes": [2, 6]}, set={"width": 2})
    assert measured == ["specdiff2_tree"] * 2


def test_several_steps_and_drafters_of_other_sizes_are_measured(place):
    found = swept(method="specdiff2_steps", x="steps", vary={"drafter": ["adapt", "size.small"], "steps": [1, 3]})
    assert [facts["sweep"]["series"] for _, facts in found.values()] == ["adapt", "adapt", "size.small", "size.small"]
    assert all(row["matches_vanilla"] for rows, _ in found.values() for row in rows)


def test_a_text_that_differs_fails_the_sweep(place):
    """A grid whose vanilla texts are another verifier's, hash and all."""
    made(vary={"nodes": [2]})
    file, cell = studies.grid_file(PROFILE, "some"), store.cell_file(PROFILE, "sums", "vanilla")
    content = cell.read_bytes()
    rows, facts = store.read_parquet(cell, store.CELLS), store.read_provenance(cell)
    rows[0]["output_ids"][4] += 1
    store.write_parquet(cell, rows, store.CELLS, facts)
    document = json.loads(file.read_text())
    document["points"][0]["reference"]["sha256"] = studies.texts_sha256(row["output_ids"] for row in rows[:2])
    file.write_text(json.dumps(document))
    try:
        with pytest.raises(ValueError, match=r"some/nodes-2\.parquet: 1 of 2 texts differ.*sums/0 at token 4"):
            main(RUN)
    finally:
        cell.write_bytes(content)


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ("drafter", r"streak: not the drafter that the grid pins; run dvc repro grid"),
        ("reference", r"vanilla\.parquet: not the texts that the grid pins"),
        ("prompts", r"sums\.parquet: prompt sums/0 is not the one that the grid pins"),
    ],
)
def test_what_is_not_as_pinned_is_refused(place, pinned, message):
    made(vary={"nodes": [2]})
    file = studies.grid_file(PROFILE, "some")
    document = json.loads(file.read_text())
    entry_ = document["prompts"][0] if pinned == "prompts" else document["points"][0][pinned]
    entry_["sha256"] = "0" * 64
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        main(RUN)
