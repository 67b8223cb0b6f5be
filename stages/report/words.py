"""What the report says around its numbers: warnings, declarations, limits, machine."""

import pandas as pd

from stages.report import tables
from stages.report.content import Report
from stages.report.findings import count, listed, place
from stages.report.frames import Frame

SMOKE = (
    "This is the smoke profile: a tiny random model on made-up prompts. It shows that the pipeline runs. "
    "The numbers below mean nothing."
)
BY_METHOD = (
    "Each method on each benchmark: speed-up over vanilla and, in brackets, the accepted streak (drafted tokens "
    "accepted per verifier pass, the token that comes free with each pass not counted)."
)
CONTRASTS = (
    "How many times as fast the method in the lead is as each other one, on the same prompts, resampled for both at "
    "once: the interval is of the ratio itself, so it can lie above 1 where the two intervals against vanilla overlap. "
    "The method in the lead has the highest geometric mean of its speed-ups; picked after the fact, it owes a little "
    "of its lead to luck."
)
ABLATION = (
    "The paper's ablation: train-time alignment is distillation (streak), test-time alignment is the choice among K "
    "drafts by the verifier. Speed-up (accepted streak)."
)
GAINS = (
    "Speed of a method over that of another which lacks what the line names, prompt by prompt, with the interval of "
    "the ratio. 1 means that the thing gained nothing, less than 1 that it cost more than it brought."
)
COSTS = (
    "Speed-up = (1 + E[L]) / (t_verify/t_1 + c + o), costs in vanilla steps, fitted once for each method over all its "
    "prompts; E[L] is the accepted streak of the line."
)
PUBLISHED = (
    "Theirs were measured on A100 GPUs with verifiers of 14 and 72 billion parameters and other benchmarks of the same "
    "kind (SpecDiff-2, arXiv 2511.00606). They show a direction; the difference is not a result."
)
ACCURACY = (
    "Share of right answers. Lossless methods answer as vanilla does, so the columns must agree but for excused "
    "differences."
)
SEEN, NEW = "seen_template", "new_template"


def alarm(report: Report) -> str:
    """The loud line about unexcused differences, or nothing."""
    if not report.unexcused:
        return ""
    bad = report.table[report.table["unexcused_differences"] > 0]
    names = [f"{r['method']} on {place(r)}: {r['unexcused_differences']}" for r in bad.to_dict("records")]
    return (
        f"NOT LOSSLESS: {count(report.unexcused, 'answer')} differ from vanilla's without excuse "
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
    sizes = ", ".join(f"{name} {number}" for name, number in counts.items())
    narrow = report.table[report.table["draft_vocab_coverage"] < 1]
    coverage = narrow["draft_vocab_coverage"]
    temperatures = listed([f"{t:g}" for t in report.temperatures])
    rows = len(tables.drafting(report.table))
    points = [
        f"Few prompts were decoded ({sizes}), and an interval over a handful of prompts covers less than its name "
        "says. It speaks of other prompts of the same kind, not of another training seed, machine or model.",
        "Tokens per second are not comparable between rows: cells run minutes apart on a machine whose pace drifts. "
        "Speed-ups are, since each is paired with vanilla steps timed within the same texts.",
        f"One machine ({report.stamp.get('device', 'unknown')}, {report.stamp.get('dtype', 'unknown')}): where "
        "arithmetic is cheap beside memory traffic, as on a large GPU, a wide draft costs less to verify than here.",
        "One sequence at a time: many requests in a batch leave less idle arithmetic to verify drafts with, "
        "and gain less.",
        "Vanilla is this engine's own plain decoding, timed on the same prompts; other engines are not in the table.",
        f"Verifier temperature {temperatures} only in the cells. Prefill is not in the speed-up.",
    ]
    if rows > 1:
        share = 1 - report.params.confidence
        points.append(
            f"Each interval stands alone. Of {rows} at {report.params.confidence:.0%} about "
            f"{max(1, round(rows * share))} can be expected to miss, and nothing was done about that."
        )
    if report.accuracy.empty:
        points.append("The text of a cell is the verifier's own, only sooner: how good it is was not measured there.")
    if len(coverage):
        points.append(
            f"The drafters of {listed(list(dict.fromkeys(narrow['method'])))} speak the most frequent tokens of their "
            f"corpus only (`draft_vocab`): {coverage.min():.1%} to {coverage.max():.1%} of the emitted tokens; the "
            "drafter can propose no other."
        )
    if report.missing_curves:
        points.append(f"No training curve was found for {listed(report.missing_curves)}.")
    return points


def remake(report: Report) -> str:
    """How these numbers are made again."""
    return (
        f"Made by dvc repro with profiles: [{report.profile}]. dvc.lock, beside this file in the same commit, has the "
        "hashes of the code, values, inputs and outputs of every stage as it was when it ran; a rerun measures again, "
        "with the same texts and other seconds."
    )


def machine(report: Report) -> Frame:
    """The stamp every cell carries, and the most memory that one took."""
    facts = dict(report.stamp)
    if report.peak_mb:
        facts["peak memory of a cell"] = f"{report.peak_mb} MB"
    return pd.DataFrame([{"what": key, "value": str(value)} for key, value in facts.items()])
