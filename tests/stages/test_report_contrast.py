"""Methods against each other, on the same prompts: exact ratios, intervals of the ratio itself, what was paired."""

import math

import pandas as pd
import pytest

from stages.report import cells, contrast, tables
from tests.stages.test_report_measures import PARAMS, cell, record

BOOTSTRAP = {"resamples": 400, "confidence": 0.95, "seed": 0}


def method(name, seconds, **changes):
    """A cell of prompts that all emit 8 tokens in the seconds given; vanilla would take 0.8 s."""
    return cell([record(i, [4, 4], decode_s=s, **changes) for i, s in enumerate(seconds)], method=name)


def both(*made):
    groups = list(cells.groups(list(made)))
    return groups, tables.speedups(groups, PARAMS, seed=0)


def test_the_ratio_is_that_of_the_speed_ups() -> None:
    found, prompts = contrast.ratio(method("a", [0.2, 0.4]).rows, method("b", [0.5, 0.7]).rows, **BOOTSTRAP)
    assert found.value == pytest.approx(1.2 / 0.6)
    assert found.low <= found.value <= found.high
    assert prompts == 2


def test_prompts_are_paired_so_what_makes_one_slow_for_all_cancels() -> None:
    """One method takes four fifths of the other's time on every prompt, however long each takes."""
    slow = [0.2, 0.9, 3.0, 0.4, 1.7]
    quick = [0.8 * s for s in slow]
    found, _ = contrast.ratio(method("a", quick).rows, method("b", slow).rows, **BOOTSTRAP)
    assert found == pytest.approx((1.25, 1.25, 1.25))
    groups, table = both(method("a", quick), method("b", slow))
    a, b = table.to_dict("records")
    assert a["speedup_low"] < b["speedup_high"], "the intervals against vanilla overlap all the same"
    assert contrast.against_all(groups, table, PARAMS, seed=0)["low"].tolist() == pytest.approx([1.25])


def test_only_prompts_of_both_count() -> None:
    a = cell([record(i, [4, 4], decode_s=0.4) for i in (0, 1, 2)], method="a")
    b = cell([record(i, [4, 4], decode_s=0.8 if i < 3 else 100.0) for i in (1, 2, 3)], method="b")
    found, prompts = contrast.ratio(a.rows, b.rows, **BOOTSTRAP)
    assert (found.value, prompts) == (pytest.approx(2.0), 2)
    lone, none = contrast.ratio(a.rows[:1], b.rows, **BOOTSTRAP)
    assert math.isnan(lone.value)
    assert none == 0


def test_the_same_prompt_id_on_another_benchmark_is_another_prompt() -> None:
    a, b = method("a", [0.4]), method("b", [0.8], benchmark="humaneval")
    assert contrast.ratio(a.rows, b.rows, **BOOTSTRAP)[1] == 0


def test_the_leader_has_the_highest_geometric_mean_over_all_places() -> None:
    rows = [("a", "x", 4.0), ("a", "y", 0.5), ("b", "x", 1.5), ("b", "y", 1.5), ("c", "x", 9.0), ("vanilla", "x", 99.0)]
    table = pd.DataFrame([{"benchmark": "m", "method": n, "split": s, "speedup": v} for n, s, v in rows])
    assert contrast.leader(table) == "b", "sqrt(4 * .5) < 1.5, and c was not timed on y"
    assert tables.overall(table).dropna().to_dict() == pytest.approx({"a": math.sqrt(2), "b": 1.5})
    assert contrast.leader(table[table["method"] == "vanilla"]) == ""


def test_the_leader_meets_everyone_everywhere_and_over_all() -> None:
    made = [
        method("vanilla", [0.8, 0.8]),
        method("a", [0.4, 0.4]),
        method("b", [0.8, 0.8]),
        method("a", [0.2], benchmark="humaneval", split="test"),
        method("b", [0.3], benchmark="humaneval", split="test"),
    ]
    groups, table = both(*made)
    found = contrast.against_all(groups, table, PARAMS, seed=0)
    assert found[["method", "against"]].drop_duplicates().to_numpy().tolist() == [["a", "b"]]
    ratios = found.set_index("benchmark")["ratio"].to_dict()
    assert ratios == pytest.approx({"gsm_symbolic": 2.0, "humaneval": 1.5, "all": 1.9})
    wide = contrast.wide(found, ["against"])
    assert list(wide.columns) == ["against", "gsm_symbolic new_template", "humaneval test", "all"]
    assert wide.iloc[0].tolist()[:3] == ["b", "2.00 [2.00, 2.00]", "1.50 [1.50, 1.50]"]


def test_gains_are_of_pairs_that_differ_in_one_thing_and_were_both_measured() -> None:
    made = [method("specdiff2", [0.4]), method("specdiff2_train", [0.5]), method("specdiff2_tree", [0.3])]
    groups, _ = both(*made)
    found = contrast.gains(groups, PARAMS, seed=0).to_dict("records")
    assert [(row["what"], row["ratio"]) for row in found] == [
        ("test-time alignment of the distilled drafter", pytest.approx(1.25))
    ]
    assert contrast.gains(groups[:1], PARAMS, seed=0).empty
    assert contrast.wide(contrast.gains(groups[:1], PARAMS, seed=0), ["what"]).empty
