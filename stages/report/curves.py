"""Training curves and acceptance by position, in long form.

Training stages write one CSV each: step, tokens, windows or seconds, lr, loss, grad_norm, split (train or valid),
streak, trie16 and accept_1 .. accept_G (joint acceptance by position on held-out prompts, teacher-forced).
Cells hold what really happened.
"""

import re

import numpy as np
import pandas as pd

from stages.common import store
from stages.report import measures
from stages.report.cells import VANILLA, Group
from stages.report.frames import Frame

COUNTERS = ("tokens", "windows", "seconds")  # follow the step, or the clock


def read(profile: str, trainings: list[str]) -> dict[str, Frame]:
    """Curves by training; one that has no file is left out. ValueError names a file without its columns."""
    curves = {}
    for training in trainings:
        path = store.curves_file(profile, training)
        if not path.exists():
            continue
        try:
            curve = pd.read_csv(path)
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise ValueError(f"{path}: not readable as CSV ({error}); delete it and run dvc repro") from None
        if missing := {"step", "split"} - set(curve.columns):
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; delete it and run dvc repro")
        curves[training] = curve
    return curves


def long_form(curves: dict[str, Frame]) -> Frame:
    """training, split, step, quantity, value; empty fields and counters that only follow the step are dropped."""
    parts = []
    for training, curve in curves.items():
        numbers = (
            curve.drop(columns=["split", *COUNTERS], errors="ignore")
            .apply(pd.to_numeric, errors="coerce")
            .assign(split=curve["split"])
        )
        melted = numbers.melt(id_vars=["split", "step"], var_name="quantity", value_name="value")
        parts.append(melted.dropna(subset=["value"]).assign(training=training))
    columns = ["training", "split", "step", "quantity", "value"]
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)


def losses(curve: Frame) -> Frame:
    """The minimised loss by training step; empty where none was written."""
    rows = curve[curve["split"] == "train"]
    return rows[["step", "loss"]].dropna() if "loss" in rows else pd.DataFrame(columns=["step", "loss"])


def at_positions(curve: Frame) -> np.ndarray | None:
    """Joint acceptance by position in the last validation row that has it, or None."""
    names = sorted((c for c in curve.columns if re.fullmatch(r"accept_\d+", c)), key=lambda c: int(c[7:]))
    rows = curve[curve["split"] == "valid"].dropna(subset=names[:1]) if names else curve[:0]
    return rows[names].iloc[-1].to_numpy(dtype=float) if len(rows) else None


def last(curve: Frame, quantity: str) -> float | None:
    """The last validation value of a quantity, or None."""
    if quantity not in curve.columns:
        return None
    values = curve.loc[curve["split"] == "valid", quantity].dropna()
    return float(values.iloc[-1]) if len(values) else None


def conditional(joint: np.ndarray) -> np.ndarray:
    """alpha_j = joint_j / joint_(j-1); NaN behind a position that is never reached."""
    before = np.concatenate([[1.0], joint[:-1]])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(before > 0, joint / before, np.nan)


def acceptance(groups: list[Group], curves: dict[str, Frame]) -> Frame:
    """Acceptance by position of every group, and of every training on held-out prompts."""
    parts = []
    for group in groups:
        reached, joint, alpha = measures.positions(group.rows)
        if group.method != VANILLA and group.rows["cycles"].sum():
            parts.append(_positions("decoded", group.benchmark, group.split, group.method, joint, alpha, reached))
    for training, curve in curves.items():
        joint = at_positions(curve)
        if joint is not None:
            parts.append(_positions("teacher_forced", "corpus", "valid", training, joint, conditional(joint), None))
    columns = [
        "source",
        "benchmark",
        "split",
        "method",
        "j",
        "cycles_reaching_j",
        "acceptance_at_pos_j",
        "alpha_j",
    ]
    return pd.concat(parts)[columns] if parts else pd.DataFrame(columns=columns)


def _positions(
    source: str,
    benchmark: str,
    split: str,
    name: str,
    joint: np.ndarray,
    alpha: np.ndarray,
    reached: np.ndarray | None,
) -> Frame:
    return pd.DataFrame(
        {
            "source": source,
            "benchmark": benchmark,
            "split": split,
            "method": name,
            "j": np.arange(1, len(joint) + 1),
            "cycles_reaching_j": pd.array(reached if reached is not None else [None] * len(joint), dtype="Int64"),
            "acceptance_at_pos_j": joint,
            "alpha_j": alpha,
        }
    )
