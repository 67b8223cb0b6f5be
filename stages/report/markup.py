"""Pieces of the page: text, tables that sort, figures with what was published beside them."""

import html
import re

import pandas as pd

from stages.report import published, style, tables
from stages.report.frames import Frame
from stages.report.study import Plate, Sheet

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
LONG = 36  # characters from which a cell's words wrap


def text(value: object) -> str:
    """Markup in names is text."""
    return html.escape(str(value))


def scroll(inner: str, *, label: str) -> str:
    """A box of its own for what may be wider than the screen; the keyboard can scroll it."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}">{inner}</div>'


def missing(words: str) -> str:
    return f'<p class="missing">{text(words)}</p>'


def heading(title: str, *, under: str) -> str:
    """A heading of its own, unless the section is called that already."""
    return f"<h3>{text(title)}</h3>\n" if title not in ("", under) else ""


def sheet(block: Sheet, *, under: str) -> str:
    """A table with its heading and note."""
    note = f'<p class="note">{text(block.note)}</p>\n' if block.note else ""
    body = table(block.rows, best=block.best, label=block.title or block.name)
    return heading(block.title, under=under) + note + body


def table(frame: Frame, *, label: str, best: tuple[str, ...] = ()) -> str:
    """A frame whose columns sort: by number where every cell begins with one or is n/a, else as text."""
    lines = tables.lines(frame)
    columns = list(zip(*lines, strict=True)) if lines else [() for _ in frame.columns]
    numbers = [[leading(cell) for cell in column] for column in columns]
    kinds = [
        "number"
        if pd.api.types.is_numeric_dtype(frame[name])
        or (
            any(n is not None for n in found)
            and all(n is not None or c == tables.NONE for n, c in zip(found, column, strict=True))
        )
        else "text"
        for name, column, found in zip(frame.columns, columns, numbers, strict=True)
    ]
    heads = "".join(head(str(name), kind) for name, kind in zip(frame.columns, kinds, strict=True))
    tops = [
        max((n for n in found if n is not None), default=None) if name in best else None
        for name, found in zip(frame.columns, numbers, strict=True)
    ]
    rows = [
        "<tr>"
        + "".join(
            cell(word, kind, value=numbers[c][r], bold=tops[c] is not None and numbers[c][r] == tops[c])
            for c, (word, kind) in enumerate(zip(line, kinds, strict=True))
        )
        + "</tr>"
        for r, line in enumerate(lines)
    ]
    return sortable(heads, rows, label=label)


def leading(word: str) -> float | None:
    """The number that a cell begins with: '1.50 (0.61)' sorts as 1.5."""
    found = NUMBER.match(word)
    return float(found[0]) if found else None


def head(name: str, kind: str, *, tip: str = "") -> str:
    title = f' title="{text(tip)}"' if tip else ""
    return f'<th scope="col" class="{kind}" data-kind="{kind}"{title}>{text(name)}</th>'


def cell(word: str, kind: str, *, value: float | None, bold: bool) -> str:
    roles = [kind, *(["long"] if kind == "text" and len(word) > LONG else []), *(["best"] if bold else [])]
    data = f' data-value="{value:.6g}"' if kind == "number" and value is not None else ""
    return f'<td class="{" ".join(roles)}"{data}>{text(word)}</td>'


def sortable(heads: str, rows: list[str], *, label: str) -> str:
    body = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return scroll(body, label=label)


def figure(plate: Plate, *, under: str) -> str:
    """A figure, how to read it, and the paper's matching numbers."""
    title = heading(plate.title, under=under)
    beside = "".join(_beside(name) for name in plate.published)
    if not plate.svg:
        return title + missing(plate.missing) + beside
    art = style.inline(plate.svg, name=plate.name, title=text(plate.title), alt=text(plate.alt))
    caption = f"<figcaption>{text(plate.reading)}</figcaption>"
    return f"{title}<figure>{scroll(art, label=plate.title)}{caption}</figure>{beside}"


def _beside(name: str) -> str:
    numbers = published.figure(name)
    note = f'<p class="note published">{text(published.about(name))}</p>'
    return note + (table(numbers, label=name) if len(numbers) else "")
