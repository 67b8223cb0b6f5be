"""The losslessness table: what was compared with vanilla's text, and what came out."""

import pandas as pd

from stages.report import measures, tables
from stages.report.cells import VANILLA, Group
from stages.report.frames import Frame

COLUMNS = ["method", "answers", "tokens", "compared", "equal", "excused", "unexcused", "largest excused gap"]
NOTE = (
    "The random choice at a position is a function of seed, prompt and position alone. A method that accepts a draft "
    "exactly where it equals that choice must therefore write vanilla's text. A difference is excused only where "
    "vanilla's two best tokens lie closer than the rounding measured between a one-token and a block pass. "
    "The gap is between the logits of these two tokens. Answers that were not compared had coins of their own (a rule "
    "that keeps the law, not the text); their law is enumerated in the tests."
)


def table(groups: list[Group]) -> Frame:
    """A row for each method, all benchmarks together."""
    rows = []
    for method in dict.fromkeys(group.method for group in groups if group.method != VANILLA):
        mine: Frame = pd.concat([group.rows for group in groups if group.method == method])
        held = measures.compared(mine)
        excused, unexcused = measures.differences(mine)
        gaps = held.loc[(held["first_difference"] >= 0) & held["excused"].astype(bool), "top2_gap"]
        values = (
            method,
            len(mine),
            int(mine["new_tokens"].sum()),
            len(held),
            len(held) - excused - unexcused,
            excused,
            unexcused,
            f"{gaps.max():.2g}" if len(gaps) else tables.NONE,
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return pd.DataFrame(rows, columns=COLUMNS)
