"""The opening paragraph: sentences made from the numbers, whichever way they fell."""

from typing import Any

from stages.report import contrast, curves, measures, tables
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.fairness import START

OURS = "specdiff2"  # how the names of the paper's and this project's methods begin
DRAFTINGS = {
    "streak": "for the likeliest chain",
    "sampled_streak": "for one draft sampled at temperature 1",
    "tree": "for the best-first tree",
}  # columns of the training curves


def paragraph(report: Report) -> list[str]:
    """What wins, over whom and by how much; when it does not; what training and alignment bought."""
    sentences = [
        fastest(report),
        lead(report),
        rivals(report),
        slower(report),
        alignment(report),
        parts(report),
    ]
    return [sentence for sentence in sentences if sentence]


def trust(report: Report) -> list[str]:
    """What speaks for the numbers: equal texts, a clock that gives vanilla 1, a cost model that foretells."""
    sentences = [losslessness(report), yardstick(report), cost_model(report)]
    return [sentence for sentence in sentences if sentence]


def place(row: dict[Any, Any]) -> str:
    return f"{row['benchmark']} ({row['split']})" if row["split"] else str(row["benchmark"])


def fastest(report: Report) -> str:
    """The fastest method on every benchmark and split, with its interval, and what the interval says about 1."""
    drafting = tables.drafting(report.table)
    if drafting.empty:
        return "No method besides vanilla was timed, so there is no speed-up to tell."
    best = drafting.loc[drafting.groupby(["benchmark", "split"], sort=False)["speedup"].idxmax()].to_dict("records")
    one = len({row["method"] for row in best}) == 1
    parts = [
        f"{tables.ratio(row['speedup'])} times on {place(row)}"
        + ("" if one else f" with {row['method']}")
        + f" [{tables.ratio(row['speedup_low'])} to {tables.ratio(row['speedup_high'])}]"
        for row in best
    ]
    opening = f"The fastest method is {best[0]['method']}" if one else "The fastest methods"
    text = (
        f"{opening}{'. It decodes' if one else ' decode'} at {listed(parts)} the speed of vanilla decoding in the "
        f"same engine (in brackets {report.params.confidence:.0%} intervals over prompts)."
    )
    slow = [place(row) for row in best if row["speedup_high"] < 1]
    level = [place(row) for row in best if row["speedup_low"] <= 1 <= row["speedup_high"]]
    if slow:
        text += f" On {listed(slow)} even the fastest is slower than vanilla."
    if level:
        text += f" On {listed(level)} the fastest is not told apart from vanilla."
    return text


def lead(report: Report) -> str:
    """The fastest method overall against every other one, on all prompts together, prompt by prompt."""
    table = report.contrasts
    if table.empty:
        return ""
    pooled = table[table["benchmark"] == contrast.ALL] if contrast.ALL in set(table["benchmark"]) else table
    rows = pooled.dropna(subset=["ratio"]).sort_values("ratio").to_dict("records")
    if not rows:
        return ""
    first, prompts = rows[0]["method"], max(row["prompts"] for row in rows)
    sure = [row for row in rows if row["low"] > 1]
    open_ = [f"{row['against']} ({contrast.span(row)} times)" for row in rows if row["low"] <= 1 <= row["high"]]
    behind = [f"{row['against']} ({contrast.span(row)} times)" for row in rows if row["high"] < 1]
    text = f"Prompt for prompt, over all {prompts} together, {first} is "
    if sure:
        near = f"{sure[0]['against']} ({contrast.span(sure[0])} times its speed)"
        group = (
            f"each of the other {len(rows)} methods"
            if len(sure) == len(rows)
            else f"{len(sure)} of the other {len(rows)} methods"
        )
        if len(rows) == 1:
            return f"{text}faster than the other method, {near}, with the whole interval."
        text += f"faster than {group} with the whole interval, the nearest being {near}"
    if open_:
        text += f"{', and ' if sure else ''}not told apart from {listed(open_)}"
    if behind:
        text += f"{', and ' if sure or open_ else ''}slower than {listed(behind)}"
    return text + "."


def rivals(report: Report) -> str:
    """The fastest of this project's methods against the fastest other one, place by place; nothing without a rival."""
    drafting = tables.drafting(report.table)
    ours = drafting["method"].str.startswith(OURS)
    parts = []
    for (benchmark, split), rows in drafting.groupby(["benchmark", "split"], sort=False):
        mine, others = rows[ours.loc[rows.index]], rows[~ours.loc[rows.index]]
        if mine.empty or others.empty:
            continue
        a, b = (side.loc[side["speedup"].idxmax(), "method"] for side in (mine, others))
        here = {g.method: g.rows for g in report.groups if (g.benchmark, g.split) == (benchmark, split)}
        found, _ = contrast.ratio(
            here[a],
            here[b],
            resamples=report.params.resamples,
            confidence=report.params.confidence,
            seed=report.seed,
        )
        text = contrast.span(dict(zip(("ratio", "low", "high"), found, strict=True)))
        verdict = "" if found.low > 1 else ", slower" if found.high < 1 else ", not told apart"
        parts.append(f"on {place({'benchmark': benchmark, 'split': split})} {a} {text} times {b}{verdict}")
    return (
        f"The fastest of the paper's and this project's methods against the fastest other: {'; '.join(parts)}."
        if parts
        else ""
    )


def slower(report: Report) -> str:
    """Where drafting pays, and where it costs."""
    drafting = tables.drafting(report.table)
    if len(drafting) < 2:
        return ""
    gain = int((drafting["speedup_low"] > 1).sum())
    loss = drafting[drafting["speedup_high"] < 1]
    text = f"{gain} of {len(drafting)} rows are faster than vanilla with the whole interval"
    if loss.empty:
        return f"{text}, none slower."
    counts = loss.groupby(["benchmark", "split"], sort=False).size()
    where = [f"{count} on {benchmark} ({split})" for (benchmark, split), count in counts.items()]
    return f"{text}, {len(loss)} slower ({', '.join(where)})."


def alignment(report: Report) -> str:
    """What the trainings that a method here uses changed on held-out prompts, for each way of drafting."""
    parts = []
    used = set(report.methods["training"].dropna()) & set(report.objectives) or set(report.objectives)
    ours = {name: curve for name, curve in report.curves.items() if name in (START, *used)}
    for quantity, drafting in DRAFTINGS.items():
        known = [(name, curves.last(curve, quantity)) for name, curve in ours.items()]
        values = [f"{value:.2f} after {name}" for name, value in known if value is not None]
        if len(values) > 1:
            parts.append(f"{drafting} {listed(values)}")
    if not parts:
        return ""
    return f"Training bought, in tokens expected to be accepted per cycle on held-out prompts: {'; '.join(parts)}."


def parts(report: Report) -> str:
    """What each part of a method gains in speed, over all prompts."""
    table = report.gains
    if table.empty:
        return ""
    pooled = table[table["benchmark"] == contrast.ALL] if contrast.ALL in set(table["benchmark"]) else table
    texts = [f"{row['what']} {contrast.span(row)}" for row in pooled.dropna(subset=["ratio"]).to_dict("records")]
    return f"What the parts change in speed (1: nothing): {'; '.join(texts)}." if texts else ""


def losslessness(report: Report) -> str:
    """How many answers were compared with vanilla's and how many differ."""
    drafted = [group.rows for group in report.groups if group.method != VANILLA]
    total = sum(len(measures.compared(rows)) for rows in drafted)
    apart = sum(len(rows) for rows in drafted) - total
    excused, unexcused = report.excused, report.unexcused
    if not total:
        return ""
    text = (
        f"Of {count(total, 'answer')} compared with vanilla's token by token, {total - excused - unexcused} "
        "are "
        f"equal, {_differ(excused)} at a near tie that the measured rounding can turn (excused)"
    )
    if unexcused:
        return f"{text} and {_differ(unexcused)} WITHOUT EXCUSE: losslessness is broken."
    text = f"{text} and none without excuse."
    if apart:
        text += f" {count(apart, 'answer')} had coins of their own, and are judged by their law in the tests alone."
    return text


def yardstick(report: Report) -> str:
    """Vanilla against the yardstick: the timing error where nothing is to be gained."""
    speeds = report.table.loc[report.table["method"] == VANILLA, "speedup"].dropna()
    if speeds.empty:
        return ""
    low, high = tables.ratio(speeds.min()), tables.ratio(speeds.max())
    spread = low if low == high else f"{low} to {high}"
    return (
        f"Vanilla timed like a method, against the vanilla steps within its own texts, gives {spread}: a "
        "difference of that size from 1 shows nothing."
    )


def cost_model(report: Report) -> str:
    """Where measurement and cost model part."""
    table = report.costs
    if table.empty:
        return ""
    limit = f"{report.params.cost_tolerance:.0%}"
    far = table[table["flagged"]]
    if far.empty:
        return (
            f"From the measured acceptance and each method's seconds per cycle the cost model gives all {len(table)} "
            f"measured speed-ups to within {limit}: clock and counters agree."
        )
    names = [f"{r['method']} on {place(r)} ({r['error']:+.0%})" for r in far.to_dict("records")]
    many = f"{len(far)} of {len(table)} measured speed-ups are more than {limit}"
    return f"{many} from the cost model: {listed(names)}."


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _differ(number: int) -> str:
    return "none differs" if not number else "1 differs" if number == 1 else f"{number} differ"
