"""report.md: the report in brief, for a reader on GitHub, with the figures linked."""

import pandas as pd

from stages.report import fairness, tables, words
from stages.report.content import Report
from stages.report.frames import Frame
from stages.report.gallery import Plate


def render(report: Report, plates: list[Plate]) -> str:
    """Findings, table, figures, declarations."""
    parts = [f"# SpecDiff-2 on profile `{report.profile}`: what was measured"]
    parts += [f"> **{text}**" for text in (words.SMOKE if report.smoke else "", words.alarm(report)) if text]
    parts.append(" ".join(words.findings(report)))
    parts.append("## Speed-ups\n\nSpeed-up (accepted streak).\n\n" + _by_method(report))
    parts.append(tables.markdown(_short(report)))
    if len(ablation := tables.ablation(report.table)):
        parts.append(f"## What alignment gains\n\n{words.ABLATION}\n\n" + tables.markdown(ablation))
    if splits := words.shared_templates(report):
        parts.append(splits)
    parts.append("All columns: [speedups.csv](speedups.csv). The whole page: [report.html](report.html).")
    for plate in plates:
        link = f"![{plate.alt.replace('[', '(').replace(']', ')')}](figures/{plate.name}.svg)"
        parts.append(f"## {plate.title}\n\n" + (f"{link}\n\n{plate.reading}" if plate.svg else plate.missing))
    if len(report.published):
        parts.append(
            "## Beside the published numbers\n\nTheirs are from A100 GPUs, other models and other benchmarks "
            "of the same kind "
            "(SpecDiff-2, arXiv 2511.00606).\n\n" + tables.markdown(report.published)
        )
    if len(report.fairness):
        parts.append(f"## Is the comparison fair?\n\n{fairness.NOTE}\n\n" + tables.markdown(report.fairness))
    parts.append("## Machine\n\n" + "; ".join(f"{key} {value}" for key, value in report.stamp.items()) + ".")
    parts.append(words.remake(report))
    parts.append("## What the numbers do not show\n\n" + "\n".join(f"- {point}" for point in words.limits(report)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _by_method(report: Report) -> str:
    table = tables.by_method(report.table)
    return tables.markdown(table) if len(table) else "No method besides vanilla was timed."


def _short(report: Report) -> Frame:
    table = report.table
    spans = [
        f"{tables.ratio(low)} to {tables.ratio(high)}"
        for low, high in zip(table["speedup_low"], table["speedup_high"], strict=True)
    ]
    return pd.DataFrame(
        {
            "benchmark": table["benchmark"],
            "split": table["split"],
            "method": table["method"],
            "prompts": table["prompts"],
            "speed-up": [tables.ratio(value) for value in table["speedup"]],
            f"{report.params.confidence:.0%} interval": spans,
            "tokens per cycle": table["acceptance_length"],
            "cost ratio c": table["cost_ratio"],
            "tokens/s": [tables.shown("tokens_per_s", value) for value in table["tokens_per_s"]],
            "excused": table["excused_differences"],
            "unexcused": table["unexcused_differences"],
        }
    )
