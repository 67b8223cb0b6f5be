"""Everything a report says, computed once: the page, the Markdown and the metrics only set it in type."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from stages.report import cells as cell_files
from stages.report import contrast, curves, fairness, lossless, measures, published, tables
from stages.report.cells import Cell, Group
from stages.report.frames import Frame
from stages.report.params import ReportParams
from stages.report.study import Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`table` has a row for each group; `costs` one for each timed group that drafts."""

    profile: str
    params: ReportParams
    seed: int  # of every bootstrap
    stamp: dict[str, Any]
    groups: list[Group]
    table: Frame
    costs: Frame
    curves: dict[str, Frame]
    missing_curves: list[str]
    acceptance: Frame
    contrasts: Frame  # the overall fastest method against every other
    gains: Frame  # what each part of a method gains
    lossless: Frame
    published: Frame
    accuracy: Frame
    methods: Frame
    objectives: list[str]  # trainings that go on from adapt
    fairness: Frame
    temperatures: list[float]
    peak_mb: int  # largest resident memory of a cell's process; 0 where none was noted
    studies: list[Study]

    @property
    def smoke(self) -> bool:
        return self.profile == "smoke"

    @property
    def unexcused(self) -> int:
        return int(self.table["unexcused_differences"].sum())

    @property
    def excused(self) -> int:
        return int(self.table["excused_differences"].sum())


def build(
    profile: str,
    cells: list[Cell],
    training: dict[str, Frame],
    *,
    trainings: list[str],
    objectives: list[str],
    params: ReportParams,
    seed: int,
    studies: Sequence[Study] = (),
) -> Report:
    """Compute one profile's report. trainings: all whose curves are wanted; objectives: those that go on from adapt.

    ValueError: cells of several machines, or a colour is missing."""
    stamp = cell_files.same_stamp(cells, profile=profile)
    groups = list(cell_files.groups(cells))
    params.colours.require("methods", list(dict.fromkeys(cell.method for cell in cells)))
    params.colours.require("trainings", list(training))
    params.colours.require("phases", ["draft", "verify", "other"])
    table = tables.speedups(groups, params, seed=seed)
    used = methods(cells)
    return Report(
        profile=profile,
        params=params,
        seed=seed,
        stamp=stamp,
        groups=groups,
        table=table,
        costs=tables.costs(groups, table, tolerance=params.cost_tolerance),
        curves=training,
        missing_curves=[name for name in trainings if name not in training],
        acceptance=curves.acceptance(groups, training),
        contrasts=contrast.against_all(groups, table, params, seed=seed),
        gains=contrast.gains(groups, params, seed=seed),
        lossless=lossless.table(groups),
        published=published.beside(table),
        accuracy=accuracy(groups),
        methods=used,
        objectives=objectives,
        fairness=fairness.trainings(used, training, objectives),
        temperatures=sorted({float(t) for cell in cells for t in cell.rows["temperature"]}),
        peak_mb=max((int(cell.provenance.get("peak_rss_mb", 0)) for cell in cells), default=0),
        studies=list(studies),
    )


def accuracy(groups: list[Group]) -> Frame:
    """Share of right answers where a benchmark grades them; ungraded benchmarks are left out."""
    rows = [
        {
            "benchmark": group.benchmark,
            "split": group.split,
            "method": group.method,
            "graded": int(group.rows["correct"].notna().sum()),
            "accuracy": share,
        }
        for group in groups
        if (share := measures.accuracy(group.rows)) is not None
    ]
    return pd.DataFrame(rows, columns=["benchmark", "split", "method", "graded", "accuracy"])


def methods(cells: list[Cell]) -> Frame:
    """What each method drafts with: objective, training, parameters, settings, deepest draft, most nodes."""
    rows = {}
    for cell in cells:
        drafter = cell.provenance.get("drafter") or {}
        row = rows.setdefault(
            cell.method,
            {
                "method": cell.method,
                "drafter": drafter.get("objective"),
                "training": cell.provenance.get("params", {}).get(cell.method, {}).get("drafter"),
                "parameters": drafter.get("parameters"),
                "settings": settings(cell),
                "window": 0,
                "nodes": 0,
            },
        )
        row["window"] = max(row["window"], int(cell.rows["window"].max()))
        row["nodes"] = max(row["nodes"], int(cell.rows["nodes"].max()))
    return pd.DataFrame(list(rows.values()))


def settings(cell: Cell) -> str:
    """The method's section of params.yaml, without the name of its drafter."""
    section = cell.provenance.get("params", {}).get(cell.method, {})
    values = {name: value for name, value in section.items() if name != "drafter"}
    return ", ".join(f"{name} {v:g}" if isinstance(v, int | float) else f"{name} {v}" for name, v in values.items())


def metrics(report: Report) -> dict[str, Any]:
    """Benchmark, split, method, number, nested for `dvc metrics diff`; only what was measured."""
    nested: dict[str, Any] = {
        "lossless": {"excused_differences": report.excused, "unexcused_differences": report.unexcused}
    }
    for record in report.table.to_dict("records"):
        numbers = {str(k): v for k, v in record.items() if k not in ("benchmark", "split", "method")}
        _put(nested, record, {k: v for k, v in numbers.items() if not math.isnan(v)})
    for record in report.accuracy.to_dict("records"):
        _put(nested, record, {"accuracy": record["accuracy"]})
    for record in report.costs.to_dict("records"):
        if not math.isnan(record["predicted"]):
            _put(nested, record, {"speedup_predicted": record["predicted"]})
    for name, curve in report.curves.items():
        values = {q: curves.last(curve, q) for q in ("loss", "streak", "sampled_streak", "trie16", "tree")}
        nested.setdefault("training", {})[name] = {q: _round(v) for q, v in values.items() if v is not None}
    return nested


def _put(nested: dict[str, Any], record: dict[Any, Any], numbers: dict[str, Any]) -> None:
    place = nested.setdefault(record["benchmark"], {}).setdefault(record["split"], {})
    place.setdefault(record["method"], {}).update({k: _round(v) for k, v in numbers.items()})


def _round(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else int(value)
