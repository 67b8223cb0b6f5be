"""report.html: one page that needs nothing else. Style, script and figures are inside; it works without the script."""

from pathlib import Path
from typing import Any

from stages.report import markup, outline, tables
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.markup import text
from stages.report.study import Plate, Sheet

HERE = Path(__file__).parent
HEADS = {  # column: heading, what it means
    "benchmark": ("benchmark", "which prompts"),
    "split": ("split", "which part of them"),
    "method": ("method", "how drafts are made and judged"),
    "speedup": ("speed-up", "tokens per second over vanilla's, same engine, prompts and machine"),
    "interval": ("interval", "paired bootstrap over prompts"),
    "prompts": ("prompts", "prompts decoded"),
    "excused_differences": ("excused", "answers that leave vanilla's at a near tie"),
    "unexcused_differences": ("unexcused", "answers that differ without excuse: must be 0"),
    "acceptance_length": ("tokens per cycle", "accepted drafts and bonus, pooled over cycles"),
    "acceptance_length_mean": ("mean over prompts", "tokens per cycle of each prompt, averaged"),
    "accepted_streak": ("accepted streak", "accepted drafts per cycle, bonus excluded"),
    "cost_ratio": ("cost ratio c", "drafting seconds of a cycle over seconds of a vanilla step"),
    "tokens_per_s": ("tokens/s", "decoding only, prefill apart"),
    "draft_vocab_coverage": ("words covered", "share of emitted tokens inside the draft vocabulary"),
}
NAMES = ("benchmark", "split", "method")
SPEEDUPS = (
    "A heading sorts. The grey vanilla rows are vanilla against its own yardstick, so they show the error of the "
    "clock; bold marks the fastest method of a benchmark."
)


def render(report: Report, laid: outline.Outline) -> str:
    """The whole page."""
    title = f"SpecDiff-2 on profile {report.profile}: what was measured"
    body = [
        f"<h1>{text(title)}</h1>",
        '<p class="sub">Lossless speculative decoding with a masked-diffusion drafter, against plain '
        "decoding by the same verifier.</p>",
        *(f'<p class="banner" role="alert">{text(banner)}</p>' for banner in laid.banners),
        f'<p class="findings">{" ".join(text(s) for s in laid.findings)}</p>',
        *([f"<p>{' '.join(text(s) for s in laid.trust)}</p>"] if laid.trust else []),
        '<nav aria-label="Contents"><ul>',
        *(f'<li><a href="#{section.name}">{text(section.title)}</a></li>' for section in laid.sections),
        "</ul></nav>",
    ]
    for section in laid.sections:
        body += [f'<section id="{section.name}">', f"<h2>{text(section.title)}</h2>"]
        body += [_block(block, report, under=section.title) for block in section.blocks]
        body += ["</section>"]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            *body,
            "</main>",
            f"<script>\n{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>",
            "",
        ]
    )


def _block(block: outline.Block, report: Report, *, under: str) -> str:
    if isinstance(block, Sheet):
        return markup.sheet(block, under=under)
    if isinstance(block, Plate):
        return markup.figure(block, under=under)
    if isinstance(block, outline.SpeedUps):
        return f'<p class="note">{SPEEDUPS}</p>\n' + main_table(report)
    if isinstance(block, list):
        return "<ul>" + "".join(f"<li>{text(point)}</li>" for point in block) + "</ul>"
    return f"<p>{text(block)}</p>"


def main_table(report: Report) -> str:
    """The speed-up table, interval in one column, each number with its exact value to sort by."""
    heads = "".join(markup.head(name, "text" if c in NAMES else "number", tip=tip) for c, (name, tip) in HEADS.items())
    drafting = tables.drafting(report.table)
    best = set(drafting.groupby(["benchmark", "split"])["speedup"].idxmax()) if len(drafting) else set()
    rows, before = [], None
    for number, record in enumerate(report.table.to_dict("records")):
        here = (record["benchmark"], record["split"])
        cells = [_cell(str(c), record, report, best=number in best) for c in HEADS]
        rows.append(f'<tr class="{"first" if here != before else ""}">{"".join(cells)}</tr>')
        before = here
    return markup.sortable(heads, rows, label="All speed-ups")


def _cell(column: str, record: dict[Any, Any], report: Report, *, best: bool) -> str:
    if column in ("benchmark", "split"):
        return f'<td class="text">{text(record[column])}</td>'
    if column == "method":
        colour = report.params.colours.methods[record["method"]]
        dot = f'<span class="dot" style="background:{colour}"></span>'
        return f'<td class="text">{dot}{text(record["method"])}</td>'
    if column == "interval":
        low, high = tables.ratio(record["speedup_low"]), tables.ratio(record["speedup_high"])
        return f'<td data-value="{record["speedup_low"]:.6g}">{low} to {high}</td>'
    value = record[column]
    role = ""
    if column == "speedup":
        role = "slow" if record["method"] == VANILLA else "best" if best else ""
    elif column == "unexcused_differences" and value:
        role = "alarm"
    number = f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = f"{value:.1%}" if column == "draft_vocab_coverage" and value == value else tables.shown(column, value)
    return f'<td class="{role}" data-value="{number}">{text(shown)}</td>'
