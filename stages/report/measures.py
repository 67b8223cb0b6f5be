"""What every table says, computed from the rows of one benchmark, split and method.

    acceptance_length   = 1 + accepted / cycles      (vanilla = 1)
    accepted_streak     = accepted / cycles
    acceptance_at_pos_j = cycles with at least j accepted / cycles;  alpha_j is the ratio of neighbours
    speed-up            = sum_i decoded_i * (yardstick_s_i / yardstick_tokens_i) / sum_i decode_s_i
    cost ratio c        = drafting seconds of a cycle / seconds of one vanilla step

`decoded` leaves out a text's first token, which comes from the prefill and is in nobody's decoding time. The
speed-up is the time vanilla would have taken for the very tokens the method decoded, at the pace measured
within the same text, over the time the method took. Its interval resamples prompts (all repeats
of a prompt together), numerator and denominator in pairs.

Source: SpecDiff-2 (arXiv 2511.00606), equation 3; names of the counters as in vLLM.
"""

from typing import NamedTuple

import numpy as np

from stages.report.frames import Column, Frame


class Interval(NamedTuple):
    """A ratio and the ends of its bootstrap interval; NaN where nothing was timed."""

    value: float
    low: float
    high: float


class Positions(NamedTuple):
    """By position j = 1..G: how many cycles got to judge it, the joint rate and the conditional one."""

    reached: np.ndarray
    joint: np.ndarray
    conditional: np.ndarray


def cut_to_emitted(accepted: np.ndarray, *, new_tokens: int, where: str) -> np.ndarray:
    """Accepted drafts of each cycle, the last one cut by an end id or the limit to the tokens it emitted.

    A cycle emits accepted + 1 tokens and the prefill the first, so the sum is new_tokens - 1; what is above it
    was cut from the last cycle.

    Raises:
        ValueError: the counters contradict each other, so no ratio made of them would mean anything.
    """
    emitted, decoded = int((accepted + 1).sum()), max(0, new_tokens - 1)
    excess = emitted - decoded
    last = int(accepted[-1]) if accepted.size else 0
    if not 0 <= excess <= last or (accepted < 0).any():
        raise ValueError(
            f"{where}: {accepted.size} cycles emitted {emitted} tokens, but new_tokens is {new_tokens}. "
            "The cell is damaged: make it again with `dvc repro -f` of its evaluate stage"
        )
    kept = accepted.copy()
    if excess:
        kept[-1] -= excess
    return kept


def totals(rows: Frame) -> tuple[int, int]:
    """(accepted drafts, cycles), pooled over the rows."""
    return int(rows["accepted_tokens"].sum()), int(rows["cycles"].sum())


def accepted_streak(rows: Frame) -> float:
    """Accepted drafts per cycle, bonus token excluded, pooled over prompts. NaN without a cycle."""
    accepted, cycles = totals(rows)
    return accepted / cycles if cycles else float("nan")


def acceptance_length(rows: Frame) -> float:
    """Tokens per cycle, bonus token included, pooled over prompts."""
    return 1 + accepted_streak(rows)


def acceptance_length_mean(rows: Frame) -> float:
    """Mean of the prompts' own acceptance lengths: a long answer weighs no more than a short one."""
    prompts = rows.groupby("prompt_id", sort=True)[["accepted_tokens", "cycles"]].sum()
    prompts = prompts[prompts["cycles"] > 0]
    return float((1 + prompts["accepted_tokens"] / prompts["cycles"]).mean()) if len(prompts) else float("nan")


def per_cycle(rows: Frame) -> np.ndarray:
    """Accepted drafts of every cycle of every row, in one array."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *rows["accepted"]])


def positions(rows: Frame) -> Positions:
    """Acceptance by position over the window, joint and conditional on the positions before."""
    accepted = per_cycle(rows)
    depth = max(int(rows["window"].max()), int(accepted.max(initial=0)))
    survived = np.array([(accepted >= j).sum() for j in range(depth + 1)])
    joint = survived[1:] / max(1, accepted.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        conditional = np.where(survived[:-1] > 0, survived[1:] / survived[:-1], np.nan)
    return Positions(survived[:-1], joint, conditional)


def decoded(rows: Frame) -> Column:
    """Tokens of each row that decoding emitted: all but the prefill's first."""
    return (rows["new_tokens"] - 1).clip(lower=0)


def timed(rows: Frame) -> Frame:
    """Rows that have a yardstick: a prompt whose answer ended at once leaves nothing to compare with."""
    return rows[(rows["yardstick_tokens"] > 0) & (rows["yardstick_s"] > 0) & (rows["decode_s"] > 0)]


def ratio(over_P: np.ndarray, under_P: np.ndarray, *, resamples: int, confidence: float, seed: int) -> Interval:
    """Ratio of sums over prompts and its paired bootstrap interval. One seed gives one interval."""
    draws_RP = np.random.default_rng(seed).integers(len(under_P), size=(resamples, len(under_P)))
    ratios_R = over_P[draws_RP].sum(axis=1) / under_P[draws_RP].sum(axis=1)
    low, high = np.quantile(ratios_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(over_P.sum() / under_P.sum()), float(low), float(high))


def speedup(rows: Frame, *, resamples: int, confidence: float, seed: int) -> Interval:
    """Vanilla's seconds for what a method decoded over the method's own, with its interval over prompts."""
    rows = timed(rows)
    if rows.empty:
        return Interval(float("nan"), float("nan"), float("nan"))
    vanilla_s = decoded(rows) * rows["yardstick_s"] / rows["yardstick_tokens"]
    columns = rows.assign(vanilla_s=vanilla_s).groupby("prompt_id", sort=True)[["vanilla_s", "decode_s"]]
    vanilla_P, method_P = columns.sum().to_numpy().T
    return ratio(vanilla_P, method_P, resamples=resamples, confidence=confidence, seed=seed)


def streak(rows: Frame, *, resamples: int, confidence: float, seed: int) -> Interval:
    """The accepted streak with its interval over prompts; those without a cycle left out."""
    sums = rows.groupby("prompt_id", sort=True)[["accepted_tokens", "cycles"]].sum()
    accepted_P, cycles_P = sums[sums["cycles"] > 0].to_numpy(dtype=float).T
    if not len(cycles_P):
        return Interval(float("nan"), float("nan"), float("nan"))
    return ratio(accepted_P, cycles_P, resamples=resamples, confidence=confidence, seed=seed)


def tokens_per_s(rows: Frame) -> float:
    """Emitted tokens over decoding seconds, prefill apart."""
    seconds = rows["decode_s"].sum()
    return float(decoded(rows).sum() / seconds) if seconds > 0 else float("nan")


def cost_ratio(rows: Frame) -> float:
    """c: drafting seconds of a cycle over the seconds of one vanilla step on the same prompt."""
    rows = rows[rows["step_s"] > 0]
    steps_s = (rows["cycles"] * rows["step_s"]).sum()
    return float(rows["draft_s"].sum() / steps_s) if steps_s > 0 else float("nan")


def coverage(rows: Frame) -> float:
    """Share of the emitted tokens that the drafter has a word for: any other can never be drafted."""
    tokens = rows["new_tokens"].sum()
    return float(rows["covered_tokens"].sum() / tokens) if tokens else float("nan")


def compared(rows: Frame) -> Frame:
    """The answers that had to be vanilla's own: not those drawn with other coins, which have no first difference."""
    return rows[rows["matches_vanilla"].astype(bool) | (rows["first_difference"] >= 0)]


def differences(rows: Frame) -> tuple[int, int]:
    """(excused, unexcused) answers that differ from vanilla's; only rounding excuses one."""
    differs = rows["first_difference"] >= 0
    excused = rows["excused"].astype(bool)
    return int((differs & excused).sum()), int((differs & ~excused).sum())


def accuracy(rows: Frame) -> float | None:
    """Share of graded answers that are right, or None where the benchmark grades none."""
    graded = rows["correct"].dropna()
    return float(graded.astype(bool).mean()) if len(graded) else None
