"""The fairness table counts what a drafter really saw, its start included."""

import pandas as pd

from stages.report.fairness import trainings


def curve(steps, *, tokens, seconds=None, streak):
    rows = [{"step": i + 1, "split": "train", "tokens": tokens} for i in range(steps)]
    if seconds is not None:
        rows = [row | {"seconds": seconds * (i + 1)} for i, row in enumerate(rows)]
    return pd.DataFrame([*rows, {"step": steps, "split": "valid", "streak": streak}])


METHODS = pd.DataFrame(
    {
        "method": ["vanilla", "specdiff", "specdiff2", "specdiff2_trie", "eagle", "eagle2", "prompt_lookup"],
        "training": [None, "adapt", "streak", "streak", "eagle", "eagle", None],
        "parameters": [None, 2e6, 2e6, 2e6, 1e6, 1e6, None],
    }
)
CURVES = {
    "adapt": curve(4, tokens=10, streak=0.5),
    "streak": curve(2, tokens=10, streak=0.7),
    "eagle": curve(3, tokens=5, seconds=2.0, streak=0.4),
}


def test_a_distilled_drafter_has_the_tokens_of_its_start_too():
    table = trainings(METHODS, CURVES, ["streak"]).set_index("drafter")
    assert list(table.index) == ["adapt", "streak", "eagle"]
    assert list(table["training tokens"]) == ["40", "60", "15"]
    assert list(table["steps"]) == ["4", "4 + 2", "3"]
    assert table.loc["streak", "methods"] == "specdiff2, specdiff2_trie"
    assert table.loc["streak", "held-out streak, chain"] == 0.7


def test_seconds_are_told_only_where_every_part_was_timed():
    table = trainings(METHODS, CURVES, ["streak"]).set_index("drafter")
    assert list(table["seconds"]) == ["not recorded", "not recorded", "6"]
    timed = CURVES | {"adapt": curve(4, tokens=10, seconds=3.0, streak=0.5)}
    timed["streak"] = curve(2, tokens=10, seconds=1.0, streak=0.7)
    assert trainings(METHODS, timed, ["streak"]).set_index("drafter").loc["streak", "seconds"] == "14"


def test_a_drafter_without_a_curve_keeps_its_row():
    table = trainings(METHODS, {"eagle": CURVES["eagle"]}, ["streak"]).set_index("drafter")
    assert list(table["steps"]) == ["no curve of adapt", "no curve of adapt", "3"]
