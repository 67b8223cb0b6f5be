"""Measures of the report against values worked out by hand."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from stages.common import store
from stages.report import cells, cost, curves, measures, tables
from stages.report.cells import Cell
from stages.report.frames import Frame
from stages.report.params import Colours, ReportParams

STAMP = {
    "device": "cpu X",
    "cores": 2,
    "threads": 2,
    "dtype": "float32",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "python": "3.11.2",
}
NAMES = ["vanilla", "specdiff", "specdiff2_tree"]
PARAMS = ReportParams(
    resamples=200,
    confidence=0.95,
    cost_tolerance=0.1,
    colours=Colours(
        methods=dict.fromkeys(NAMES, "#0072B2"),
        trainings={"adapt": "#E69F00", "streak": "#56B4E9"},
        phases={"draft": "#CC79A7", "verify": "#009E73", "other": "#999999"},
    ),
)


def record(prompt: int, accepted: list[int], **changes: Any) -> dict[str, Any]:
    """A row of a cell: vanilla steps take 0.1 s, a cycle 0.1 + 0.03 + 0.02 s unless changed."""
    cycles, tokens = len(accepted), 1 + sum(accepted) + len(accepted)  # the first comes from the prefill
    row = {
        "benchmark": "gsm_symbolic",
        "split": "new_template",
        "method": "specdiff2_tree",
        "prompt_id": f"p{prompt}",
        "repeat": 0,
        "seed": 0,
        "temperature": 0.0,
        "output_ids": [1] * tokens,
        "new_tokens": tokens,
        "accepted": accepted,
        "num_draft_tokens": 4 * cycles,
        "window": 4,
        "nodes": 16,
        "prefill_s": 0.2,
        "decode_s": 0.15 * cycles,
        "draft_s": 0.02 * cycles,
        "verify_s": 0.10 * cycles,
        "other_s": 0.03 * cycles,
        "yardstick_tokens": 8,
        "yardstick_s": 0.8,
        "step_s": 0.1,
        "text": "x",
        "answer": None,
        "correct": None,
        "matches_vanilla": True,
        "first_difference": -1,
        "top2_gap": math.nan,
        "excused": False,
        "covered_tokens": tokens,
    }
    assert not set(changes) - set(row)
    return row | changes


def cell(records: list[dict[str, Any]], *, method: str = "specdiff2_tree", **stamp: Any) -> Cell:
    drafter = None if method == "vanilla" else {"parameters": 1000, "objective": "streak"}
    return cells.make(
        records[0]["benchmark"],
        method,
        records,
        {"stamp": STAMP | stamp, "drafter": drafter, "profile": "cpu"},
    )


def speedups(*made: Cell) -> Frame:
    return tables.speedups(list(cells.groups(list(made))), PARAMS, seed=0)


def test_records_fit_the_schema() -> None:
    assert set(record(0, [1])) == set(store.CELLS.names)


def test_acceptance_by_hand() -> None:
    """Three verifier calls accept 2, 0 and 4 of 4: 3.0 tokens per cycle, a streak of 2.0."""
    rows = cell([record(0, [2, 0, 4])]).rows
    assert measures.acceptance_length(rows) == pytest.approx(3.0)
    assert measures.accepted_streak(rows) == pytest.approx(2.0)
    reached, joint, alpha = measures.positions(rows)
    assert joint == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert reached.tolist() == [3, 2, 2, 1]
    assert alpha == pytest.approx([2 / 3, 1, 1 / 2, 1])
    assert joint.sum() == pytest.approx(measures.accepted_streak(rows))


def test_always_wrong_and_always_right() -> None:
    wrong, right = cell([record(0, [0, 0, 0])]).rows, cell([record(0, [4, 4])]).rows
    assert measures.acceptance_length(wrong) == 1
    assert measures.acceptance_length(right) == 5
    _, joint, alpha = measures.positions(wrong)
    assert joint.tolist() == [0, 0, 0, 0]
    assert alpha[0] == 0
    assert np.isnan(alpha[1:]).all(), "a position no cycle reached has no rate"


def test_pooled_and_mean_differ() -> None:
    """One long answer of streak 0, one short of streak 4: pooled follows the cycles, the mean the prompts."""
    rows = cell([record(0, [0] * 9), record(1, [4])]).rows
    assert measures.acceptance_length(rows) == pytest.approx(1 + 4 / 10)
    assert measures.acceptance_length_mean(rows) == pytest.approx((1 + 5) / 2)


def test_repeats_are_one_prompt() -> None:
    rows = cell([record(0, [4]), record(0, [0, 0, 0], repeat=1), record(1, [1])]).rows
    assert measures.acceptance_length_mean(rows) == pytest.approx((1 + 4 / 4 + 2) / 2)
    assert speedups(cell([record(0, [4]), record(0, [0], repeat=1)]))["prompts"].tolist() == [1]


@pytest.mark.parametrize(("cut", "length"), [(9, 1 + (4 + 2) / 2), (8, 1 + (4 + 1) / 2), (7, 1 + 4 / 2)])
def test_step_cut_by_end_counts_what_it_emitted(cut: int, length: float) -> None:
    """The last cycle accepted 4 of 4, but an end id or the limit left only some of its tokens."""
    rows = cell([record(0, [4, 4], new_tokens=cut)]).rows
    assert measures.acceptance_length(rows) == pytest.approx(length)


@pytest.mark.parametrize(("accepted", "tokens"), [([2, 0], 9), ([2, 0], 1), ([3, -1], 4), ([], 3)])
def test_contradicting_counters_are_refused(accepted: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match=r"gsm_symbolic/specdiff2_tree, prompt p7: .*dvc repro -f"):
        cell([record(7, accepted, new_tokens=tokens, num_draft_tokens=8)])


def test_first_token_is_nobodys_speed() -> None:
    """It comes from the prefill: 3 cycles of one token each are 3 decoded tokens of 4, at vanilla's pace exactly."""
    rows = cell([record(0, [0, 0, 0], decode_s=0.3)], method="vanilla").rows
    assert measures.speedup(rows, resamples=10, confidence=0.9, seed=0).value == pytest.approx(1.0)
    assert measures.tokens_per_s(rows) == pytest.approx(10.0)


def test_answer_without_a_token() -> None:
    made = cell([record(0, []), record(1, [1, 1])])
    table = speedups(made)
    assert table["acceptance_length_mean"].tolist() == [2.0]
    assert table["speedup"].tolist() == pytest.approx([0.4 / 0.3])


def test_speedup_exact_and_covered() -> None:
    """Two prompts: vanilla needs 1.0 s and 0.4 s for the method's tokens, the method 0.5 s and 0.3 s."""
    rows = [
        record(0, [4, 4], decode_s=0.5),
        record(1, [1, 1], decode_s=0.3, yardstick_tokens=10, yardstick_s=1.0),
    ]
    row = speedups(cell(rows)).iloc[0]
    assert row["speedup"] == pytest.approx(1.4 / 0.8)
    assert 0.4 / 0.3 <= row["speedup_low"] <= row["speedup"] <= row["speedup_high"] <= 1.0 / 0.5
    assert row["speedup_low"] < row["speedup_high"]
    assert row["tokens_per_s"] == pytest.approx(14 / 0.8)
    assert row["cost_ratio"] == pytest.approx(0.2)


def test_speedup_follows_the_paired_yardstick() -> None:
    """The machine slowed down threefold for one prompt, yardstick included: the speed-up must not move."""
    calm = [record(0, [4, 4], decode_s=0.5), record(1, [4, 4], decode_s=0.5)]
    slow = [calm[0], calm[1] | {"decode_s": 1.5, "yardstick_s": 2.4, "step_s": 0.3}]
    assert speedups(cell(slow))["speedup"][0] == pytest.approx(speedups(cell(calm))["speedup"][0])


def test_prefill_is_not_in_the_speedup() -> None:
    rows = [record(0, [2, 2]), record(1, [1])]
    late = [row | {"prefill_s": 100.0} for row in rows]
    pd.testing.assert_frame_equal(speedups(cell(rows)), speedups(cell(late)))


def test_order_of_rows_does_not_matter() -> None:
    rows = [record(i, [i % 4, 1], decode_s=0.2 + 0.01 * i) for i in range(6)]
    pd.testing.assert_frame_equal(speedups(cell(rows)), speedups(cell(rows[::-1])))


def test_bootstrap_is_deterministic_and_seeded() -> None:
    rows = cell([record(i, [i % 5, 2], decode_s=0.2 + 0.03 * i) for i in range(9)]).rows
    first, again, other = (measures.speedup(rows, resamples=300, confidence=0.9, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.value == other.value
    assert (first.low, first.high) != (other.low, other.high)
    wide = measures.speedup(rows, resamples=300, confidence=0.99, seed=1)
    assert wide.low < first.low < first.high < wide.high


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Draws of 40 prompts from a population of known ratio: about 95 in 100 intervals hold it."""
    random = np.random.default_rng(0)
    truth, held = 1.5, 0
    for trial in range(100):
        vanilla = random.uniform(0.5, 1.5, 40)
        method = vanilla / truth * random.uniform(0.8, 1.2, 40)
        rows = [
            record(i, [0], yardstick_tokens=1, yardstick_s=float(v), decode_s=float(m))
            for i, (v, m) in enumerate(zip(vanilla, method, strict=True))
        ]
        found = measures.speedup(cell(rows).rows, resamples=200, confidence=0.95, seed=trial)
        held += found.low <= truth <= found.high
    assert 86 <= held <= 100


def test_prompt_without_a_yardstick_is_not_timed() -> None:
    rows = [record(0, [4, 4]), record(1, [2], yardstick_tokens=0, yardstick_s=0.0, step_s=math.nan)]
    row = speedups(cell(rows)).iloc[0]
    assert row["speedup"] == pytest.approx(1.0 / 0.3)
    assert row["cost_ratio"] == pytest.approx(0.2)
    assert np.isnan(speedups(cell(rows[1:]))["speedup"][0])


def test_splits_are_rows_of_their_own() -> None:
    made = cell([record(0, [4]), record(1, [0], split="seen_template")])
    table = speedups(made)
    assert table["split"].tolist() == ["new_template", "seen_template"]
    assert table["acceptance_length"].tolist() == [5.0, 1.0]


def test_differences_and_coverage() -> None:
    rows = [
        record(0, [1], covered_tokens=1),
        record(1, [1], matches_vanilla=False, first_difference=0, excused=True),
        record(2, [1], matches_vanilla=False, first_difference=1),
        record(3, [1], matches_vanilla=False, first_difference=2),
    ]
    row = speedups(cell(rows)).iloc[0]
    assert (row["excused_differences"], row["unexcused_differences"]) == (1, 2)
    assert row["draft_vocab_coverage"] == pytest.approx(10 / 12)


def test_a_text_drawn_with_other_coins_is_no_difference() -> None:
    """As Leviathan's are at a temperature: never compared, so neither excused nor not."""
    rows = cell([record(0, [1]), record(1, [1], matches_vanilla=False, first_difference=-1)]).rows
    assert measures.differences(rows) == (0, 0)
    assert list(measures.compared(rows)["prompt_id"]) == ["p0"]


def table_of(*speeds: tuple[str, str, float, float]) -> Frame:
    names = ("method", "split", "speedup", "accepted_streak")
    return pd.DataFrame([{"benchmark": "b", **dict(zip(names, row, strict=True))} for row in speeds])


def test_the_table_by_method_has_a_row_for_each_and_a_gap_where_none_was_timed() -> None:
    table = table_of(("vanilla", "x", 1.0, 0.0), ("eagle2", "x", 1.204, 0.5), ("eagle2", "y", 0.999, 0.25))
    table = pd.concat([table, table_of(("medusa", "x", math.nan, 0.0), ("medusa", "y", 1.5, 1.0))])
    wide = tables.by_method(table)
    assert wide.to_numpy().tolist() == [
        ["eagle2", "1.20 (0.50)", "0.999 (0.25)", "1.10"],
        ["medusa", "n/a", "1.50 (1.00)", "n/a"],
    ]
    assert list(wide.columns) == ["method", "b x", "b y", tables.MEAN]
    assert tables.by_method(table_of(("vanilla", "x", 1.0, 0.0))).empty


def test_the_ablation_needs_all_four_and_keeps_its_order() -> None:
    names = ["specdiff2", "specdiff2_train", "specdiff", "specdiff2_test"]
    table = table_of(*((name, "x", 1 + i / 10, 0.5) for i, name in enumerate(names)))
    assert list(tables.ablation(table)["method"]) == list(tables.ALIGNMENTS)
    assert tables.ablation(table)["b x"].tolist() == ["1.20 (0.50)", "1.30 (0.50)", "1.10 (0.50)", "1.00 (0.50)"]
    assert tables.ablation(table[table["method"] != "specdiff2"]).empty


def test_accuracy_leaves_ungraded_out() -> None:
    graded = cell([record(0, [1], correct=True), record(1, [1], correct=False), record(2, [1])]).rows
    assert measures.accuracy(graded) == pytest.approx(0.5)
    assert measures.accuracy(cell([record(0, [1])]).rows) is None


def test_mixed_stamps_are_refused() -> None:
    mixed = [
        cell([record(0, [1])]),
        cell([record(0, [1], benchmark="humaneval")]),
        cell([record(0, [1])], method="specdiff", device="A100"),
    ]
    with pytest.raises(ValueError, match="different machines") as error:
        cells.same_stamp(mixed, profile="cpu")
    assert "gsm_symbolic/specdiff: device A100" in str(error.value)
    assert str(error.value).endswith("dvc repro -f -s evaluate@cpu-gsm_symbolic-specdiff")
    assert cells.same_stamp(mixed[:2], profile="cpu") == STAMP


@pytest.mark.parametrize("key", ["torch", "threads", "dtype"])
def test_every_part_of_the_stamp_counts(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} other"):
        cells.same_stamp([cell([record(0, [1])])] * 2 + [cell([record(0, [1])], **{key: "other"})], profile="cpu")


def test_cost_model_foretells_and_flags() -> None:
    """A cycle costs 1.5 steps: [4, 4] should give 5 / 1.5. A clock that lost a third is flagged."""
    honest = [record(i, [4, 4]) for i in range(3)]
    fitted = cost.fit(cell(honest).rows)
    assert fitted is not None
    assert fitted == pytest.approx((1.0, 0.2, 0.3))
    for rows, flagged in ((honest, False), ([row | {"decode_s": 0.2} for row in honest], True)):
        made = cell(rows)
        group = list(cells.groups([made]))
        line = tables.costs(group, tables.speedups(group, PARAMS, seed=0), tolerance=0.1).iloc[0]
        assert line["predicted"] == pytest.approx(5 / 1.5)
        assert line["flagged"] == flagged


def test_cost_is_fitted_over_benchmarks() -> None:
    """Three prompts of one benchmark cost 1.5 steps a cycle, one of another costs 3: that one is flagged."""
    usual = cell([record(i, [4, 4]) for i in range(3)])
    odd = cell([record(0, [4, 4], benchmark="humaneval", verify_s=0.5, decode_s=0.6)])
    group = list(cells.groups([usual, odd]))
    lines = tables.costs(group, tables.speedups(group, PARAMS, seed=0), tolerance=0.1)
    assert lines["flagged"].tolist() == [False, True]


def test_no_rounding_across_one() -> None:
    assert tables.ratio(0.9968) == "0.997"
    assert tables.ratio(1.0004) == "1.0004"
    assert float(tables.ratio(0.99999)) < 1
    assert tables.ratio(0.93) == "0.93"
    assert tables.ratio(1.0) == "1.00"


def test_training_curve_with_odd_columns() -> None:
    curve = pd.DataFrame(
        {
            "step": [1, 10, 10, 20],
            "split": ["train", "train", "valid", "valid"],
            "loss": [3.0, 2.0, 2.5, 2.25],
            "accept_1": [None, None, 0.5, 0.8],
            "accept_2": [None, None, 0.2, 0.4],
            "accept_10": [None, None, 0.0, 0.0],
            "remark": ["a", "b", "c", "d"],
        }
    )
    joint = curves.at_positions(curve)
    assert joint is not None
    assert joint.tolist() == [0.8, 0.4, 0.0], "position 10 stands after 2"
    assert curves.conditional(joint) == pytest.approx([0.8, 0.5, 0.0])
    assert curves.last(curve, "loss") == 2.25
    assert curves.last(curve, "trie16") is None
    long = curves.long_form({"adapt": curve})
    assert "remark" not in set(long["quantity"])
    assert len(long) == 4 + 3 * 2
