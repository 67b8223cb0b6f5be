"""report.html: one page that needs nothing else. Style, script and figures are inside; it works without the
script.
"""

import html
from pathlib import Path
from typing import Any

import pandas as pd

from stages.report import fairness, style, tables, words
from stages.report.cells import VANILLA
from stages.report.content import Report
from stages.report.frames import Frame
from stages.report.gallery import Plate

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
LOSSLESS = (
    "The random choice at a position is a function of seed, prompt and position alone. A method that accepts a draft "
    "exactly where it equals that choice must therefore write vanilla's text. A difference is excused only where "
    "vanilla's two best tokens lie closer than the rounding measured between a one-token and a block pass."
)


def render(report: Report, plates: list[Plate]) -> str:
    """The whole page."""
    title = f"SpecDiff-2 on profile {report.profile}: what was measured"
    splits = words.shared_templates(report)
    banners = [text for text in (words.SMOKE if report.smoke else "", words.alarm(report)) if text]
    body = [
        f"<h1>{_text(title)}</h1>",
        '<p class="sub">Lossless speculative decoding with a masked-diffusion drafter, against plain '
        "decoding by the same "
        "verifier.</p>",
        *(f'<p class="banner" role="alert">{_text(text)}</p>' for text in banners),
        f'<p class="findings">{" ".join(_text(s) for s in words.findings(report))}</p>',
        "<h2>Speed-ups</h2>",
        '<p class="note">Each method on each benchmark: speed-up over vanilla and, in brackets, the accepted streak '
        "(drafted tokens accepted per verifier pass). Intervals are in the table below.</p>",
        _plain(tables.by_method(report.table), "No method besides vanilla was timed."),
        main_table(report),
        '<p class="note">A heading sorts. The grey vanilla rows are vanilla against its own yardstick, so '
        "they show the error "
        "of the clock; bold marks the fastest method of a benchmark.</p>",
        *([f"<p>{_text(splits)}</p>"] if splits else []),
        *_ablation(report),
        "<h2>Figures</h2>",
        *(_figure(plate) for plate in plates),
        "<h2>Is it lossless?</h2>",
        f"<p>{_text(words.losslessness(report) or 'No method besides vanilla was decoded.')} {LOSSLESS}</p>",
        "<h2>Cost model</h2>",
        "<p>Speed-up = (1 + E[L]) / (t_verify/t_1 + c + o), costs in vanilla steps, fitted once for each "
        "method over all its "
        "prompts; E[L] is the accepted streak of the line.</p>",
        _cost_table(report),
        *_accuracy(report),
        "<h2>Beside the published numbers</h2>",
        "<p>Theirs were measured on A100 GPUs with verifiers of 14 and 72 billion parameters and other "
        "benchmarks of the same "
        "kind (SpecDiff-2, arXiv 2511.00606). They show a direction; the difference is not a result.</p>",
        _plain(report.published, "No method of this run has a published number."),
        "<h2>Is the comparison fair?</h2>",
        f'<p class="note">{_text(fairness.NOTE)}</p>',
        _plain(report.fairness, "No method of this run drafts with a trained model."),
        "<h2>Methods, machine, versions</h2>",
        _plain(_methods(report), ""),
        _plain(words.machine(report), ""),
        f"<p>{_text(words.remake(report))}</p>",
        "<h2>What the numbers do not show</h2>",
        "<ul>" + "".join(f"<li>{_text(point)}</li>" for point in words.limits(report)) + "</ul>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            *body,
            "</main>",
            f"<script>\n{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>",
            "",
        ]
    )


def main_table(report: Report) -> str:
    """The speed-up table, interval in one column, each number with its exact value to sort by."""
    heads = "".join(
        f'<th scope="col" class="{kind}" data-kind="{kind}" title="{_text(tip)}">{_text(name)}</th>'
        for c, (name, tip) in HEADS.items()
        for kind in ["text" if c in NAMES else "number"]
    )
    records = report.table.to_dict("records")
    drafting = tables.drafting(report.table)
    best = set(drafting.groupby(["benchmark", "split"])["speedup"].idxmax()) if len(drafting) else set()
    rows, before = [], None
    for number, record in enumerate(records):
        here = (record["benchmark"], record["split"])
        cells = [_cell(str(c), record, report, best=number in best) for c in HEADS]
        rows.append(f'<tr class="{"first" if here != before else ""}">{"".join(cells)}</tr>')
        before = here
    return _scroll(f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>')


def _cell(column: str, record: dict[Any, Any], report: Report, *, best: bool) -> str:
    if column in ("benchmark", "split"):
        return f'<td class="text">{_text(record[column])}</td>'
    if column == "method":
        colour = report.params.colours.methods[record["method"]]
        dot = f'<span class="dot" style="background:{colour}"></span>'
        return f'<td class="text">{dot}{_text(record["method"])}</td>'
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
    text = f"{value:.1%}" if column == "draft_vocab_coverage" and value == value else tables.shown(column, value)
    return f'<td class="{role}" data-value="{number}">{_text(text)}</td>'


def _figure(plate: Plate) -> str:
    if plate.svg:
        art = _scroll(style.inline(plate.svg, name=plate.name, alt=_text(plate.alt)))
        caption = f"<figcaption>{_text(plate.reading)}</figcaption>"
        return f"<h3>{_text(plate.title)}</h3>\n<figure>{art}{caption}</figure>"
    return f'<h3>{_text(plate.title)}</h3>\n<p class="missing">{_text(plate.missing)}</p>'


def _cost_table(report: Report) -> str:
    if report.costs.empty:
        return '<p class="missing">No method besides vanilla has a timed cycle.</p>'
    return _plain(cost_lines(report), "")


def cost_lines(report: Report) -> Frame:
    """The cost table with the difference in words."""
    table = report.costs[
        ["benchmark", "split", "method", "t_verify/t_1", "c", "o", "accepted_streak", "predicted", "measured"]
    ].rename(columns={"accepted_streak": "E[L]"})
    flags = [
        f"{e:+.1%}" + (" FAR" if f else "") for e, f in zip(report.costs["error"], report.costs["flagged"], strict=True)
    ]
    return table.assign(difference=flags)


def _ablation(report: Report) -> list[str]:
    table = tables.ablation(report.table)
    if table.empty:
        return []
    return [
        "<h2>What alignment gains</h2>",
        f'<p class="note">{_text(words.ABLATION)}</p>',
        _plain(table, ""),
    ]


def _accuracy(report: Report) -> list[str]:
    if report.accuracy.empty:
        return []
    wide = report.accuracy.pivot_table(
        index=["benchmark", "split", "graded"], columns="method", values="accuracy", sort=False
    )
    wide = wide.reset_index().rename_axis(columns=None)
    note = (
        "Share of right answers. Lossless methods answer as vanilla does, so the columns must agree but for "
        "excused differences."
    )
    return ["<h2>Answers that are right</h2>", f'<p class="note">{note}</p>', _plain(wide, "")]


def _methods(report: Report) -> Frame:
    table = report.methods.astype(object)
    table["parameters"] = [f"{n / 1e6:.1f} million" if n and n == n else "none" for n in table["parameters"]]
    return table.where(table.notna(), "none")


def _plain(table: Frame, otherwise: str) -> str:
    """A table as it stands, or a sentence."""
    if table.empty:
        return f'<p class="missing">{_text(otherwise)}</p>'
    text = [not pd.api.types.is_numeric_dtype(table[c]) and c != "difference" for c in table.columns]
    classes = ["text" if t else "num" for t in text]
    heads = "".join(f'<th scope="col" class="{k}">{_text(c)}</th>' for k, c in zip(classes, table.columns, strict=True))
    rows = [
        "<tr>" + "".join(f'<td class="{k}">{_text(v)}</td>' for k, v in zip(classes, line, strict=True)) + "</tr>"
        for line in tables.lines(table)
    ]
    return _scroll(f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>")


def _scroll(inner: str) -> str:
    return f'<div class="scroll" tabindex="0">{inner}</div>'


def _text(value: object) -> str:
    return html.escape(str(value))
