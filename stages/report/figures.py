"""The figures of the report: tables made elsewhere in, a figure out, or `Absent` with the reason."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from stages.report import measures, tables
from stages.report.cells import VANILLA, Group
from stages.report.frames import Frame
from stages.report.style import GRID, HATCHES, INK, PAPER, legend, line, sheet


class Absent(ValueError):
    """There is nothing to draw; the message says what is missing."""


def place(benchmark: str, split: str, *, joint: str = "\n") -> str:
    """Name of a benchmark and its split on an axis."""
    return f"{benchmark}{joint}{split}"


def speedup(table: Frame, colours: dict[str, str]) -> Figure:
    """A panel for each benchmark and split, a bar with an interval for each method; vanilla is the line at 1."""
    table = tables.drafting(table)
    if table.empty:
        raise Absent("no method besides vanilla has a timed prompt")
    places = list(dict.fromkeys(zip(table["benchmark"], table["split"], strict=True)))
    methods = list(dict.fromkeys(table["method"]))
    figure, [panels] = sheet(1, len(places), width=8.4, height=0.9 + 0.3 * len(methods), sharex=True, sharey=True)
    for axes, where in zip(panels, places, strict=True):
        rows = table[(table["benchmark"] == where[0]) & (table["split"] == where[1])]
        y = np.array([methods.index(method) for method in rows["method"]])
        value = rows["speedup"].to_numpy()
        spread = np.abs([value - rows["speedup_low"].to_numpy(), rows["speedup_high"].to_numpy() - value])
        axes.barh(y, value, 0.74, color=[colours[method] for method in rows["method"]], edgecolor=INK, linewidth=0.6)
        axes.errorbar(value, y, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for at, end, number in zip(y, rows["speedup_high"], value, strict=True):
            label = (max(end, number), at), (3, 0)
            axes.annotate(f"{number:.2f}", *label, textcoords="offset points", va="center", size=7.5)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=3)
        axes.set_title(place(*where))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.margins(x=0.25)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.supxlabel("speed-up over vanilla (×)", size=9)
    return figure


def positions(acceptance: Frame, colours: dict[str, str], *, source: str) -> Figure:
    """Joint and conditional rate, for each benchmark and split ("decoded") or training ("teacher_forced")."""
    table = acceptance[acceptance["source"] == source]
    if table.empty:
        raise Absent(
            "no cell has a drafted token"
            if source == "decoded"
            else "no training curve has a validation row with accept_1 .. accept_G"
        )
    places = list(dict.fromkeys(zip(table["benchmark"], table["split"], strict=True)))
    if source == "decoded":
        figure, panels = sheet(2, len(places), width=8.4, height=4.9, sharex=True, sharey="row")
        upper, lower = panels
    else:
        figure, [[left, right]] = sheet(1, 2, width=8.4, height=3.1)
        upper, lower = [left], [right]
    names = list(dict.fromkeys(table["method"]))
    for column, where in enumerate(places):
        here = table[(table["benchmark"] == where[0]) & (table["split"] == where[1])]
        for k, name in enumerate(names):
            rows = here[here["method"] == name]
            for axes, quantity in ((upper[column], "acceptance_at_pos_j"), (lower[column], "alpha_j")):
                axes.plot(rows["j"], rows[quantity], color=colours[name], label=name, **line(k))
        if source == "decoded":
            upper[column].set_title(place(*where))
    for axes in (*upper, *lower):
        axes.set_ylim(0, 1.02)
        axes.grid(axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in lower if source == "decoded" else (*upper, *lower):
        axes.set_xlabel("draft position j (tokens)")
    upper[0].set_ylabel("joint: 1..j all accepted\n(share of cycles)")
    lower[0].set_ylabel("conditional α_j: j accepted\nonce 1..j-1 were (share)")
    legend(figure, upper[0], columns=min(len(names), 5))
    return figure


def histogram(groups: list[Group], colours: dict[str, str]) -> Figure:
    """Accepted drafts per cycle: a row for each method, a column for each benchmark (splits together)."""
    drafted = [group for group in groups if group.method != VANILLA and group.rows["cycles"].sum()]
    if not drafted:
        raise Absent("no cell has a drafting cycle")
    methods = list(dict.fromkeys(group.method for group in drafted))
    benchmarks = list(dict.fromkeys(group.benchmark for group in drafted))
    figure, panels = sheet(
        len(methods), len(benchmarks), width=8.4, height=0.9 + 0.95 * len(methods), sharex=True, sharey=True
    )
    for row, method in zip(panels, methods, strict=True):
        for axes, benchmark in zip(row, benchmarks, strict=True):
            mine = [g.rows for g in drafted if g.method == method and g.benchmark == benchmark]
            if not mine:
                axes.set_axis_off()
                continue
            accepted = measures.per_cycle(pd.concat(mine))
            share = np.bincount(accepted) / accepted.size
            axes.bar(np.arange(share.size), share, 0.85, color=colours[method], edgecolor=INK, linewidth=0.6)
            axes.axvline(accepted.mean(), color=INK, linewidth=1, linestyle=(0, (4, 2)))
            axes.text(
                0.98,
                0.93,
                f"mean {accepted.mean():.2f}",
                transform=axes.transAxes,
                ha="right",
                va="top",
                size=8,
            )
            axes.grid(axis="y")
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        row[0].set_ylabel(method)
    for axes, benchmark in zip(panels[0], benchmarks, strict=True):
        axes.set_title(benchmark)
    figure.supxlabel("accepted draft tokens in a cycle", size=9)
    figure.supylabel("share of cycles", size=9)
    return figure


def costs(table: Frame, phases: dict[str, str], *, tolerance: float) -> Figure:
    """Left: milliseconds of a cycle by phase. Right: speed-up predicted (ring) and measured (dot)."""
    if table.empty:
        raise Absent("no method besides vanilla has a timed cycle")
    y = np.arange(len(table))[::-1]
    figure, [[left, right]] = sheet(
        1, 2, width=8.4, height=1.3 + 0.24 * len(table), sharey=True, gridspec_kw={"width_ratios": [1.5, 1]}
    )
    start = np.zeros(len(table))
    for phase, hatch in zip(("draft", "verify", "other"), HATCHES, strict=True):
        width = table[f"{phase}_ms"].to_numpy()
        look = {"color": phases[phase], "edgecolor": PAPER, "linewidth": 0.8, "hatch": hatch}
        left.barh(y, width, 0.72, left=start, label=phase, **look)
        start += width
    left.plot(
        table["step_ms"],
        y,
        linestyle="none",
        marker="|",
        markersize=9,
        markeredgewidth=2,
        color=INK,
        label="one vanilla step",
    )
    left.set_yticks(y, [f"{r.method} · {place(r.benchmark, r.split, joint=' ')}" for r in table.itertuples()])
    left.set_ylim(-0.6, len(table) - 0.4)
    left.set_xlabel("time of one cycle (ms)")
    ring, dot = table["predicted"].to_numpy(), table["measured"].to_numpy()
    right.hlines(y, ring, dot, color=GRID, linewidth=3, zorder=1)
    right.plot(
        ring,
        y,
        linestyle="none",
        marker="o",
        markersize=7,
        markerfacecolor="none",
        color=INK,
        label="predicted",
    )
    right.plot(dot, y, linestyle="none", marker="o", markersize=4, color=phases["verify"], label="measured")
    for at, flagged, far in zip(y, table["flagged"], np.maximum(ring, dot), strict=True):
        if flagged:
            note = f"> {tolerance:.0%} apart"
            right.annotate(note, (far, at), (7, 0), textcoords="offset points", va="center", size=7.5)
    right.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=0)
    right.set_xlabel("speed-up (×)")
    right.margins(x=0.15)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    legend(figure, left, right, columns=6)
    return figure


def training(curves: dict[str, Frame], colours: dict[str, str]) -> Figure:
    """For each training the loss above, tokens it is expected to get accepted below; up to four beside one another."""
    drawn = {name: curve for name, curve in curves.items() if len(curve)}
    if not drawn:
        raise Absent("no training has written a curve")
    columns = min(len(drawn), 4)
    bands = -(-len(drawn) // columns)
    figure, panels = sheet(2 * bands, columns, width=8.4, height=4.5 * bands)
    uppers, lowers = ([axes for row in panels[half::2] for axes in row] for half in (0, 1))
    for axes in (*uppers[len(drawn) :], *lowers[len(drawn) :]):
        axes.set_axis_off()
    for upper, lower, (name, curve) in zip(uppers, lowers, drawn.items(), strict=False):
        lines: list[tuple[Axes, str, str, dict[str, Any], str]] = [
            (upper, "loss", "train", {"alpha": 0.45, "linewidth": 1}, "train"),
            (upper, "loss", "valid", {"marker": "o"}, "held out"),
            (lower, "streak", "valid", {"marker": "o"}, "likeliest chain"),
            (lower, "sampled_streak", "valid", {"marker": "^", "linestyle": ":"}, "one sampled draft"),
            (lower, "tree", "valid", {"marker": "s", "linestyle": "--"}, "best-first tree"),
        ]
        for axes, quantity, split, look, label in lines:
            if quantity in curve.columns:
                rows = curve[curve["split"] == split].dropna(subset=[quantity])
                if len(rows):
                    axes.plot(rows["step"], rows[quantity], color=colours[name], label=label, **look)
        for axes, absent in ((upper, "no loss"), (lower, "no held-out streak")):
            if axes.lines:
                axes.legend(loc="best", fontsize=8)
            else:
                axes.text(0.5, 0.5, f"{absent} was written", transform=axes.transAxes, ha="center")
            axes.grid(axis="y")
        upper.set_title(name)
        lower.set_xlabel("training step")
        lower.set_ylim(bottom=0)
        for axes in (upper, lower):
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    for band in range(bands):
        panels[2 * band][0].set_ylabel("training loss")
        panels[2 * band + 1][0].set_ylabel("expected accepted\n(tokens per cycle)")
    top = max(axes.get_ylim()[1] for axes in lowers[: len(drawn)])
    for axes in lowers:
        axes.set_ylim(0, top)
    return figure
