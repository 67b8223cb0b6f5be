"""The losslessness table counts answers, and tells compared ones from those with coins of their own."""

from stages.report import cells, lossless
from tests.stages.test_report_measures import cell, record


def test_counts_by_hand() -> None:
    apart = {"matches_vanilla": False}
    rows = [
        record(0, [1, 1]),
        record(1, [1], benchmark="gsm_symbolic", **apart, first_difference=0, excused=True, top2_gap=0.003),
        record(2, [1], **apart, first_difference=1, excused=True, top2_gap=0.0125),
        record(3, [1], **apart, first_difference=1, top2_gap=5.0),
        record(4, [1], **apart, first_difference=-1),
    ]
    groups = list(
        cells.groups([cell(rows), cell([record(0, [0])], method="vanilla"), cell([record(0, [1])], method="b")])
    )
    table = lossless.table(groups)
    assert list(table["method"]) == ["specdiff2_tree", "b"]
    assert table.iloc[0].tolist() == ["specdiff2_tree", 5, sum(row["new_tokens"] for row in rows), 4, 1, 2, 1, "0.013"]
    assert table.iloc[1]["largest excused gap"] == "n/a"
