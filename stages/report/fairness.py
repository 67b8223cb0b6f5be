"""Who was trained on what: the table that says whether a comparison is fair."""

import pandas as pd

from stages.report import curves
from stages.report.frames import Frame

START = "adapt"  # every distillation objective goes on from its drafter


def trainings(methods: Frame, training: dict[str, Frame], objectives: list[str]) -> Frame:
    """A row for each trained drafter that a method uses: weights, steps, tokens, seconds, acceptance on held-out texts.

    Steps and tokens of a distilled drafter begin with those of the drafter it started from. Seconds are training alone,
    without validation, where the training wrote them down.
    """
    rows = []
    for name in dict.fromkeys(n for n in methods["training"] if n in training):
        users = methods[methods["training"] == name]
        parts = [START, name] if name in objectives and START in training else [name]
        done = [training[part][training[part]["split"] == "train"] for part in parts]
        seconds = [curve["seconds"].dropna().iloc[-1] for curve in done if "seconds" in curve and len(curve)]
        rows.append(
            {
                "drafter": name,
                "methods": ", ".join(users["method"]),
                "trained numbers": f"{users['parameters'].iloc[0] / 1e6:.1f} million",
                "steps": " + ".join(str(len(curve)) for curve in done),
                "training tokens": int(sum(curve["tokens"].sum() for curve in done if "tokens" in curve)),
                "seconds": f"{sum(seconds):.0f}" if len(seconds) == len(parts) else "not recorded",
                "held-out streak, chain": curves.last(training[name], "streak"),
                "held-out streak, tree": curves.last(training[name], "tree"),
            }
        )
    return pd.DataFrame(rows)


NOTE = (
    "All were trained on the same trajectories, split alike. Tokens are those of the texts read, prompts included, "
    "once for each time a text was read. The held-out streak is the expected number of accepted tokens on texts that "
    "no training saw; each training's own account of it, comparable in kind."
)
