"""The report in sentences, each made from the numbers, whichever way they fell."""

from typing import Any

import pandas as pd

from stages.report import curves, measures, tables
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.fairness import START
from stages.report.frames import Frame

SMOKE = (
    "This is the smoke profile: a tiny random model on made-up prompts. It shows that the pipeline runs. "
    "The numbers below mean nothing."
)
ABLATION = (
    "The paper's ablation: train-time alignment is distillation (streak), test-time alignment is the choice among K "
    "drafts by the verifier. Speed-up (accepted streak)."
)
SEEN, NEW = "seen_template", "new_template"
OURS = "specdiff2"  # how the names of the paper's and this project's methods begin
MANY = 8  # rows are counted rather than named
DRAFTINGS = {
    "streak": "of the likeliest chain",
    "sampled_streak": "of one draft sampled at temperature 1",
    "tree": "of the best-first tree",
}  # columns of the training curves


def findings(report: Report) -> list[str]:
    """The opening paragraph, a sentence each."""
    sentences = [
        fastest(report),
        rivals(report),
        alignment(report),
        losslessness(report),
        yardstick(report),
        cost_model(report),
    ]
    return [sentence for sentence in sentences if sentence]


def place(row: dict[Any, Any]) -> str:
    return f"{row['benchmark']} ({row['split']})"


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
        f"{opening}{'. It decodes' if one else ' decode'} at {_listed(parts)} the speed of vanilla decoding in the "
        f"same engine (in brackets {report.params.confidence:.0%} intervals over prompts)."
    )
    slow = [place(row) for row in best if row["speedup_high"] < 1]
    level = [place(row) for row in best if row["speedup_low"] <= 1 <= row["speedup_high"]]
    if slow:
        text += f" On {_listed(slow)} even the fastest is slower than vanilla."
    if level:
        text += f" On {_listed(level)} the fastest is not told apart from vanilla."
    sure = [f"{row['method']} on {place(row)}" for row in drafting.to_dict("records") if row["speedup_low"] > 1]
    if len(sure) > MANY:
        text += f" {len(sure)} of {len(drafting)} rows are faster than vanilla with the whole interval."
    elif sure:
        text += f" Faster than vanilla with the whole interval: {_listed(sure)}."
    return text


def rivals(report: Report) -> str:
    """The fastest of this project's methods beside the fastest other one, place by place; nothing without a rival."""
    drafting = tables.drafting(report.table)
    ours = drafting["method"].str.startswith(OURS)
    parts = []
    for _, rows in drafting.groupby(["benchmark", "split"], sort=False):
        mine, others = rows[ours.loc[rows.index]], rows[~ours.loc[rows.index]]
        if mine.empty or others.empty:
            continue
        a, b = (side.loc[side["speedup"].idxmax()] for side in (mine, others))
        apart = a["speedup_low"] > b["speedup_high"] or b["speedup_low"] > a["speedup_high"]
        parts.append(
            f"on {place(a)} {a['method']} {tables.ratio(a['speedup'])} against {b['method']} "
            f"{tables.ratio(b['speedup'])} (intervals {'apart' if apart else 'overlap'})"
        )
    return f"The fastest method of this project beside the fastest other: {'; '.join(parts)}." if parts else ""


def alignment(report: Report) -> str:
    """What distillation changed on held-out prompts, for each way of drafting."""
    parts = []
    ours = {name: curve for name, curve in report.curves.items() if name in (START, *report.objectives)}
    for quantity, drafting in DRAFTINGS.items():
        known = [(name, curves.last(curve, quantity)) for name, curve in ours.items()]
        values = [f"{value:.2f} after {name}" for name, value in known if value is not None]
        if len(values) > 1:
            parts.append(f"{drafting} {_listed(values)}")
    if not parts:
        return ""
    return f"Tokens expected to be accepted on held-out prompts of the training corpus: {'; '.join(parts)}."


def losslessness(report: Report) -> str:
    """How many answers were compared with vanilla's and how many differ."""
    drafted = [group.rows for group in report.groups if group.method != VANILLA]
    total = sum(len(measures.compared(rows)) for rows in drafted)
    apart = sum(len(rows) for rows in drafted) - total
    excused, unexcused = report.excused, report.unexcused
    if not total:
        return ""
    text = (
        f"Of {_count(total, 'answer')} compared with vanilla's token by token, {total - excused - unexcused} "
        "are "
        f"equal, {_differ(excused)} at a near tie that the measured rounding can turn (excused)"
    )
    if unexcused:
        return f"{text} and {_differ(unexcused)} WITHOUT EXCUSE: losslessness is broken."
    text = f"{text} and none without excuse."
    if apart:
        text += f" {_count(apart, 'answer')} had coins of their own, and are judged by their law in the tests alone."
    return text


def yardstick(report: Report) -> str:
    """Vanilla against the yardstick: the timing error where nothing is to be gained."""
    speeds = report.table.loc[report.table["method"] == VANILLA, "speedup"].dropna()
    if speeds.empty:
        return ""
    low, high = tables.ratio(speeds.min()), tables.ratio(speeds.max())
    spread = low if low == high else f"{low} to {high}"
    return (
        f"Vanilla timed like a method, against the vanilla steps within its own texts, gives {spread}: differences "
        "of that size are timing error."
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
    count = f"{len(far)} of {len(table)} measured speed-ups are more than {limit}"
    return f"{count} from the cost model: {_listed(names)}."


def alarm(report: Report) -> str:
    """The loud line about unexcused differences, or nothing."""
    if not report.unexcused:
        return ""
    bad = report.table[report.table["unexcused_differences"] > 0]
    names = [f"{r['method']} on {place(r)}: {r['unexcused_differences']}" for r in bad.to_dict("records")]
    return (
        f"NOT LOSSLESS: {_count(report.unexcused, 'answer')} differ from vanilla's without excuse "
        f"({'; '.join(names)}). "
        "No speed-up below may be quoted."
    )


def shared_templates(report: Report) -> str:
    """Declared, not hidden: which split shares its templates with training."""
    splits = set(report.table.loc[report.table["benchmark"] == "gsm_symbolic", "split"])
    if not splits & {SEEN, NEW}:
        return ""
    return (
        f"gsm_symbolic is generated from templates. The problems of its split {SEEN} were never trained on, "
        "but share "
        f"templates with training prompts; the templates of {NEW} were never trained on. "
        f"{NEW} measures generalisation, {SEEN} a deployment whose requests resemble the training prompts."
    )


def limits(report: Report) -> list[str]:
    """What the numbers do not show."""
    by_split = report.table.groupby(["benchmark", "split"], sort=False)["prompts"].max()
    counts = by_split.groupby("benchmark", sort=False).sum()
    sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
    narrow = report.table[report.table["draft_vocab_coverage"] < 1]
    coverage = narrow["draft_vocab_coverage"]
    temperatures = _listed([f"{t:g}" for t in report.temperatures])
    points = [
        f"Few prompts were decoded ({sizes}), and an interval over a handful of prompts covers less than its name "
        "says. It speaks of other prompts of the same kind, not of another training seed, machine or model.",
        "Tokens per second are not comparable between rows: cells run minutes apart on a machine whose pace drifts. "
        "Speed-ups are, since each is paired with vanilla steps timed within the same texts.",
        "One sequence at a time: many requests in a batch leave less idle arithmetic to verify drafts with, "
        "and gain less.",
        "Vanilla is this engine's own plain decoding, timed on the same prompts; other engines are not in the table.",
        f"Verifier temperature {temperatures} only. Prefill is not in the speed-up.",
        "The text is the verifier's own, only sooner: how good it is was not measured.",
    ]
    if len(coverage):
        points.append(
            f"The drafters of {_listed(list(dict.fromkeys(narrow['method'])))} speak the most frequent tokens of their "
            f"corpus only (`draft_vocab`): {coverage.min():.1%} to {coverage.max():.1%} of the emitted tokens; the "
            "drafter can propose no other."
        )
    return points


def remake(report: Report) -> str:
    """How these numbers are made again."""
    return (
        f"Made by dvc repro with profiles: [{report.profile}]. The Git commit that brought this file has the code, "
        "params.yaml and dvc.lock (hashes of every input and output) of these numbers; a rerun measures again, with "
        "the same texts and other seconds."
    )


def machine(report: Report) -> Frame:
    """The stamp every cell carries."""
    return pd.DataFrame([{"what": key, "value": str(value)} for key, value in report.stamp.items()])


def _differ(count: int) -> str:
    return "none differs" if not count else "1 differs" if count == 1 else f"{count} differ"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
