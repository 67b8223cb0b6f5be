"""The figures of the ablations: a table of points in, a figure out."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from stages.report import figures
from stages.report.frames import Frame
from stages.report.style import INK, legend, line, sheet

WIDE = 8  # greatest over least number on an axis, from which on it is logarithmic
PARTS = {"t_verify/t_1": ("verify", "-"), "c": ("draft", ":")}  # of a cycle's cost that the right panel shows


def lines(table: Frame, colours: dict[str, str], *, label: str) -> Figure:
    """Speed-up, accepted streak and cost of a cycle over the axis, a line for each series."""
    if table["speedup"].isna().all():
        raise figures.Absent("no point of this sweep was timed")
    figure, [[speed, streak, cost]] = sheet(1, 3, width=8.4, height=3.6)
    numeric = _numeric(table)
    ticks = sorted(set(table["x"])) if numeric else list(dict.fromkeys(table["x"]))
    for k, (name, points) in enumerate(table.groupby("series", sort=False)):
        points = points.sort_values("x") if numeric else points
        x = points["x"].to_numpy(dtype=float) if numeric else np.array([ticks.index(v) for v in points["x"]])
        x = x if numeric else x + _aside(k, table["series"].nunique())
        look: dict[str, Any] = {"color": colours[name], **line(k)}
        if not numeric:
            look["linestyle"] = "none"
        for axes, value, low, high in (
            (speed, "speedup", "speedup_low", "speedup_high"),
            (streak, "accepted_streak", "streak_low", "streak_high"),
        ):
            middle = points[value].to_numpy()
            spread = np.clip([middle - points[low].to_numpy(), points[high].to_numpy() - middle], 0, None)
            axes.errorbar(x, middle, yerr=spread, capsize=2, elinewidth=1, label=name, **look)
        model = {"linestyle": ":" if numeric else "none", "marker": "" if numeric else "_", "markersize": 9}
        speed.plot(x, points["predicted"], color=colours[name], linewidth=1.2, **model)
        for column, (_, dashes) in PARTS.items():
            part: dict[str, Any] = look | {"linestyle": dashes if numeric else "none"}
            cost.plot(x, points[column], **part)
    speed.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=0)
    for axes, title in ((speed, "speed-up (×)"), (streak, "accepted streak (tokens)"), (cost, "cost (vanilla steps)")):
        axes.set_title(title)
        axes.grid(axis="y")
        axes.margins(x=0.08)
        _axis(axes, ticks, numeric=numeric)
    for axes in (streak, cost):
        axes.set_ylim(bottom=0)
    _name_parts(cost, table, numeric=numeric)
    streak.set_xlabel(label)
    legend(figure, speed, columns=min(4, table["series"].nunique()))
    return figure


def positions(acceptance: Frame, colours: dict[str, str]) -> Figure:
    """Joint and conditional acceptance over the draft's positions, a curve for each series."""
    return figures.positions(acceptance, colours, source="decoded")


def _numeric(table: Frame) -> bool:
    return pd.api.types.is_numeric_dtype(pd.Series(list(table["x"])))


def _axis(axes: Axes, ticks: list[Any], *, numeric: bool) -> None:
    """Ticks at the measured places; logarithmic where they span a factor of WIDE."""
    if not numeric:
        axes.set_xticks(range(len(ticks)), ticks, rotation=30, ha="right")
        return
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= WIDE:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _aside(number: int, series: int) -> float:
    """Where a series stands beside the others of its place."""
    return (number - (series - 1) / 2) * min(0.15, 0.6 / series)


def _name_parts(axes: Axes, table: Frame, *, numeric: bool) -> None:
    """Write beside the last point which line is which part; without lines, above and below are told in words."""
    last = table.iloc[-1] if not numeric else table.loc[table["x"].idxmax()]
    x = float(last["x"]) if numeric else float(len(dict.fromkeys(table["x"])) - 1)
    for column, (word, _) in PARTS.items():
        if not np.isnan(last[column]):
            axes.annotate(word, (x, last[column]), (0, 5), textcoords="offset points", ha="right", size=8)
