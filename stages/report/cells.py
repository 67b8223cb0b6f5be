"""Read the cells of a profile and group them by benchmark, split and method.

All cells of a report must come from one machine and one set of versions: DVC's run-cache restores a timing
wherever it was taken, and a speed-up whose halves ran on two machines says nothing. A mixture is refused, by
name and with remedy.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stages.common import store, studies
from stages.report import measures
from stages.report.frames import Frame

VANILLA = "vanilla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A benchmark decoded with a method; `rows` adds `accepted_tokens` and `cycles` to the stored columns."""

    benchmark: str
    method: str
    rows: Frame
    provenance: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of one table line."""

    benchmark: str
    split: str
    method: str
    rows: Frame


def read(profile: str, *, benchmarks: list[str], methods: list[str]) -> list[Cell]:
    """Every cell of a profile. ValueError if one is missing, damaged, empty, or from another machine."""
    cells = []
    for benchmark in benchmarks:
        for method in methods:
            path = store.cell_file(profile, benchmark, method)
            records = store.read_parquet(path, store.CELLS)
            if not records:
                raise ValueError(f"{path}: no rows; run dvc repro -f of its evaluate stage")
            cells.append(make(benchmark, method, records, store.read_provenance(path)))
    same_stamp(cells, profile=profile)
    return cells


def make(benchmark: str, method: str, records: list[dict[str, Any]], provenance: dict[str, Any]) -> Cell:
    """A cell from rows as stored, its counters checked."""
    kept = [
        measures.cut_to_emitted(
            np.asarray(record["accepted"], dtype=np.int64),
            new_tokens=record["new_tokens"],
            where=f"{benchmark}/{method}, prompt {record['prompt_id']}",
        )
        for record in records
    ]
    rows = pd.DataFrame([{k: v for k, v in r.items() if k not in ("accepted", "output_ids")} for r in records])
    rows["accepted"] = pd.Series(kept, dtype=object)
    rows["accepted_tokens"] = [int(k.sum()) for k in kept]
    rows["cycles"] = [k.size for k in kept]
    return Cell(benchmark=benchmark, method=method, rows=rows, provenance=provenance)


def read_points(profile: str, sweep: str, names: Sequence[str]) -> list[Cell]:
    """Points of a sweep, in this order. ValueError if one is missing, empty, or was timed on another machine."""
    folder, found = studies.sweep_folder(profile, sweep), []
    for name in names:
        path = folder / f"{name}.parquet"
        if not path.exists():
            raise ValueError(f"{path}: not found; run dvc repro sweep@{profile}-{sweep}")
        records, provenance = store.read_parquet(path, store.CELLS), store.read_provenance(path)
        if not records:
            raise ValueError(f"{path}: no rows; run dvc repro -f -s sweep@{profile}-{sweep}")
        found.append(make(provenance["benchmark"], provenance["method"], records, provenance))
    if len({tuple(sorted(cell.provenance["stamp"].items())) for cell in found}) > 1:
        raise ValueError(
            f"{folder}: points were timed on different machines or versions, and a ratio of them means nothing; "
            f"time them again on one machine: dvc repro -f -s sweep@{profile}-{sweep}"
        )
    return found


def same_stamp(cells: list[Cell], *, profile: str) -> dict[str, Any]:
    """The stamp all cells share; ValueError naming the odd ones out if they do not."""
    by_stamp: dict[tuple[tuple[str, Any], ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        by_stamp[tuple(sorted(cell.provenance["stamp"].items()))].append(cell)
    if len(by_stamp) > 1:
        common = max(by_stamp, key=lambda stamp: len(by_stamp[stamp]))
        lines, stages = [], []
        for stamp, group in by_stamp.items():
            names = ", ".join(f"{cell.benchmark}/{cell.method}" for cell in group)
            unlike = ", ".join(f"{key} {value}" for key, value in stamp if (key, value) not in common)
            lines.append(f"{names}: {unlike or ', '.join(f'{k} {v}' for k, v in common)}")
            if stamp != common:
                stages += [f"evaluate@{profile}-{cell.benchmark}-{cell.method}" for cell in group]
        listing = "\n  ".join(lines)
        raise ValueError(
            "cells were timed on different machines or versions, and a ratio across them means nothing:\n"
            f"  {listing}\nTime them again on one machine: dvc repro -f -s {' '.join(stages)}"
        )
    return dict(next(iter(by_stamp)))


def groups(cells: list[Cell]) -> Iterator[Group]:
    """One group for each benchmark, split and method; splits by name, the rest in params order."""
    for benchmark in dict.fromkeys(cell.benchmark for cell in cells):
        mine = [cell for cell in cells if cell.benchmark == benchmark]
        for split in sorted({split for cell in mine for split in cell.rows["split"]}):
            for cell in mine:
                rows = cell.rows[cell.rows["split"] == split]
                if len(rows):
                    yield Group(benchmark=benchmark, split=split, method=cell.method, rows=rows)
