"""Accuracy against a budget of seconds, from graded sweeps over methods: the paper's Figure 6.

Reads  data/<p>/graded/check.json, which names the graded sweeps, and <sweep>/<point>.parquet beside it;
       data/<p>/sweeps/points.json for their titles
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from stages.common import store
from stages.common import studies as files
from stages.report import budgets, style, tables
from stages.report.budgets import Chains, Curve, Row
from stages.report.cells import VANILLA
from stages.report.figures import Absent
from stages.report.frames import Frame
from stages.report.params import ReportParams
from stages.report.study import Plate, Sheet, Study, plate

POINTS = 60  # of a drawn curve
MULTIPLES = (0.5, 1.0, 2.0, np.inf)  # of the budget, in the table
RULES = {"one": budgets.one_chain, "vote": budgets.vote}
PACE = (
    "The methods ran one after the other, so each answer's seconds (prefill and decoding) are divided by the vanilla "
    "steps timed within it and multiplied by vanilla's step on the same prompt."
)


class Graded(NamedTuple):
    """A sweep over methods: each one's rows and chains, and the budget all are compared at."""

    name: str
    title: str
    place: str
    temperature: float
    beside: tuple[str, ...]
    rows: dict[str, list[Row]]
    chains: dict[str, Chains]
    budget: float

    @property
    def repeats(self) -> int:
        return max(len(mine) for mine in self.chains[VANILLA].values())


def studies(profile: str, params: ReportParams, *, seed: int) -> list[Study]:
    """A study for each graded sweep. ValueError: points are missing, or the sweep varies more than the method."""
    path = files.check_file(profile)
    names = store.read_json(path)["sweeps"] if path.exists() else []
    return [study(read(profile, name), params, seed=seed) for name in names]


def read(profile: str, name: str) -> Graded:
    """A graded sweep, checked."""
    folder = files.graded_folder(profile, name)
    where = f"params.yaml: {profile}.sweeps.{name}"
    points = [(store.read_provenance(path), store.read_parquet(path, store.CELLS)) for path in folder.glob("*.parquet")]
    if not points:
        raise ValueError(f"{folder}: no graded points; run dvc repro score@{profile}-{name}")
    points.sort(key=lambda point: point[0]["sweep"]["index"])
    rows = {facts["method"]: records for facts, records in points}
    if len(rows) < len(points) or VANILLA not in rows:
        raise ValueError(f"{where}.vary: of a graded sweep write {{method: [vanilla, ..]}} alone: one point each")
    _one_machine([facts for facts, _ in points], f"{profile}-{name}")
    found = {}
    for method, mine in rows.items():
        try:
            found[method] = budgets.chains(mine, rows[VANILLA])
        except ValueError as error:
            raise ValueError(f"{folder}: {method}: {error}") from None
    about = store.read_json(files.points_file(profile)).get(name, {})
    first = rows[VANILLA][0]
    return Graded(
        name=name,
        title=about.get("title") or name,
        place=f"{first['benchmark']} ({first['split']})",
        temperature=float(first["temperature"]),
        beside=tuple(about.get("beside", ())),
        rows=rows,
        chains=found,
        budget=budgets.median_answer_s(found[VANILLA]),
    )


def _one_machine(points: list[dict[str, Any]], sweep: str) -> None:
    stamps = {tuple(sorted(facts["stamp"].items())) for facts in points}
    if len(stamps) > 1:
        raise ValueError(f"the points of the sweep were timed on several machines; run dvc repro -f -s sweep@{sweep}")


def study(graded: Graded, params: ReportParams, *, seed: int) -> Study:
    """Table, figure and every plotted number of one sweep."""
    params.colours.require("methods", list(graded.rows))
    curves = table(graded, [graded.budget * multiple for multiple in MULTIPLES], params, seed=seed)
    drawn = table(graded, grid(graded), params, seed=seed)
    sheet = Sheet(
        name=f"{graded.name}_budgets",
        title=f"{graded.title}: right answers within a budget",
        note=f"Share of right answers within half, once and twice the budget of {graded.budget:.3g} s (what vanilla "
        f"needs for its median answer), with {params.confidence:.0%} bootstrap intervals over prompts, and without "
        f"limit. chains: one, or a vote over those that fit one after the other. {PACE}",
        rows=wide(curves, graded),
    )
    return Study(
        name=graded.name,
        title=graded.title,
        lead=lead(graded, curves, params, seed=seed),
        plates=[picture(graded, drawn, params)],
        sheets=[sheet],
        files={f"{graded.name}_curves.csv": tables.csv(drawn)},
    )


def rules(graded: Graded) -> list[str]:
    """A vote needs more than one chain."""
    return list(RULES) if graded.repeats > 1 else ["one"]


def grid(graded: Graded) -> list[float]:
    """Budgets to draw, evenly on a logarithmic axis, from before the first answer to after the last vote."""
    every = [mine for chains in graded.chains.values() for mine in chains.values()]
    low = min(chain.seconds for mine in every for chain in mine)
    high = max(sum(chain.seconds for chain in mine) for mine in every)
    return np.geomspace(0.9 * low, 1.05 * high, POINTS).tolist()


def table(graded: Graded, seconds: list[float], params: ReportParams, *, seed: int) -> Frame:
    """Accuracy of every method by either rule at every budget, with its interval: a row each."""
    rows = []
    for method, chains in graded.chains.items():
        for rule in rules(graded):
            found = _curve(chains, seconds, rule, params, seed)
            for budget, mean, low, high in zip(seconds, *found, strict=True):
                times = budget / graded.budget
                rows.append((method, rule, budget, times, float(mean), float(low), float(high)))
    return pd.DataFrame(rows, columns=["method", "chains", "seconds", "budget", "accuracy", "low", "high"])


def _curve(chains: Chains, seconds: list[float], rule: str, params: ReportParams, seed: int) -> Curve:
    values_PB = budgets.accuracy_PB(chains, seconds, RULES[rule])
    return budgets.curve(values_PB, resamples=params.resamples, confidence=params.confidence, seed=seed)


def wide(curves: Frame, graded: Graded) -> Frame:
    """A row for each method and rule, the budgets beside one another."""
    rows = []
    for (method, rule), mine in curves.groupby(["method", "chains"], sort=False):
        at = {row["budget"]: row for row in mine.to_dict("records")}
        cells = {
            f"at {name}": f"{at[times]['accuracy']:.2f} [{at[times]['low']:.2f}, {at[times]['high']:.2f}]"
            for name, times in (("half", 0.5), ("once", 1.0), ("twice", 2.0))
        }
        rows.append(
            {
                "method": method,
                "chains": "one" if rule == "one" else f"vote, up to {graded.repeats}",
                **cells,
                "without limit": at[np.inf]["accuracy"],
                "median seconds": budgets.median_answer_s(graded.chains[str(method)]),
            }
        )
    return pd.DataFrame(rows)


def gain(graded: Graded, method: str, params: ReportParams, *, seed: int) -> tuple[float, float, float]:
    """Points of accuracy that a method has over vanilla with one chain within the budget: mean and interval."""
    mine, base = (
        budgets.accuracy_PB(graded.chains[name], [graded.budget], budgets.one_chain) for name in (method, VANILLA)
    )
    found = budgets.curve(mine - base, resamples=params.resamples, confidence=params.confidence, seed=seed)
    mean, low, high = (float(100 * values[0]) for values in found)
    return mean, low, high


def lead(graded: Graded, curves: Frame, params: ReportParams, *, seed: int) -> str:
    """What the budget buys, whichever way it fell."""
    at = {(row["method"], row["chains"], row["budget"]): row for row in curves.to_dict("records")}
    chains = f"{graded.repeats} chains each at T_v = {graded.temperature:g}" if graded.repeats > 1 else "one chain each"
    text = (
        f"On {graded.place}, {len(graded.chains[VANILLA])} prompts with {chains}, vanilla needs {graded.budget:.3g} s "
        f"for its median answer. Within that budget one chain of vanilla is right in {_share(at[VANILLA, 'one', 1.0])}"
    )
    others = [method for method in graded.chains if method != VANILLA]
    if others:
        best = max(others, key=lambda method: at[method, "one", 1.0]["accuracy"])
        mean, low, high = gain(graded, best, params, seed=seed)
        sure = "above zero" if low > 0 else "below zero" if high < 0 else "with zero in it"
        text += (
            f" and one of {best}, the best of the others and picked afterwards, in {_share(at[best, 'one', 1.0])}: "
            f"prompt by prompt {mean:+.0f} points, "
            f"the interval [{low:+.0f}, {high:+.0f}] {sure}"
        )
    text += "."
    if graded.repeats > 1:
        best = max(graded.chains, key=lambda method: at[method, "vote", 2.0]["accuracy"])
        text += (
            f" A vote over the chains that twice the budget buys is right in {_share(at[VANILLA, 'vote', 2.0])} with "
            f"vanilla" + (f" and in {_share(at[best, 'vote', 2.0])} with {best}." if best != VANILLA else ", the best.")
        )
    return text


def _share(row: dict[Any, Any]) -> str:
    return f"{row['accuracy']:.0%} [{row['low']:.0%} to {row['high']:.0%}]"


def picture(graded: Graded, drawn: Frame, params: ReportParams) -> Plate:
    """The curves of all methods, one chain and vote side by side."""
    last = drawn.groupby(["method", "chains"], sort=False).tail(1).to_dict("records")
    ends = "; ".join(f"{row['method']} ({row['chains']}) {row['accuracy']:.0%}" for row in last)
    return plate(
        f"{graded.name}_budget",
        f"{graded.title}: accuracy against a budget of seconds",
        "A curve further left gets the same answers sooner; at the dashed budget, vanilla's median answer, the height "
        f"says what the speed is worth, and with no limit all methods that accept by Match end alike. {PACE}",
        f"Share of right answers on {graded.place} by budget of seconds. At the right end: {ends}",
        lambda: draw(graded, drawn, params.colours.methods),
        published=graded.beside,
    )


def draw(graded: Graded, drawn: Frame, colours: dict[str, str]) -> Figure:
    """A panel for each rule, a stepped line for each method."""
    if not drawn["accuracy"].max() > 0:
        raise Absent("no answer is right")
    names = rules(graded)
    figure, [panels] = style.sheet(1, len(names), width=8.4 if len(names) > 1 else 5.6, height=3.6, sharey=True)
    for axes, rule in zip(panels, names, strict=True):
        for number, method in enumerate(graded.chains):
            mine = drawn[(drawn["method"] == method) & (drawn["chains"] == rule)]
            look = style.line(number)
            axes.plot(
                mine["seconds"], mine["accuracy"], color=colours[method], label=method,
                drawstyle="steps-post", markevery=(number % 5 + 2, 8), **look,
            )  # fmt: skip
        axes.axvline(graded.budget, color=style.INK, linewidth=1, linestyle=(0, (4, 2)))
        note = {"textcoords": "offset points", "xycoords": ("data", "axes fraction"), "size": 7.5, "rotation": 90}
        axes.annotate("vanilla's median answer", (graded.budget, 0.98), (-9, 0), va="top", **note)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title("one chain" if rule == "one" else f"majority of up to {graded.repeats} chains")
        axes.set_xlabel("budget (s)")
        axes.set_ylim(0, min(1.02, 1.15 * drawn["accuracy"].max()))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(axis="y")
    panels[0].set_ylabel("right answers")
    style.legend(figure, panels[0], columns=min(len(graded.chains), 5))
    return figure
