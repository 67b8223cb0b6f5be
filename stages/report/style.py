"""How figures look and how they become bytes: the same data gives the same SVG, to the byte.

Ids come from a fixed salt, metadata (date, library) is dropped, and text stays text, so that a page can set
it in its own font and a reader can search it. Inside the page ink, grid and paper follow the reader's light
or dark setting.
"""

import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GRID, PAPER = "#1f2328", "#d8dee4", "#ffffff"
MARKERS = "osD^vPX*"  # a second cue beside the colour
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)))  # a third, once the markers are used up
HATCHES = ("////", "", "....")  # of stacked bars, in the colour of the paper
SETTINGS = {
    "svg.hashsalt": "specdiff2",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


def settings() -> AbstractContextManager[None]:
    """Figures must be both made and saved inside this context."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS})  # pyright: ignore[reportArgumentType]


def line(number: int) -> dict[str, Any]:
    """Marker and dashes of the n-th line of a figure: the first 32 differ even without their colours."""
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number // len(MARKERS) % len(DASHES)],
    }


def sheet(
    rows: int, columns: int, *, width: float, height: float, **options: object
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure (inches) and its axes by row and column. No global figure state is touched."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).tolist()  # pyright: ignore


def legend(figure: Figure, *panels: Axes, columns: int) -> None:
    """One legend under all panels, for what the given ones show."""
    entries = [entry for axes in panels for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def svg(figure: Figure) -> str:
    """The figure as a stand-alone SVG without metadata."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return re.sub(r"<!DOCTYPE.*?>\s*", "", text, flags=re.DOTALL)


def inline(text: str, *, name: str, title: str, alt: str) -> str:
    """The SVG as a part of a page: own ids, no outside names, colours and fonts of the page. Words are markup."""
    body = text[text.index("<svg") :]
    box = re.search(r'viewBox="([^"]+)"', body)
    assert box, "matplotlib writes a viewBox"
    body = body[body.index(">") + 1 :]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\1{name}-", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font)", body)
    body = re.sub(r"font: (bold|\d{3}) ([\d.]+px) [^;\"]+", r"font: \1 \2 var(--font)", body)
    for colour, role in ((INK, "currentColor"), (GRID, "var(--grid)"), (PAPER, "var(--paper)")):
        body = body.replace(colour, role)
    words = f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{alt}</desc>'
    head = f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title" aria-describedby="{name}-desc">'
    return f"{head}{words}{body.strip()}"
