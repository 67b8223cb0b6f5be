"""The ablations in the report: numbers by hand, the right axis, the cost model's line, and what is refused."""

import math
import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from stages.common import store, studies
from stages.report import measures, sweep_figures, sweeps
from tests.stages.test_report_measures import PARAMS, STAMP, cell, record

X = {"nodes": [4, 8, 32], "method": ["specdiff", "specdiff2_tree"]}


def point(sweep: str, index: int, x: Any, series: str, accepted: list[int], *, x_name: str, **changes: Any) -> str:
    """Write one point of three prompts; its name."""
    rows = [record(i, accepted, **changes) for i in range(3)]
    place = {"name": sweep, "point": f"p{index}", "index": index, "x": x, "x_name": x_name, "series": series}
    facts = {"stamp": STAMP, "benchmark": "gsm_symbolic", "method": rows[0]["method"]}
    path = studies.sweep_folder("cpu", sweep) / f"p{index}.parquet"
    store.write_parquet(path, rows, store.CELLS, facts | {"sweep": place | {"settings": {}}})
    return f"p{index}"


def listed(**points: list[str]) -> None:
    found = {name: {"title": name.title(), "beside": ["Figure 10"], "points": names} for name, names in points.items()}
    store.write_json(studies.points_file("cpu"), found)


def made(*, drawn: bool = False) -> list[sweeps.Study]:
    """The studies; figures take seconds, so they are drawn where a test looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(sweep_figures, "lines", lambda *_, **__: Figure())
        return sweeps.studies("cpu", PARAMS, seed=0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def nodes(**changes: Any) -> list[str]:
    """Two lines over the nodes of a tree: cycles take .15 s at 4 nodes, .19 at 8, .43 at 32: a straight line."""
    names = []
    for series, gain in (("first", 0), ("second", 1)):
        for x in X["nodes"]:
            took = {"verify_s": 4 * (0.06 + 0.01 * x), "decode_s": 4 * (0.11 + 0.01 * x)}
            accepted = [1 + gain, 2, 0, int(math.log2(x)) - 1]
            names.append(point("nodes", len(names), x, series, accepted, x_name="nodes", **took, **changes))
    return names


def test_without_a_sweep_there_is_nothing():
    assert made() == []
    listed()
    assert made() == []


def test_a_table_of_every_point_with_intervals_and_the_cost_models_line():
    listed(nodes=nodes())
    (study,) = made()
    (sheet,) = study.sheets
    table = sheet.data
    assert (study.name, study.title, sheet.name) == ("sweep_nodes", "Nodes", "sweep_nodes")
    assert list(table["x"]) == [*X["nodes"]] * 2
    assert list(table["series"]) == ["first"] * 3 + ["second"] * 3
    row = table.iloc[1]  # accepted 1, 2, 0, 2 in cycles of .19 s; vanilla steps of .1 s
    assert row["accepted_streak"] == pytest.approx(5 / 4)
    assert row["acceptance_length"] == pytest.approx(9 / 4)
    assert row["speedup"] == pytest.approx(9 * 0.1 / (4 * 0.19))
    assert (row["streak_low"], row["streak_high"]) == pytest.approx((5 / 4, 5 / 4)), "three equal prompts"
    assert row["t_verify/t_1"] == pytest.approx(1.4)
    assert (row["c"], row["o"]) == pytest.approx((0.2, 0.3))
    assert row["predicted"] == pytest.approx(9 / 4 / 1.9), "the costs are on a line, so smoothing changes nothing"
    shown = sheet.rows.iloc[1]
    assert (shown["tree nodes N"], shown["accepted streak"]) == (8, "1.25 [1.25, 1.25]")
    assert shown["speed-up"] == "1.18 [1.18, 1.18]"


def test_a_cost_that_leaves_the_line_is_seen():
    seconds = {1: 0.1, 2: 0.4, 3: 0.1}
    names = [
        point("nodes", i, x, "s", [1, 1], x_name="nodes", verify_s=2 * verify)
        for i, (x, verify) in enumerate(seconds.items())
    ]
    listed(nodes=names)
    (sheet,) = made()[0].sheets
    table = sheet.data
    cost = [1.5, 4.5, 1.5]
    assert list(table["predicted"]) == pytest.approx([2 / (sum(cost) / 3)] * 3)
    assert "smoothed to a straight line over the axis." in sheet.note


def test_two_points_or_words_are_not_smoothed():
    listed(words=[point("words", i, x, x, [1], x_name="drafter") for i, x in enumerate(("adapt", "streak", "x"))])
    study = made(drawn=True)[0]
    assert "as measured" in study.sheets[0].note
    assert study.sheets[0].data["predicted"].notna().all()
    (plate,) = study.plates
    assert not plate.missing
    assert {"adapt", "streak"} <= set(re.findall(r">([^<>]+)</text>", plate.svg))


def test_the_figure_has_the_right_scale_and_names_its_axis_and_lines():
    listed(nodes=nodes())
    (plate,) = made(drawn=True)[0].plates
    words = re.findall(r">([^<>]+)</text>", plate.svg)
    assert {"tree nodes N", "first", "second", "4", "8", "32", "verify", "draft"} <= set(words)
    assert plate.published == ("Figure 10",)
    assert "32 (second): speed-up" in plate.alt


def test_the_lead_tells_the_ends():
    listed(nodes=nodes())
    (study,) = made()
    text, fastest = study.lead, study.sheets[0].data["speedup"].max()
    assert f"{fastest:.2f}" in text
    assert "fastest point is 4 (second)" in text or "fastest point is 8 (second)" in text
    assert "slowest 32 (first)" in text
    assert "apart" in text


def test_acceptance_by_position_is_a_curve_for_each_series():
    listed(
        positions=[
            point("positions", 0, "adapt", "adapt", [0, 1, 2], x_name="position"),
            point("positions", 1, "streak", "streak", [1, 1, 3], x_name="position"),
        ]
    )
    (study,) = made()
    lines = study.files["sweep_positions_positions.csv"].splitlines()
    assert lines[0].startswith("method,j,")
    joint = [float(line.split(",")[3]) for line in lines[1:]]
    assert joint == pytest.approx([2 / 3, 1 / 3, 0, 0, 1, 1 / 3, 1 / 3, 0], abs=1e-5)
    assert "draft position j (tokens)" in study.plates[0].svg


def test_sweeps_that_others_report_are_left_to_them():
    names = nodes()
    listed(nodes=names, objectives=["p0"])
    studies.graded_folder("cpu", "nodes").mkdir(parents=True)  # left over: DVC keeps what a dropped stage made
    assert [study.name for study in made()] == ["sweep_nodes"]
    store.write_json(studies.check_file("cpu"), {"sweeps": ["nodes"], "benchmarks": {}})
    assert made() == []


def test_a_missing_point_and_another_machine_are_refused():
    listed(nodes=[*nodes(), "p9"])
    with pytest.raises(ValueError, match=r"p9\.parquet: not found; run dvc repro sweep@cpu-nodes"):
        made()
    point_rows = [record(0, [1])]
    facts = {"stamp": STAMP | {"cores": 4}, "benchmark": "gsm_symbolic", "method": "specdiff2_tree"}
    path = studies.sweep_folder("cpu", "nodes") / "p9.parquet"
    store.write_parquet(path, point_rows, store.CELLS, facts | {"sweep": {"x_name": "nodes", "x": 1, "series": "s"}})
    with pytest.raises(ValueError, match="different machines or versions"):
        made()


def test_colours_are_the_trainings_own_and_never_shared():
    found = sweeps.series_colours(["streak", "drafts 2"], PARAMS)
    assert found["streak"] == PARAMS.colours.trainings["streak"]
    assert found["drafts 2"] != found["streak"]


def test_intervals_of_the_streak_resample_prompts():
    rows = cell([record(0, [0, 0]), record(1, [4, 4])]).rows
    found = measures.streak(rows, resamples=400, confidence=0.95, seed=0)
    assert (found.value, found.low, found.high) == (2, 0, 4)
    again = measures.streak(rows, resamples=400, confidence=0.95, seed=0)
    assert found == again
