"""The figures with a title, one sentence on how to read each, and words for whoever cannot see it."""

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure

from stages.report import figures, style, tables
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.fairness import START
from stages.report.frames import Frame


class Plate(NamedTuple):
    """`svg` is empty where there was nothing to draw; `missing` then says what was missing."""

    name: str
    title: str
    reading: str
    alt: str
    svg: str
    missing: str


def plates(report: Report) -> list[Plate]:
    """All figures of a report, in reading order."""
    colours = report.params.colours
    confidence, limit = f"{report.params.confidence:.0%}", f"{report.params.cost_tolerance:.0%}"
    return [
        _plate(
            "speedup",
            "Speed-up over vanilla decoding",
            f"A bar above the dashed line decodes faster than vanilla; whiskers are {confidence} bootstrap "
            "intervals over "
            "prompts, and a whisker that crosses the line leaves the question open.",
            _speedup_alt(report),
            lambda: figures.speedup(report.table, colours.methods),
        ),
        _plate(
            "acceptance",
            "Acceptance by draft position, as decoded",
            "Above, how often the first j drafts all survive: the area under a curve is the accepted tokens "
            "per cycle. Below, "
            "how often draft j survives once those before it have: a flat line is a drafter whose accuracy does "
            "not fall with depth, and the right end rests on few cycles.",
            _acceptance_alt(report, "decoded"),
            lambda: figures.positions(report.acceptance, colours.methods, source="decoded"),
        ),
        _plate(
            "acceptance_training",
            "Acceptance by draft position: adapted and distilled drafter",
            "The same two rates for the likeliest chain at the end of training, teacher-forced on held-out "
            "prompts of the training corpus. Curves that nearly touch are not told apart.",
            _acceptance_alt(report, "teacher_forced"),
            lambda: figures.positions(_ours(report), colours.trainings, source="teacher_forced"),
        ),
        _plate(
            "histogram",
            "Accepted drafts in a cycle",
            "On the far left no draft token was accepted; weight at the right edge says that a longer window "
            "would pay; the dashed line is the mean.",
            "Histograms of accepted draft tokens per cycle, one for each method and benchmark. " + _means(report),
            lambda: figures.histogram(report.groups, colours.methods),
        ),
        _plate(
            "cost",
            "Where a cycle's time goes, and what the cost model makes of it",
            "A cycle pays when it emits more tokens than its bar is vanilla steps (black tick) long; on the "
            "right the cost "
            f"model's ring should surround the measured dot, and a row where they part by more than {limit} "
            "is marked.",
            _cost_alt(report),
            lambda: figures.costs(report.costs, colours.phases, tolerance=report.params.cost_tolerance),
        ),
        _plate(
            "training",
            "Training curves",
            "Above, the loss that was minimised (each training has its own scale); below, what it is for: "
            "tokens expected "
            "to get accepted per cycle on held-out prompts: the likeliest chain, one draft sampled at "
            "temperature 1, and the best-first tree.",
            "Training loss and expected accepted tokens by training step for "
            + (", ".join(report.curves) or "no training"),
            lambda: figures.training(report.curves, colours.trainings),
        ),
    ]


def _ours(report: Report) -> Frame:
    """Acceptance without that of the baselines' trainings, which measured at other places."""
    table = report.acceptance
    return table[(table["source"] != "teacher_forced") | table["method"].isin((START, *report.objectives))]


def _plate(name: str, title: str, reading: str, alt: str, draw: Callable[[], Figure]) -> Plate:
    with style.settings():
        try:
            return Plate(name, title, reading, alt, style.svg(draw()), "")
        except figures.Absent as reason:
            return Plate(name, title, reading, alt, "", f"Not drawn: {reason}.")


def _speedup_alt(report: Report) -> str:
    rows = report.table[report.table["method"] != VANILLA].to_dict("records")
    parts = [f"{r['method']} on {r['benchmark']} {r['split']} {tables.ratio(r['speedup'])}" for r in rows]
    return "Bars of the speed-up over vanilla: " + ("; ".join(parts) or "none")


def _acceptance_alt(report: Report, source: str) -> str:
    table = _ours(report)
    first = table[(table["source"] == source) & (table["j"] == 1) & (table["method"] != VANILLA)].to_dict("records")
    parts = [f"{r['method']} on {r['benchmark']} {r['split']} {r['acceptance_at_pos_j']:.0%}" for r in first]
    return "Curves of acceptance by draft position. First position: " + ("; ".join(parts) or "none")


def _means(report: Report) -> str:
    rows = report.table[report.table["method"] != VANILLA].to_dict("records")
    return "Means: " + "; ".join(
        f"{r['method']} on {r['benchmark']} {r['split']} {tables.shown('', r['accepted_streak'])}" for r in rows
    )


def _cost_alt(report: Report) -> str:
    parts = [
        f"{r['method']} on {r['benchmark']} {r['split']} {tables.ratio(r['predicted'])}, {tables.ratio(r['measured'])}"
        for r in report.costs.to_dict("records")
    ]
    return "Time of a cycle by phase, and speed-up predicted and measured: " + ("; ".join(parts) or "none")
