"""report.md: the report in brief, for a reader on GitHub, with the figures linked."""

import pandas as pd

from stages.report import outline, published, tables
from stages.report.content import Report
from stages.report.frames import Frame
from stages.report.study import Plate, Sheet

MORE = (
    "All columns: [speedups.csv](speedups.csv). Every table as CSV and LaTeX: [tables](tables). "
    "The whole page: [report.html](report.html)."
)


def render(report: Report, laid: outline.Outline) -> str:
    """Findings, then the sections of the outline."""
    parts = [f"# SpecDiff-2 on profile `{report.profile}`: what was measured"]
    parts += [f"> **{banner}**" for banner in laid.banners]
    parts += [" ".join(laid.findings), " ".join(laid.trust), MORE]
    for section in laid.sections:
        if section.brief:
            parts.append(f"## {section.title}")
            parts += [_block(block, report, under=section.title) for block in section.blocks]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _block(block: outline.Block, report: Report, *, under: str) -> str:
    if isinstance(block, Sheet):
        note = f"{block.note}\n\n" if block.note else ""
        return _heading(block.title, under) + note + tables.markdown(block.rows)
    if isinstance(block, Plate):
        return _heading(block.title, under) + _figure(block)
    if isinstance(block, outline.SpeedUps):
        return tables.markdown(_short(report))
    if isinstance(block, list):
        return "\n".join(f"- {point}" for point in block)
    return block


def _heading(title: str, under: str) -> str:
    return f"### {title}\n\n" if title not in ("", under) else ""


def _figure(plate: Plate) -> str:
    link = f"![{plate.alt.replace('[', '(').replace(']', ')')}](figures/{plate.name}.svg)"
    parts = [f"{link}\n\n{plate.reading}" if plate.svg else plate.missing]
    for name in plate.published:
        numbers = published.figure(name)
        parts.append(published.about(name) + (f"\n\n{tables.markdown(numbers)}" if len(numbers) else ""))
    return "\n\n".join(parts)


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
