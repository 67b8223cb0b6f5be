"""The opening paragraph says what the rows say, whichever way they fell."""

import pandas as pd
import pytest

from stages.report import content, findings
from tests.stages.test_report_measures import NAMES, PARAMS, STAMP, cell, record

COLOURS = PARAMS.colours
OTHERS = ["eagle2", "medusa", "specdiff2", "specdiff2_train"]


def built(curves=None, objectives=(), **seconds):
    """A report of methods that take these seconds for 8 tokens on each prompt; vanilla would take 0.8."""
    made = [
        cell([record(i, [4, 4], decode_s=s) for i, s in enumerate(values)], method=name)
        for name, values in {"vanilla": [0.8, 0.8, 0.8], **seconds}.items()
    ]
    params = type(PARAMS)(
        resamples=100,
        confidence=0.95,
        cost_tolerance=0.1,
        colours=type(COLOURS)(
            methods=dict.fromkeys([*NAMES, *OTHERS], "#0072B2"), trainings=COLOURS.trainings, phases=COLOURS.phases
        ),
    )
    return content.build("cpu", made, curves or {}, trainings=[], objectives=list(objectives), params=params, seed=0)


def test_who_leads_whom_by_how_much_and_who_is_not_told_apart() -> None:
    report = built(specdiff2_tree=[0.4, 0.5, 0.3], eagle2=[0.8, 1.0, 0.6], medusa=[0.3, 0.55, 0.36])
    said = " ".join(findings.paragraph(report))
    assert "over all 3 together, specdiff2_tree is faster than 1 of the other 2 methods" in said
    assert "the nearest being eagle2 (2.00 [2.00, 2.00] times its speed)" in said
    assert "not told apart from medusa (1.01 [" in said
    assert "specdiff2_tree 1.01 [" in said
    assert "times medusa, not told apart" in said


def test_a_rival_that_wins_is_said_to_win() -> None:
    said = " ".join(findings.paragraph(built(specdiff2_tree=[0.8, 0.8], eagle2=[0.4, 0.4])))
    assert "The fastest method is eagle2." in said
    assert "specdiff2_tree 0.50 [0.50, 0.50] times eagle2, slower" in said


def test_slow_rows_are_counted_where_they_are() -> None:
    said = findings.slower(built(specdiff2_tree=[0.4, 0.4], eagle2=[1.6, 1.6]))
    assert said == (
        "1 of 2 rows are faster than vanilla with the whole interval, 1 slower (1 on gsm_symbolic (new_template))."
    )
    assert findings.slower(built(specdiff2_tree=[0.4])) == ""


def test_what_training_and_the_parts_bought() -> None:
    def curve(streak):
        return pd.DataFrame([{"step": 1, "split": "valid", "streak": streak}])

    report = built({"adapt": curve(0.5), "streak": curve(0.75)}, ["streak"], specdiff2=[0.4], specdiff2_train=[0.6])
    assert findings.alignment(report) == (
        "Training bought, in tokens expected to be accepted per cycle on held-out prompts: for the likeliest chain "
        "0.50 after adapt and 0.75 after streak."
    )
    assert "test-time alignment of the distilled drafter 1.50 [1.50, 1.50]" in findings.parts(report)
    bare = built(specdiff2=[0.4])
    assert (findings.alignment(bare), findings.parts(bare), findings.rivals(bare), findings.lead(bare)) == ("",) * 4


def test_places_with_one_side_alone_are_not_compared() -> None:
    assert findings.rivals(built(specdiff2=[0.4], specdiff2_tree=[0.3])) == ""


def test_the_limits_follow_the_run() -> None:
    from stages.report import words

    said = " ".join(words.limits(built(specdiff2=[0.4], eagle2=[0.5])))
    assert f"One machine ({STAMP['device']}, {STAMP['dtype']})" in said
    assert "Of 2 at 95% about 1 can be expected to miss" in said
    assert "how good it is was not measured" in said


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_counts(number: int, said: str) -> None:
    assert findings.count(number, "row") == said
