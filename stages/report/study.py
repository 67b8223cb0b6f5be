"""What the report is made of: plates (figures with captions), sheets (tables with notes), and studies of both.

A module that reports on a sweep has one function,

    studies(profile: str, params: ReportParams, *, seed: int) -> list[Study]

which reads what its stages wrote and returns an empty list where they wrote nothing. The report then shows each study
in the page and in report.md, and writes figures/<plate.name>.svg, tables/<sheet.name>.csv and .tex, and `files` into
tables/.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from stages.report import figures, style
from stages.report.frames import Frame

NAME = re.compile(r"[a-z0-9_]+")  # of files, and of ids in the page


@dataclass(frozen=True, kw_only=True)
class Plate:
    """A figure. `svg` is empty where there was nothing to draw; `missing` then says what was missing.

    `reading` is one sentence on how to read it, `alt` what it shows in words for whoever cannot see it. `published`
    names the paper's matching figures, e.g. ("Figure 5",): the report sets their numbers (published.csv) beside it.
    """

    name: str
    title: str
    reading: str
    alt: str
    svg: str = ""
    missing: str = ""
    published: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table; numbers stay numbers, tables.shown formats them. `note` says what columns mean and in which units.

    `data` is what the CSV gets where `rows` is cut or worded for reading. `best` are columns whose highest number is
    set in bold.
    """

    name: str
    title: str
    note: str
    rows: Frame
    data: Frame | None = None
    best: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A section of the report: a heading, a lead computed from the data (what was found, with intervals), the rest.

    `files` are further files by name, e.g. the CSV of every plotted point. ValueError for a name that cannot be a
    file's or an id's.
    """

    name: str
    title: str
    lead: str
    plates: list[Plate] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.name, *(plate.name for plate in self.plates), *(sheet.name for sheet in self.sheets)):
            if not NAME.fullmatch(name):
                raise ValueError(f"study {self.name!r}: {name!r} is not a name of lower-case letters, digits and _")


def plate(
    name: str,
    title: str,
    reading: str,
    alt: str,
    draw: Callable[[], Figure],
    *,
    published: tuple[str, ...] = (),
) -> Plate:
    """Draw in the report's style; figures.Absent becomes a sentence on what was missing."""
    svg = missing = ""
    with style.settings():
        try:
            svg = style.svg(draw())
        except figures.Absent as reason:
            missing = f"Not drawn: {reason}."
    return Plate(name=name, title=title, reading=reading, alt=alt, svg=svg, missing=missing, published=published)
