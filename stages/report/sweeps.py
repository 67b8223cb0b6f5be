"""The ablations: a figure and a table for each sweep, from the points that stage `sweep` measured.

Reads data/<profile>/sweeps/points.json and <sweep>/<point>.parquet.

Speed-up and accepted streak of a point come with bootstrap intervals over its prompts. Beside them stands what the cost
model makes of it, acceptance length / (t_verify/t_1 + c + o) (cost.py). Where a line has three numbers on the axis or
more, the cost of its cycles is first smoothed to a straight line over the axis, so that the model has less to fit with
than there are points: verifying costs by the node, drafting by the layer.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stages.common import store
from stages.common import studies as places
from stages.report import cells, cost, curves, measures, sweep_figures, tables
from stages.report.cells import VANILLA, Cell, Group
from stages.report.frames import Frame
from stages.report.params import ReportParams
from stages.report.study import Sheet, Study, plate

ELSEWHERE = ("objectives",)  # in objectives.py; graded sweeps are in reasoning.py
POSITION = "position"
LABELS = {
    "gamma": "window G (tokens)",
    "steps": "denoising steps",
    "drafts": "drafts K",
    "temperature": "drafter temperature T_d",
    "nodes": "tree nodes N",
    "threshold": "smallest product of q in the tree",
    "shared.temperature": "verifier temperature T_v",
    "shared.max_new_tokens": "most tokens of an answer",
    "drafter.steps": "distillation steps",
    "drafter.layers": "layers of the drafter",
    "drafter": "drafter",
    "method": "method",
    POSITION: "draft position j (tokens)",
}  # of the axis, by what is varied


class Measured(NamedTuple):
    """A sweep as measured: its points in order."""

    name: str
    title: str
    beside: tuple[str, ...]
    x_name: str
    points: list[Cell]

    @property
    def label(self) -> str:
        return LABELS.get(self.x_name, self.x_name)


def studies(profile: str, params: ReportParams, *, seed: int) -> list[Study]:
    """A study for each measured sweep that no other module reports."""
    path = places.points_file(profile)
    listed: dict[str, dict[str, Any]] = store.read_json(path) if path.exists() else {}
    checked = places.check_file(profile)
    graded: list[str] = store.read_json(checked)["sweeps"] if checked.exists() else []
    mine = [name for name in listed if name not in (*ELSEWHERE, *graded)]
    return [study(read(profile, name, listed[name]), params, seed=seed) for name in mine]


def read(profile: str, name: str, listed: dict[str, Any]) -> Measured:
    """The points of a sweep. ValueError if one is missing, empty, or was timed on another machine."""
    found = cells.read_points(profile, name, listed["points"])
    x_name = found[0].provenance["sweep"]["x_name"]
    return Measured(name, listed["title"], tuple(listed["beside"]), x_name, found)


def study(sweep: Measured, params: ReportParams, *, seed: int) -> Study:
    table = rows(sweep, params, seed=seed)
    name, place = f"sweep_{sweep.name}", " ".join(sweep.points[0].rows.iloc[0][["benchmark", "split"]])
    prompts, interval = int(table["prompts"].max()), f"{params.confidence:.0%}"
    colours = series_colours(list(dict.fromkeys(table["series"])), params)
    note = f"On {place}, {prompts} prompt{'' if prompts == 1 else 's'}; {interval} intervals over them."
    if sweep.x_name == POSITION:
        by_position = positions(sweep)
        figure = plate(
            name,
            "Acceptance by draft position",
            "Above, how often the first j drafts all survive; below, how often draft j survives once those before it "
            f"have. {note}",
            f"Acceptance by draft position. {values(table, 'accepted_streak', 'accepted streak')}",
            lambda: sweep_figures.positions(by_position, colours),
            published=sweep.beside,
        )
        files = {f"{name}_positions.csv": tables.csv(by_position.drop(columns=["source", "benchmark", "split"]))}
    else:
        figure = plate(
            name,
            "Speed-up, accepted streak and cost of a cycle",
            f"Left and middle, measured with {interval} intervals over prompts; dotted, the cost model's speed-up; "
            "right, where the time of a cycle goes: it pays while the speed-up grows faster than its cost.",
            f"Speed-up, accepted streak and cost of a cycle by {sweep.label}. {values(table, 'speedup', 'speed-up')}",
            lambda: sweep_figures.lines(table, colours, label=sweep.label),
            published=sweep.beside,
        )
        files = {}
    sheet = Sheet(
        name=name,
        title="",
        note=f"{note} Speed-up and accepted streak with them. t_verify/t_1, c and o: verifying, drafting and the rest "
        f"of a cycle, in vanilla steps. predicted: {smoothing(table)}. nodes: of the largest tree. differ: texts not "
        "vanilla's, excused by rounding.",
        rows=short(sweep, table),
        data=table,
    )
    return Study(
        name=name, title=sweep.title, lead=lead(sweep, table, params), plates=[figure], sheets=[sheet], files=files
    )


def rows(sweep: Measured, params: ReportParams, *, seed: int) -> Frame:
    """A row for each point, in the sweep's order."""
    found = []
    for point in sweep.points:
        settings = {"resamples": params.resamples, "confidence": params.confidence, "seed": seed}
        speed, streak = measures.speedup(point.rows, **settings), measures.streak(point.rows, **settings)
        costs = cost.fit(point.rows) or cost.Cost(*[float("nan")] * 3)
        found.append(
            {
                "x": point.provenance["sweep"]["x"],
                "series": point.provenance["sweep"]["series"],
                "method": point.method,
                "prompts": point.rows["prompt_id"].nunique(),
                "speedup": speed.value,
                "speedup_low": speed.low,
                "speedup_high": speed.high,
                "predicted": float("nan"),
                "acceptance_length": measures.acceptance_length(point.rows),
                "accepted_streak": streak.value,
                "streak_low": streak.low,
                "streak_high": streak.high,
                "t_verify/t_1": costs.verify,
                "c": costs.draft,
                "o": costs.other,
                "nodes": int(point.rows["nodes"].max()),
                "differ": measures.differences(point.rows)[0],
            }
        )
    table = pd.DataFrame(found)
    for _, line in table.groupby("series", sort=False):
        table.loc[line.index, "predicted"] = predicted(line)
    return table


def short(sweep: Measured, table: Frame) -> Frame:
    """The table as it is read; the file has every number apart."""
    found = pd.DataFrame(
        {
            sweep.label: table["x"],
            "series": table["series"],
            "speed-up": [_span(row) for row in table.to_dict("records")],
            "predicted": table["predicted"],
            "accepted streak": [_span(row, "accepted_streak", "streak") for row in table.to_dict("records")],
            "t_verify/t_1": table["t_verify/t_1"],
            "c": table["c"],
            "o": table["o"],
            "nodes": table["nodes"],
            "differ": table["differ"],
        }
    )
    return found.drop(columns=sweep.label) if sweep.x_name == POSITION else found


def predicted(line: Frame) -> np.ndarray:
    """The cost model's speed-up for each point of a line."""
    cost_S = (line["t_verify/t_1"] + line["c"] + line["o"]).to_numpy(dtype=float)
    if smooth(line) and np.isfinite(cost_S).all():
        x_S = line["x"].to_numpy(dtype=float)
        slope, start = np.polyfit(x_S, cost_S, 1)
        cost_S = start + slope * x_S
    return line["acceptance_length"].to_numpy(dtype=float) / cost_S


def smooth(line: Frame) -> bool:
    """Whether a line has enough numbers on the axis for a straight line to say something."""
    return pd.api.types.is_numeric_dtype(pd.Series(list(line["x"]))) and line["x"].nunique() >= 3


def smoothing(table: Frame) -> str:
    """How the table's predictions came about, in words."""
    smoothed = {smooth(line) for _, line in table.groupby("series")}
    over = {
        frozenset({True}): "that sum, smoothed to a straight line over the axis",
        frozenset({False}): "that sum, as measured",
    }.get(frozenset(smoothed), "that sum, smoothed to a straight line over the axis where a line has three points")
    return f"acceptance length over {over}"


def positions(sweep: Measured) -> Frame:
    """Acceptance by position of every point, its series in the place of the method."""
    groups = []
    for point in sweep.points:
        where = point.rows.iloc[0]
        series = point.provenance["sweep"]["series"]
        groups.append(Group(benchmark=where["benchmark"], split=where["split"], method=series, rows=point.rows))
    return curves.acceptance(groups, {})


def series_colours(series: list[str], params: ReportParams) -> dict[str, str]:
    """A training or method keeps its colour; others take those that are left, in order."""
    known = params.colours.trainings | params.colours.methods
    found = {name: known[name] for name in series if name in known}
    if len(set(found.values())) < len(found):
        found = {}
    rest = [c for m, c in params.colours.methods.items() if m != VANILLA and c not in found.values()]
    others = [name for name in series if name not in found]
    return found | {name: rest[k % len(rest)] for k, name in enumerate(others)}


def values(table: Frame, column: str, word: str) -> str:
    """A column in words, for whoever cannot see the figure."""
    parts = [f"{_where(row)}: {word} {tables.shown(column, row[column])}" for row in table.to_dict("records")]
    return "; ".join(parts)


def lead(sweep: Measured, table: Frame, params: ReportParams) -> str:
    """The fastest and the slowest point, the longest streak, and whether the order is decided."""
    timed = table.dropna(subset=["speedup"])
    if timed.empty:
        return "No point of this sweep was timed."
    best, worst = (timed.loc[pick].to_dict() for pick in (timed["speedup"].idxmax(), timed["speedup"].idxmin()))
    longest = table.loc[table["accepted_streak"].idxmax()].to_dict()
    decided = "apart" if best["speedup_low"] > worst["speedup_high"] else "overlapping"
    if table["prompts"].max() == 1:
        decided = "of one prompt, so they say nothing"
    slowest = f", the slowest {_where(worst)} at {_span(worst)} ({params.confidence:.0%} intervals, {decided})"
    opening = "The" if sweep.x_name == POSITION else f"Over {sweep.label}, the"
    text = (
        f"{opening} fastest point is {_where(best)} at {_span(best)} times vanilla"
        + (slowest if len(timed) > 1 else "")
        + f"; the longest accepted streak is {longest['accepted_streak']:.2f}, at {_where(longest)}."
    )
    far = int(((timed["speedup"] / timed["predicted"] - 1).abs() > params.cost_tolerance).sum())
    limit = f"more than {params.cost_tolerance:.0%} off"
    return f"{text} The cost model is {limit} at {far} of {len(timed)} points." if far else text


def _where(row: dict[Any, Any]) -> str:
    x = row["x"] if isinstance(row["x"], str) else f"{row['x']:g}"
    return x if row["series"] == x else f"{x} ({row['series']})"


def _span(row: dict[Any, Any], name: str = "speedup", stem: str = "speedup") -> str:
    low, high = (tables.shown(name, row[f"{stem}_{end}"]) for end in ("low", "high"))
    return f"{tables.shown(name, row[name])} [{low}, {high}]"
