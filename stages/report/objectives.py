"""The objectives of `distill` beside one another, as a chain and as a tree, against masked cross-entropy continued.

Reads data/<profile>/sweeps/points.json and sweeps/objectives/<point>.parquet, and the curves for seconds of training.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stages.common import store
from stages.common.studies import points_file
from stages.report import cells, curves, figures, style, tables
from stages.report.cells import Cell
from stages.report.frames import Frame
from stages.report.params import ReportParams
from stages.report.seeds import Line, Mean, compare, of_seed, speed_up, tokens_per_cycle, trained
from stages.report.study import Sheet, Study, plate

SWEEP, CONTROL = "objectives", "masked_ce"
NAME = "which_objective"  # of the section, its figure and its table


def studies(profile: str, params: ReportParams, *, seed: int) -> list[Study]:
    """The study of the objectives, or nothing where the sweep was not measured."""
    found = read(profile)
    if not found:
        return []
    lines = compare([trained(cell) for cell in found], params, control=CONTROL, seed=seed)
    took = seconds(profile, lines)
    place = " ".join(found[0].rows.iloc[0][["benchmark", "split"]])
    interval = f"{params.confidence:.0%} interval"
    figure = plate(
        NAME,
        "Objectives, as a chain and as a tree",
        f"Each mark is the mean over seeds with its {interval} over prompts, small rings are single seeds, and a mark "
        f"to the right of the dashed line of its kind is ahead of {CONTROL} continued.",
        "Tokens per cycle and speed-up by objective. "
        + "; ".join(f"{x.objective}, {x.draft}: {span(x.tokens)}, {span(x.speedup)}" for x in lines),
        lambda: draw(lines, params.colours.trainings),
    )
    sheet = Sheet(
        name=NAME,
        title=f"Objectives on {place}",
        note=f"Tokens per cycle (bonus included) and speed-up over vanilla: means over seeds, each with its {interval} "
        f"over prompts and with the least and the greatest seed. Then the speed-up over that of {CONTROL} continued, "
        "drafting alike, and the seconds of training after adapt, validation apart. All start from one adapted drafter "
        "and take as many steps over the same texts; a drafter name@6 is as it was after 6 of them.",
        rows=table(lines, took),
        data=by_drafter(lines),
    )
    text = lead(lines, took, place=place, interval=interval)
    return [Study(name=NAME, title="Which objective", lead=text, plates=[figure], sheets=[sheet])]


def read(profile: str) -> list[Cell]:
    """The points with a drafter, in the sweep's order, if it is measured. ValueError: as cells.read_points."""
    listed = points_file(profile)
    known = store.read_json(listed) if listed.exists() else {}
    found = cells.read_points(profile, SWEEP, known.get(SWEEP, {"points": []})["points"])
    return [cell for cell in found if cell.provenance["params"][cell.method]["drafter"] is not None]


def seconds(profile: str, lines: list[Line]) -> dict[str, float]:
    """Training seconds of each objective, mean over its seeds; only where every seed's curve wrote them down."""
    drafters: dict[str, list[str]] = {}
    for line in lines:
        drafters.setdefault(line.objective, []).extend(one.drafter for one in line.seeds)
    known = curves.read(profile, sorted({name.partition("@")[0] for names in drafters.values() for name in names}))
    found = {}
    for objective, names in drafters.items():
        parts = [name.partition("@") for name in dict.fromkeys(names)]
        each = [_until(known[name], step) for name, _, step in parts if name in known and "seconds" in known[name]]
        if len(each) == len(parts):
            found[objective] = float(np.mean(each))
    return found


def _until(curve: Frame, step: str) -> float:
    """Seconds of a training up to a step; to its end without one."""
    done = curve.dropna(subset=["seconds"])
    done = done[done["step"] <= int(step)] if step else done
    return float(done["seconds"].max()) if len(done) else 0.0


def table(lines: list[Line], took: dict[str, float]) -> Frame:
    """A row for each objective and way of drafting."""
    rows = [
        {
            "objective": line.objective,
            "draft": line.draft,
            "seeds": len(line.seeds),
            "tokens per cycle": line.tokens.value,
            "interval, tokens": _to(line.tokens.low, line.tokens.high),
            "over seeds, tokens": _to(line.tokens.least, line.tokens.greatest),
            "speedup": line.speedup.value,
            "interval, speedup": _to(line.speedup.low, line.speedup.high),
            "over seeds, speedup": _to(line.speedup.least, line.speedup.greatest),
            f"speedup over {CONTROL}": line.relative.value,
            f"interval, over {CONTROL}": _to(line.relative.low, line.relative.high),
            "training seconds": took.get(line.objective, float("nan")),
        }
        for line in lines
    ]
    return pd.DataFrame(rows)


def by_drafter(lines: list[Line]) -> Frame:
    """Every drawn number: a row for each seed, with the mean and the interval of its line."""
    rows = []
    for line in lines:
        for one in line.seeds:
            row: dict[str, str | int | float] = {"objective": line.objective, "draft": line.draft}
            row |= {"drafter": one.drafter, "prompts": one.sums_4P.shape[1]}
            for name, mean, ratio in _quantities(line):
                row |= {name: of_seed(one, ratio), f"mean_{name}": mean.value}
                row |= {f"mean_{name}_low": mean.low, f"mean_{name}_high": mean.high}
            rows.append(row)
    return pd.DataFrame(rows)


def _quantities(line: Line) -> list[tuple[str, Mean, Callable[[np.ndarray], np.ndarray]]]:
    """What is drawn of a line: name, mean, and the ratio it is of."""
    return [("tokens_per_cycle", line.tokens, tokens_per_cycle), ("speedup", line.speedup, speed_up)]


def lead(lines: list[Line], took: dict[str, float], *, place: str, interval: str) -> str:
    """What was found, one way of drafting after the other, whichever way it fell."""
    parts = [f"On {place} (in brackets the {interval} over prompts):"]
    for draft in dict.fromkeys(line.draft for line in lines):
        here = [line for line in lines if line.draft == draft and line.speedup.value == line.speedup.value]
        parts += _found(draft, here) if here else []
    spread = max(line.tokens.greatest - line.tokens.least for line in lines)
    if any(len(line.seeds) > 1 for line in lines):
        parts.append(f"The seeds of one objective lie up to {spread:.2f} tokens per cycle apart.")
    shares = [took[name] / took[CONTROL] for name in took if name != CONTROL] if CONTROL in took else []
    if shares:
        parts.append(
            f"{CONTROL} was continued for {took[CONTROL]:.0f} s; the others took {min(shares):.2f} to "
            f"{max(shares):.2f} times as long for the same steps."
        )
    return " ".join(parts)


def _found(draft: str, here: list[Line]) -> list[str]:
    best = max(here, key=lambda line: line.speedup.value)
    parts = [f"Drafting a {draft}, {best.objective} is the fastest at {span(best.speedup)} times vanilla's speed."]
    control = next((line for line in here if line.objective == CONTROL), None)
    if control is None:
        return [*parts, f"{CONTROL} continued was not measured."]
    others = [line for line in here if line is not control]
    # Intervals are over prompts; the seeds say how much of a lead the order of the training texts can make.
    least, greatest = control.speedup.least, control.speedup.greatest
    ahead = [x.objective for x in others if x.relative.low > 1 and x.speedup.least > greatest]
    behind = [x.objective for x in others if x.relative.high < 1 and x.speedup.greatest < least]
    level = len(others) - len(ahead) - len(behind)
    return [
        *parts,
        f"{CONTROL} continued has {span(control.speedup)}; ahead of it with the whole interval and every seed: "
        f"{', '.join(ahead) or 'none'}; behind it: {', '.join(behind) or 'none'}; not told apart from it: {level}.",
    ]


def span(mean: Mean) -> str:
    """A value with its interval."""
    return f"{tables.ratio(mean.value)} [{_to(mean.low, mean.high)}]"


def _to(low: float, high: float) -> str:
    return f"{tables.ratio(low)} to {tables.ratio(high)}"


def draw(lines: list[Line], colours: dict[str, str]) -> Figure:
    """Objectives down; tokens per cycle on the left, speed-up on the right; a marker for each way of drafting."""
    drafting = [line for line in lines if line.tokens.value == line.tokens.value]
    if not drafting:
        raise figures.Absent("no point of the sweep has a drafting cycle")
    names = list(dict.fromkeys(line.objective for line in drafting))
    drafts = list(dict.fromkeys(line.draft for line in drafting))
    figure, [panels] = style.sheet(1, 2, width=8.4, height=1.3 + 0.36 * len(names), sharey=True)
    for line in drafting:
        kind = drafts.index(line.draft)
        y = names.index(line.objective) + 0.3 * (kind - (len(drafts) - 1) / 2)
        colour = colours.get(line.objective.partition("@")[0], style.INK)
        look: dict[str, Any] = _look(kind) | {"color": colour, "linestyle": "none"}
        for axes, (_, mean, ratio) in zip(panels, _quantities(line), strict=True):
            apart = [[max(0.0, mean.value - mean.low)], [max(0.0, mean.high - mean.value)]]
            bars: dict[str, Any] = {"xerr": apart, "ecolor": style.INK, "elinewidth": 1, "capsize": 2}
            axes.errorbar([mean.value], [y], markersize=6, **bars, **look)
            if len(line.seeds) > 1:
                each = [of_seed(one, ratio) for one in line.seeds]
                axes.plot(each, [y] * len(each), "o", markersize=3, markerfacecolor="none", color=style.INK)
            if line.objective == CONTROL:
                axes.axvline(mean.value, color=style.INK, linewidth=0.9, linestyle=_look(kind)["linestyle"], zorder=0)
    for kind, draft in enumerate(drafts):
        panels[0].plot([], [], color=style.INK, linewidth=0.9, label=draft, **_look(kind))
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[0].set_xlabel("tokens per cycle")
    panels[1].set_xlabel("speed-up over vanilla (×)")
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    style.legend(figure, panels[0], columns=len(drafts))
    return figure


def _look(kind: int) -> dict[str, Any]:
    """Marker and dashes of a way of drafting."""
    return {
        "marker": style.MARKERS[kind % len(style.MARKERS)],
        "linestyle": style.DASHES[1 + kind % (len(style.DASHES) - 1)],
    }
