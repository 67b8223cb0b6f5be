"""Accuracy against a budget of seconds: curves of made rows, worked out by hand, and the vote by enumeration."""

import itertools
from typing import Any

import numpy as np
import pytest

from stages.common import store, studies
from stages.report import budgets, reasoning
from stages.report.budgets import Chain, accuracy_PB, chains, curve, one_chain, vote
from tests.stages.test_report_measures import PARAMS, STAMP, record

INF = float("inf")
SETTING = {"benchmark": "sums", "split": "test", "temperature": 0.7}


def made(prompt: str, repeat: int, seconds: float, answer: str | None, correct: bool, **changes: Any) -> dict[str, Any]:
    """A row that took so long, a fifth of it for the prefill, at 0.1 s a vanilla step."""
    times = {"prefill_s": 0.2 * seconds, "decode_s": 0.8 * seconds}
    return record(
        0, [0, 0], **(SETTING | times | {"repeat": repeat, "answer": answer, "correct": correct} | changes)
    ) | {"prompt_id": prompt}


VANILLA = [
    made("a", 0, 1.0, "5", True, method="vanilla"),
    made("a", 1, 2.0, "6", False, method="vanilla"),
    made("a", 2, 4.0, "5", True, method="vanilla"),
    made("b", 0, 3.0, None, False, method="vanilla"),
    made("b", 1, 3.0, "7", False, method="vanilla"),
    made("b", 2, 1.0, "8", True, method="vanilla"),
]


def halved(**changes: Any) -> list[dict[str, Any]]:
    """The same texts in half the time."""
    half = [row | {name: row[name] / 2 for name in ("prefill_s", "decode_s")} for row in VANILLA]
    return [row | {"method": "specdiff2_tree"} | changes for row in half]


def test_one_chain_by_hand() -> None:
    found = chains(VANILLA, VANILLA)
    assert [chain.seconds for chain in found["a"]] == pytest.approx([1.0, 2.0, 4.0])
    budgets_B = [0.5, 1.01, 3.9, 4.01, INF]
    values_PB = accuracy_PB(found, budgets_B, one_chain)
    assert values_PB[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 2 / 3])
    assert values_PB[1].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert budgets.median_answer_s(found) == pytest.approx(2.5)


def test_the_vote_takes_chains_one_after_the_other() -> None:
    found = chains(VANILLA, VANILLA)
    assert [vote(found["a"], budget) for budget in (0.9, 1.1, 3.1, 7.1)] == [0, 1, 1, 1], "a tie goes to the first seen"
    assert [vote(found["b"], budget) for budget in (3.1, 6.1, 7.1)] == [0, 0, 0], "7 was seen before 8"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_vote_by_enumeration(count: int) -> None:
    """Every pattern of answers, at every budget, against a count written another way."""
    for answers in itertools.product(["right", "wrong", "odd", None], repeat=count):
        mine = [Chain(1.0 + index, answer, answer == "right") for index, answer in enumerate(answers)]
        for bought in range(count + 1):
            budget = sum(chain.seconds for chain in mine[:bought])
            seen = [answer for answer in answers[:bought] if answer is not None]
            best = sorted(set(seen), key=lambda answer: (-seen.count(answer), seen.index(answer)))
            assert vote(mine, budget) == float(best[:1] == ["right"]), (answers, bought)
            assert vote(mine, budget + 0.99) == float(best[:1] == ["right"]), "a chain counts once it is whole"


def test_seconds_are_put_at_vanillas_pace() -> None:
    """The machine was three times as slow while the method ran: its own steps say so, and its seconds shrink."""
    slow = [
        row | {"prefill_s": 3 * row["prefill_s"], "decode_s": 3 * row["decode_s"], "step_s": 0.3, "yardstick_s": 2.4}
        for row in halved()
    ]
    wanted = chains(halved(), VANILLA)
    found = chains(slow, VANILLA)
    for name in "ab":
        assert [chain.seconds for chain in found[name]] == pytest.approx([chain.seconds for chain in wanted[name]])
    assert [chain.seconds for chain in wanted["a"]] == pytest.approx([0.5, 1.0, 2.0])


def test_a_row_without_a_timed_step_keeps_its_seconds() -> None:
    short = halved(step_s=0.0, yardstick_s=0.0, yardstick_tokens=0)
    assert chains(short, VANILLA)["a"][0].seconds == pytest.approx(0.5)


def test_rows_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="not the prompts and repeats"):
        chains(halved()[1:], VANILLA)
    with pytest.raises(ValueError, match="prompt a is not graded"):
        chains(halved(correct=None), VANILLA)


def test_the_interval_is_over_prompts() -> None:
    """Two prompts, one always right, one never: a resample gives 0, 1/2 or 1, and repeats do not narrow it."""
    values_PB = np.array([[1.0], [0.0]])
    found = curve(values_PB, resamples=500, confidence=0.9, seed=0)
    assert (found.mean_B[0], found.low_B[0], found.high_B[0]) == (0.5, 0.0, 1.0)
    certain = curve(np.ones((2, 1)), resamples=50, confidence=0.9, seed=0)
    assert (certain.low_B[0], certain.high_B[0]) == (1.0, 1.0)


# The study --------------------------------------------------------------------------------------------------


def put(profile: str, *points: tuple[str, list[dict[str, Any]]], **stamp: Any) -> None:
    for index, (method, rows) in enumerate(points):
        facts = {"method": method, "stamp": STAMP | (stamp if index else {}), "sweep": {"index": index}}
        path = studies.graded_folder(profile, "sums_budget") / f"{index}.parquet"
        store.write_parquet(path, rows, store.CELLS, facts)
    store.write_json(studies.check_file(profile), {"sweeps": ["sums_budget"], "benchmarks": {}})
    about = {"title": "Sums in time", "beside": ["Figure 6"], "points": []}
    store.write_json(studies.points_file(profile), {"sums_budget": about})


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_graded_sweeps_there_is_no_study() -> None:
    assert reasoning.studies("cpu", PARAMS, seed=0) == []


def test_a_study_says_what_the_budget_buys() -> None:
    put("cpu", ("vanilla", VANILLA), ("specdiff2_tree", halved()))
    [study] = reasoning.studies("cpu", PARAMS, seed=0)
    assert study.title == "Sums in time"
    assert "vanilla needs 2.5 s for its median answer" in study.lead
    assert "one chain of vanilla is right in 33%" in study.lead
    assert "one of specdiff2_tree, the best of the others and picked afterwards, in 50%" in study.lead
    assert "+17 points" in study.lead
    [sheet] = study.sheets
    rows = {(row["method"], row["chains"]): row for row in sheet.rows.to_dict("records")}
    assert rows["vanilla", "one"]["at once"].startswith("0.33 [")
    assert rows["specdiff2_tree", "one"]["at once"].startswith("0.50 [")
    assert rows["vanilla", "one"]["without limit"] == rows["specdiff2_tree", "one"]["without limit"] == 0.5
    assert rows["vanilla", "vote, up to 3"]["without limit"] == 0.5
    assert rows["specdiff2_tree", "one"]["median seconds"] == pytest.approx(1.25)
    [plate] = study.plates
    assert plate.svg
    assert plate.published == ("Figure 6",)
    lines = study.files["sums_budget_curves.csv"].splitlines()
    assert len(lines) == 1 + 2 * 2 * reasoning.POINTS
    assert lines[0] == "method,chains,seconds,budget,accuracy,low,high"


def test_the_figure_says_when_nothing_is_right() -> None:
    wrong = [row | {"correct": False} for row in VANILLA]
    put("cpu", ("vanilla", wrong))
    [study] = reasoning.studies("cpu", PARAMS, seed=0)
    assert "no answer is right" in study.plates[0].missing
    assert "right in 0% [0% to 0%]" in study.lead


def test_one_repeat_has_no_vote() -> None:
    put("cpu", ("vanilla", [row for row in VANILLA if row["repeat"] == 0]))
    [study] = reasoning.studies("cpu", PARAMS, seed=0)
    assert set(study.sheets[0].rows["chains"]) == {"one"}
    assert "vote" not in study.lead


@pytest.mark.parametrize(
    ("points", "stamp", "says"),
    [
        ([("specdiff2_tree", halved())], {}, "cpu.sweeps.sums_budget.vary"),
        ([("vanilla", VANILLA), ("vanilla", VANILLA)], {}, "one point each"),
        ([("vanilla", VANILLA), ("specdiff2_tree", halved())], {"cores": 64}, "several machines"),
        (
            [("vanilla", VANILLA), ("specdiff2_tree", halved(correct=None))],
            {},
            "specdiff2_tree: prompt a is not graded",
        ),
        ([("vanilla", VANILLA), ("other", halved(method="other"))], {}, "colours.methods.other"),
    ],
)
def test_sweeps_that_cannot_be_read_are_named(points, stamp, says) -> None:
    put("cpu", *points, **stamp)
    with pytest.raises(ValueError, match=says):
        reasoning.studies("cpu", PARAMS, seed=0)
