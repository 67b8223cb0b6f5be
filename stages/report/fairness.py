"""Who was trained on what: the table that says whether a comparison is fair."""

import pandas as pd

from stages.report import curves
from stages.report.frames import Frame

START = "adapt"  # every distillation objective goes on from its drafter
COLUMNS = (
    "drafter",
    "methods",
    "trained numbers",
    "steps",
    "training tokens",
    "seconds",
    "held-out streak, chain",
    "held-out streak, tree",
)


def trainings(methods: Frame, training: dict[str, Frame], objectives: list[str]) -> Frame:
    """A row for each trained drafter that a method uses: weights, steps, tokens, seconds, acceptance on held-out texts.

    Steps and tokens of a distilled drafter begin with those of the drafter it started from. Seconds are training alone,
    without validation, where the training wrote them down.
    """
    rows = []
    for name in dict.fromkeys(methods["training"].dropna()):
        users = methods[methods["training"] == name]
        parts = [START, name] if name in objectives else [name]
        if missing := [part for part in parts if part not in training]:
            rows.append({"drafter": name, "methods": ", ".join(users["method"]), "steps": f"no curve of {missing[0]}"})
            continue
        done = [training[part][training[part]["split"] == "train"] for part in parts]
        seconds = [curve["seconds"].dropna().iloc[-1] for curve in done if "seconds" in curve and len(curve)]
        rows.append(
            {
                "drafter": name,
                "methods": ", ".join(users["method"]),
                "trained numbers": _millions(users["parameters"].iloc[0]),
                "steps": " + ".join(str(len(curve)) for curve in done),
                "training tokens": f"{sum(curve['tokens'].sum() for curve in done if 'tokens' in curve):.0f}",
                "seconds": f"{sum(seconds):.0f}" if len(seconds) == len(parts) else "not recorded",
                "held-out streak, chain": curves.last(training[name], "streak"),
                "held-out streak, tree": curves.last(training[name], "tree"),
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _millions(parameters: float | None) -> str:
    return f"{parameters / 1e6:.1f} million" if parameters and parameters == parameters else "unknown"


NOTE = (
    "All were trained on the same trajectories, split alike, with one optimizer: against the verifier's words (hard "
    "targets), eagle against its hidden states as well. Rates were tuned on adapt alone and are the same for all but "
    "alignment, which goes on at a tenth of them. The numbers of steps in params.yaml are chosen so that the trainings "
    "take about the same seconds; how near they came stands here. Tokens are those of the texts read, prompts "
    "included, once for each time a text was read; the pass that gave the verifier's hidden states is in no "
    "drafter's account. The "
    "held-out streak is the expected number of accepted tokens on texts that no training saw, each training's own "
    "account of it: of the likeliest chain, and of the best-first tree where it was measured. Every tree has the same "
    "most nodes; all but that of eagle, whose shape is fixed, stop where the product of q falls below a threshold "
    "(settings below). specdiff2_mix has a second proposer, the lookup of prompt_lookup, which could join any other "
    "tree as well."
)
