"""The speed-up table, a row for each benchmark, split and method; tables as CSV and Markdown (latex.py: LaTeX)."""

import math

import numpy as np
import pandas as pd

from stages.report import cost, measures
from stages.report.cells import VANILLA, Group
from stages.report.frames import Column, Frame
from stages.report.params import ReportParams

COLUMNS = (
    "benchmark",
    "split",
    "method",
    "prompts",
    "speedup",
    "speedup_low",
    "speedup_high",
    "acceptance_length",
    "acceptance_length_mean",
    "accepted_streak",
    "cost_ratio",
    "tokens_per_s",
    "excused_differences",
    "unexcused_differences",
    "draft_vocab_coverage",
)
NONE = "n/a"


def speedups(groups: list[Group], params: ReportParams, *, seed: int) -> Frame:
    """Every number of the table. The prompts of a benchmark are resampled alike for every method."""
    rows = []
    for group in groups:
        ratio = measures.speedup(group.rows, resamples=params.resamples, confidence=params.confidence, seed=seed)
        excused, unexcused = measures.differences(group.rows)
        rows.append(
            {
                "benchmark": group.benchmark,
                "split": group.split,
                "method": group.method,
                "prompts": group.rows["prompt_id"].nunique(),
                "speedup": ratio.value,
                "speedup_low": ratio.low,
                "speedup_high": ratio.high,
                "acceptance_length": measures.acceptance_length(group.rows),
                "acceptance_length_mean": measures.acceptance_length_mean(group.rows),
                "accepted_streak": measures.accepted_streak(group.rows),
                "cost_ratio": measures.cost_ratio(group.rows),
                "tokens_per_s": measures.tokens_per_s(group.rows),
                "excused_differences": excused,
                "unexcused_differences": unexcused,
                "draft_vocab_coverage": measures.coverage(group.rows),
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def costs(groups: list[Group], table: Frame, *, tolerance: float) -> Frame:
    """Fitted costs of each drafting method, and predicted beside measured speed-up."""
    rows = []
    fits = {}
    for method in dict.fromkeys(group.method for group in groups if group.method != VANILLA):
        fits[method] = cost.fit(pd.concat([group.rows for group in groups if group.method == method]))
    for group, speedup in zip(groups, table["speedup"], strict=True):
        fitted = fits.get(group.method)
        if fitted is None or math.isnan(speedup):
            continue
        guess = cost.predict(fitted, group.rows, measured=speedup, tolerance=tolerance)
        cycles = group.rows["cycles"].sum()
        rows.append(
            {
                "benchmark": group.benchmark,
                "split": group.split,
                "method": group.method,
                "t_verify/t_1": fitted.verify,
                "c": fitted.draft,
                "o": fitted.other,
                "accepted_streak": measures.accepted_streak(group.rows),
                "predicted": guess.predicted,
                "measured": guess.measured,
                "error": guess.error,
                "flagged": guess.flagged,
                "draft_ms": 1e3 * group.rows["draft_s"].sum() / cycles,
                "verify_ms": 1e3 * group.rows["verify_s"].sum() / cycles,
                "other_ms": 1e3 * group.rows["other_s"].sum() / cycles,
                "step_ms": 1e3 * measures.timed(group.rows)["step_s"].median(),
            }
        )
    return pd.DataFrame(rows)


MEAN = "geometric mean"


def by_method(table: Frame) -> Frame:
    """The paper's Table 2: a row for each method, a column for each benchmark and split: speed-up (accepted streak).

    With several places the last column is the geometric mean of the speed-ups, n/a for a method that lacks a place.
    """
    rows = drafting(table)
    if rows.empty:
        return pd.DataFrame()
    texts = [
        f"{ratio(speed)} ({shown('', float(streak))})"
        for speed, streak in zip(rows["speedup"], rows["accepted_streak"], strict=True)
    ]
    wide = _by_place(rows, texts)
    if wide.shape[1] > 1:
        wide[MEAN] = [ratio(value) for value in overall(table)]
    return wide.fillna(NONE).reset_index().rename_axis(columns=None)


def overall(table: Frame) -> Column:
    """Geometric mean of each method's speed-ups over benchmarks and splits; NaN where it lacks one."""
    rows = drafting(table)
    if rows.empty:
        return pd.Series(dtype=float)
    return np.exp(np.log(_by_place(rows, rows["speedup"].tolist())).mean(axis=1, skipna=False))


def _by_place(rows: Frame, values: list) -> Frame:
    """One value of each row, methods down and places across, both in the order in which they come."""
    places = (rows["benchmark"] + " " + rows["split"]).tolist()
    flat = pd.DataFrame({"method": rows["method"].tolist(), "place": places, "value": values})
    wide = flat.pivot(index="method", columns="place", values="value")
    return wide.reindex(list(dict.fromkeys(flat["method"])))[list(dict.fromkeys(places))]


ALIGNMENTS = {
    "specdiff": "none (one draft, the likeliest at T_d = 0)",
    "specdiff2_test": "test-time",
    "specdiff2_train": "train-time",
    "specdiff2": "both",
}


def ablation(table: Frame) -> Frame:
    """The paper's Table 3: which alignment gains what. Empty unless each alone and both together were measured."""
    rows = by_method(table[table["method"].isin(ALIGNMENTS)])
    if len(rows) < len(ALIGNMENTS):
        return pd.DataFrame()
    rows = rows.set_index("method").loc[list(ALIGNMENTS)].reset_index()
    rows.insert(0, "alignment", list(ALIGNMENTS.values()))
    return rows


def cycles(groups: list[Group]) -> Frame:
    """What the histograms show: how many cycles of a method on a benchmark accepted how many drafts."""
    rows = []
    for group in groups:
        accepted = measures.per_cycle(group.rows)
        if group.method != VANILLA and accepted.size:
            for number, count in enumerate(np.bincount(accepted)):
                place = {"benchmark": group.benchmark, "split": group.split, "method": group.method}
                rows.append({**place, "accepted": number, "cycles": int(count)})
    return pd.DataFrame(rows, columns=["benchmark", "split", "method", "accepted", "cycles"])


def drafting(table: Frame) -> Frame:
    """The rows that say whether drafting pays: timed, and not vanilla's own."""
    return table[(table["method"] != VANILLA) & table["speedup"].notna()]


def bars(table: Frame) -> Frame:
    """What `dvc plots` draws: a speed-up for each place of the table, vanilla's own left out."""
    rows = drafting(table)
    places = [" / ".join(place) for place in rows[["benchmark", "split", "method"]].itertuples(index=False)]
    return pd.DataFrame({"place": places, "speedup": rows["speedup"].tolist()})


def csv(table: Frame) -> str:
    """Six significant digits, Unix line ends: the same numbers give the same bytes."""
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def ratio(value: float) -> str:
    """Two decimals, or as many as it takes not to round a slow-down up to 1 or a speed-up down to it."""
    if math.isnan(value):
        return NONE
    for digits in (2, 3, 4):
        text = f"{value:.{digits}f}"
        if value == 1 or float(text) != 1:
            return text
    return f"{value:.6g}"


def shown(column: str, value: object) -> str:
    """A cell of the table as text for people."""
    if not isinstance(value, float):
        return str(value)
    if column.startswith("speedup") or column in ("predicted", "measured"):
        return ratio(value)
    if math.isnan(value):
        return NONE
    return f"{value:.1f}" if column == "tokens_per_s" else f"{value:.3f}" if "cov" in column else f"{value:.2f}"


def lines(table: Frame) -> list[list[str]]:
    """Rows of text."""
    return [[shown(str(c), v) for c, v in record.items()] for record in table.to_dict("records")]


def markdown(table: Frame) -> str:
    """A GitHub table, numbers to the right."""
    numeric = [pd.api.types.is_numeric_dtype(table[c]) for c in table.columns]
    head = "| " + " | ".join(map(str, table.columns)) + " |"
    rule = "|" + "|".join("---:" if n else "---" for n in numeric) + "|"
    body = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in lines(table)]
    return "\n".join([head, rule, *body]) + "\n"
