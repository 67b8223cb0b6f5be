"""The figures with a title, one sentence on how to read each, and words for whoever cannot see it."""

from stages.report import figures, tables
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.fairness import START
from stages.report.frames import Frame
from stages.report.study import Plate, plate


def plates(report: Report) -> list[Plate]:
    """All figures of a report, in reading order."""
    colours = report.params.colours
    confidence, limit = f"{report.params.confidence:.0%}", f"{report.params.cost_tolerance:.0%}"
    return [
        plate(
            "speedup",
            "Speed-up over vanilla decoding",
            f"A bar above the dashed line decodes faster than vanilla; whiskers are {confidence} bootstrap "
            "intervals over "
            "prompts, and a whisker that crosses the line leaves the question open.",
            "Bars of the speed-up over vanilla. "
            + _ends(report, "speedup", "The numbers are in the table of speed-ups."),
            lambda: figures.speedup(report.table, colours.methods),
            published=("Figure 1",),
        ),
        plate(
            "acceptance",
            "Acceptance by draft position, as decoded",
            "Above, how often the first j drafts all survive: the area under a curve is the accepted tokens "
            "per cycle. Below, "
            "how often draft j survives once those before it have: a flat line is a drafter whose accuracy does "
            "not fall with depth, and the right end rests on few cycles.",
            "Curves of acceptance by draft position. " + _first(report, "decoded"),
            lambda: figures.positions(report.acceptance, colours.methods, source="decoded"),
        ),
        plate(
            "acceptance_training",
            "Acceptance by draft position: adapted and distilled drafter",
            "The same two rates for the likeliest chain at the end of training, teacher-forced on held-out "
            "prompts of the training corpus. Curves that nearly touch are not told apart.",
            "Curves of acceptance by draft position. " + _first(report, "teacher_forced"),
            lambda: figures.positions(_ours(report), colours.trainings, source="teacher_forced"),
            published=("Figure 2",),
        ),
        plate(
            "histogram",
            "Accepted drafts in a cycle",
            "On the far left no draft token was accepted; weight at the right edge says that a longer window "
            "would pay; the dashed line is the mean.",
            "Histograms of accepted draft tokens per cycle, one for each method and benchmark. "
            + _ends(report, "accepted_streak", "The counts are in tables/histogram.csv."),
            lambda: figures.histogram(report.groups, colours.methods),
        ),
        plate(
            "cost",
            "Where a cycle's time goes, and what the cost model makes of it",
            "A cycle pays when it emits more tokens than its bar is vanilla steps (black tick) long; on the "
            "right the cost "
            f"model's ring should surround the measured dot, and a row where they part by more than {limit} "
            "is marked.",
            "Time of a cycle by phase, and speed-up predicted and measured, a row for each method and place. "
            "The numbers are in the table of the cost model.",
            lambda: figures.costs(report.costs, colours.phases, tolerance=report.params.cost_tolerance),
        ),
        plate(
            "training",
            "Training curves",
            "Above, the loss that was minimised (each training has its own scale; on held-out prompts masked "
            "cross-entropy, whatever was minimised); below, what it is for: tokens expected "
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


def _ends(report: Report, column: str, where: str) -> str:
    """The lowest and the highest number of a column of the speed-up table, and where all of them stand."""
    rows = tables.drafting(report.table).dropna(subset=[column])
    if rows.empty:
        return "None was timed."
    ends = [(word, rows.loc[rows[column].agg(pick)]) for word, pick in (("Lowest", "idxmin"), ("highest", "idxmax"))]
    parts = [
        f"{word} {tables.ratio(row[column])} ({row['method']} on {row['benchmark']} {row['split']})"
        for word, row in ends
    ]
    return f"{', '.join(parts)}. {where}"


def _first(report: Report, source: str) -> str:
    """The best first position of each place, and where all of them stand."""
    table = _ours(report)
    first = table[(table["source"] == source) & (table["j"] == 1) & (table["method"] != VANILLA)]
    if first.empty:
        return "None was measured."
    best = first.loc[first.groupby(["benchmark", "split"], sort=False)["acceptance_at_pos_j"].idxmax()]
    parts = [
        f"{row['method']} on {row['benchmark']} {row['split']} {row['acceptance_at_pos_j']:.0%}"
        for row in best.to_dict("records")
    ]
    return f"Highest at the first position: {'; '.join(parts)}. All rates are in acceptance.csv."
