"""Methods against each other, prompt by prompt: how many times as fast is one as another, with an interval.

Two methods decoded the same prompts, so the prompts are resampled for both at once: what makes a prompt easy for all
cancels, and a difference can be sure where the two intervals against vanilla overlap. The speeds are those of
measures.speedup (each paired with vanilla steps of its own texts), so the clock of neither cell matters.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from stages.report import measures, tables
from stages.report.cells import VANILLA, Group
from stages.report.frames import Frame
from stages.report.measures import Interval
from stages.report.params import ReportParams

PROMPT = ["benchmark", "split", "prompt_id"]
COLUMNS = ["method", "against", "benchmark", "split", "prompts", "ratio", "low", "high"]
ALL = "all"  # the benchmark of a contrast over all prompts together


class Gain(NamedTuple):
    """What is had by `method` over `against`, which differ in this."""

    what: str
    method: str
    against: str


GAINS = [
    Gain("train-time alignment with K drafts", "specdiff2", "specdiff2_test"),
    Gain("test-time alignment of the distilled drafter", "specdiff2", "specdiff2_train"),
    Gain("both alignments, against the likeliest draft", "specdiff2", "specdiff"),
    Gain("streak instead of DistillSpec", "specdiff2", "distillspec"),
    Gain("streak instead of the first position alone", "specdiff2", "first"),
    Gain("all drafts verified instead of one, by a drafter aligned for it", "specdiff2_trie", "specdiff2"),
    Gain("best-first tree instead of drafts", "specdiff2_tree", "specdiff2_trie"),
    Gain("a branch by lookup beside the tree", "specdiff2_mix", "specdiff2_tree"),
]


def ratio(method: Frame, against: Frame, *, resamples: int, confidence: float, seed: int) -> tuple[Interval, int]:
    """Speed-up of `method` over that of `against` on the prompts that both were timed on, and how many these are."""
    sides = [_sums(rows).add_suffix(end) for rows, end in ((method, "_m"), (against, "_a"))]
    both = sides[0].join(sides[1], how="inner")
    if both.empty:
        return Interval(float("nan"), float("nan"), float("nan")), 0
    columns = ("vanilla_s_m", "decode_s_m", "vanilla_s_a", "decode_s_a")
    draws_RP = np.random.default_rng(seed).integers(len(both), size=(resamples, len(both)))
    sums_4R = np.stack([both[column].to_numpy()[draws_RP].sum(axis=1) for column in columns])
    ratios_R = (sums_4R[0] / sums_4R[1]) / (sums_4R[2] / sums_4R[3])
    low, high = np.quantile(ratios_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    whole = [float(both[column].sum()) for column in columns]
    return Interval((whole[0] / whole[1]) / (whole[2] / whole[3]), float(low), float(high)), len(both)


def leader(table: Frame) -> str:
    """The method with the highest geometric mean of its speed-ups, among those timed wherever any was; '' if none."""
    means = tables.overall(table).dropna()
    return str(means.idxmax()) if len(means) else ""


def against_all(groups: list[Group], table: Frame, params: ReportParams, *, seed: int) -> Frame:
    """The leader against every other drafting method, place by place and over all prompts."""
    first = leader(table)
    names = dict.fromkeys(group.method for group in groups if group.method not in (VANILLA, first))
    return _long([(first, name) for name in names] if first else [], groups, params, seed=seed)


def gains(groups: list[Group], params: ReportParams, *, seed: int) -> Frame:
    """GAINS whose two methods were measured, place by place and over all prompts, with `what` in front."""
    there = {group.method for group in groups}
    wanted = [gain for gain in GAINS if {gain.method, gain.against} <= there]
    table = _long([(gain.method, gain.against) for gain in wanted], groups, params, seed=seed)
    what = {(gain.method, gain.against): gain.what for gain in wanted}
    table.insert(0, "what", [what[pair] for pair in zip(table["method"], table["against"], strict=True)])
    return table


def wide(contrasts: Frame, rows: list[str]) -> Frame:
    """For people: a line for each pair, named by `rows`, and a column for each place: ratio [interval]."""
    if contrasts.empty:
        return pd.DataFrame()
    places = (contrasts["benchmark"] + " " + contrasts["split"]).str.strip()
    texts = [span(record) for record in contrasts.to_dict("records")]
    flat = contrasts[rows].assign(place=places.tolist(), text=texts)
    order = list(dict.fromkeys(flat["place"]))
    table = flat.pivot_table(index=rows, columns="place", values="text", aggfunc="first", sort=False)
    return table[order].fillna(tables.NONE).reset_index().rename_axis(columns=None)


def span(record: dict) -> str:
    """'1.17 [1.05, 1.30]', or n/a."""
    value, low, high = (record[key] for key in ("ratio", "low", "high"))
    return tables.NONE if np.isnan(value) else f"{tables.ratio(value)} [{tables.ratio(low)}, {tables.ratio(high)}]"


def _long(pairs: list[tuple[str, str]], groups: list[Group], params: ReportParams, *, seed: int) -> Frame:
    rows = []
    places = list(dict.fromkeys((group.benchmark, group.split) for group in groups))
    for method, against in pairs:
        for where in [*places, (ALL, "")] if len(places) > 1 else places:
            sides = [
                [g.rows for g in groups if g.method == name and where in ((g.benchmark, g.split), (ALL, ""))]
                for name in (method, against)
            ]
            if not all(sides):
                continue
            found, prompts = ratio(
                *(pd.concat(side) for side in sides),
                resamples=params.resamples,
                confidence=params.confidence,
                seed=seed,
            )
            rows.append(dict(zip(COLUMNS, (method, against, *where, prompts, *found), strict=True)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _sums(rows: Frame) -> Frame:
    """Seconds of each prompt: vanilla's for the same tokens, and the method's own. Repeats of a prompt together."""
    rows = measures.timed(rows)
    vanilla_s = measures.decoded(rows) * rows["yardstick_s"] / rows["yardstick_tokens"]
    return rows.assign(vanilla_s=vanilla_s).groupby(PROMPT, sort=True)[["vanilla_s", "decode_s"]].sum()
