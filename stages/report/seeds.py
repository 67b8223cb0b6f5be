"""Trainings compared over their seeds: means, with intervals over prompts, and quotients against a control.

    tokens per cycle    1 + sum accepted / sum cycles over the prompts, and its mean over the seeds of one objective
    speed-up            as in measures.py, and its mean over the seeds
    interval            of the mean over seeds, prompts resampled, alike for all objectives and seeds
    over seeds          least and greatest: how far another order of the same texts moves the number by itself
    quotient            of the speed-ups of one way of drafting, both under the same resampled prompts

A drafter `<name>_s<n>` is `<name>` trained over other draws, and `<name>@<step>` as it was after that many steps.

Letters: P prompts, R resamples, S seeds.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stages.report import measures
from stages.report.cells import Cell
from stages.report.measures import Interval
from stages.report.params import ReportParams

REPEAT = re.compile(r"(?P<name>.+)_s\d+")


class Trained(NamedTuple):
    """One trained drafter, drafting one way."""

    objective: str  # without the seed
    drafter: str
    draft: str  # what is made of a pass: a chain, a tree
    sums_4P: np.ndarray  # of each prompt: accepted drafts, cycles, seconds of vanilla and of the method


class Mean(NamedTuple):
    """A mean over seeds, its interval over prompts, the least and the greatest seed, and the resampled means."""

    value: float
    low: float
    high: float
    least: float
    greatest: float
    draws_R: np.ndarray


class Line(NamedTuple):
    """An objective, drafting one way."""

    objective: str
    draft: str
    seeds: list[Trained]
    tokens: Mean  # per cycle
    speedup: Mean
    relative: Interval  # speed-up over the control's; NaN without one


def trained(cell: Cell) -> Trained:
    """The sums of one point. A prompt without a yardstick counts for acceptance alone."""
    section = cell.provenance["params"][cell.method]
    timed = measures.timed(cell.rows)
    timed = timed.assign(vanilla_s=measures.decoded(timed) * timed["yardstick_s"] / timed["yardstick_tokens"])
    counts = cell.rows.groupby("prompt_id", sort=True)[["accepted_tokens", "cycles"]].sum()
    clocks = timed.groupby("prompt_id")[["vanilla_s", "decode_s"]].sum().reindex(counts.index, fill_value=0.0)
    sums_4P = np.concatenate([counts.to_numpy(dtype=float).T, clocks.to_numpy(dtype=float).T])
    return Trained(once(section["drafter"]), section["drafter"], drafted(section), sums_4P)


def once(drafter: str) -> str:
    """The name that all seeds of a training share: `streak` of `streak_s1`, `streak@6` of `streak_s1@6`."""
    name, at, step = drafter.partition("@")
    repeat = REPEAT.fullmatch(name)
    return (repeat["name"] if repeat else name) + at + step


def drafted(section: dict[str, int | float | str]) -> str:
    """What a method's section makes of one pass."""
    if "nodes" in section and section.get("width") != 1:
        return f"tree of {section['nodes']}"
    return f"{section['drafts']} drafts" if section.get("drafts", 1) != 1 else "chain"


def compare(found: list[Trained], params: ReportParams, *, control: str, seed: int) -> list[Line]:
    """A line for each objective and way of drafting, in the order in which they come."""
    prompts = {one.sums_4P.shape[1] for one in found}
    if len(prompts) > 1:
        raise ValueError(f"points of one sweep have {sorted(prompts)} prompts; run dvc repro -f of its sweep stage")
    count = prompts.pop()
    draws_RP = np.random.default_rng(seed).integers(count, size=(params.resamples, count))
    by_line: dict[tuple[str, str], list[Trained]] = {}
    for one in found:
        line = by_line.setdefault((one.objective, one.draft), [])
        if one.drafter in {other.drafter for other in line}:
            raise ValueError(
                f"params.yaml: sweeps.objectives.vary: two points draft a {one.draft} with {one.drafter}; vary the "
                "drafter and the way of drafting alone, since points of one name are taken for seeds"
            )
        line.append(one)
    speedups = {key: mean(seeds, draws_RP, speed_up, params.confidence) for key, seeds in by_line.items()}
    lines = []
    for (objective, draft), seeds in by_line.items():
        speedup, against = speedups[objective, draft], speedups.get((control, draft))
        relative = quotient(speedup, against, params.confidence) if against else Interval(*[float("nan")] * 3)
        tokens = mean(seeds, draws_RP, tokens_per_cycle, params.confidence)
        lines.append(Line(objective, draft, seeds, tokens, speedup, relative))
    return lines


def tokens_per_cycle(sums_4X: np.ndarray) -> np.ndarray:
    """Of sums over prompts, bonus included."""
    return 1 + sums_4X[0] / sums_4X[1]


def speed_up(sums_4X: np.ndarray) -> np.ndarray:
    """Of sums over prompts."""
    return sums_4X[2] / sums_4X[3]


def of_seed(one: Trained, ratio: Callable[[np.ndarray], np.ndarray]) -> float:
    """A ratio of one drafter over all prompts; NaN where there is nothing below the line."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(ratio(one.sums_4P.sum(axis=1)))


def mean(
    seeds: list[Trained], draws_RP: np.ndarray, ratio: Callable[[np.ndarray], np.ndarray], confidence: float
) -> Mean:
    """Of a ratio over seeds; NaN where nothing was timed or no cycle drafted."""
    values = [of_seed(one, ratio) for one in seeds]
    with np.errstate(invalid="ignore", divide="ignore"):
        draws_R = np.mean([ratio(one.sums_4P[:, draws_RP].sum(axis=2)) for one in seeds], axis=0)
    return Mean(float(np.mean(values)), *_ends(draws_R, confidence), min(values), max(values), draws_R)


def quotient(speedup: Mean, control: Mean, confidence: float) -> Interval:
    """One speed-up over another, prompts resampled alike."""
    return Interval(speedup.value / control.value, *_ends(speedup.draws_R / control.draws_R, confidence))


def _ends(draws_R: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(draws_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
