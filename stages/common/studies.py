"""Paths of the studies: sweeps over settings, their graded answers, drafters of other sizes.

A point of a sweep is a cell (store.CELLS), so that what reads cells reads points. Its provenance is a cell's, with
`sweep`: the point's place in it (stages/sweep).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from stages.common import store


def sweep_folder(profile: str, sweep: str) -> Path:
    """One Parquet file for each point, named after it."""
    return store.DATA / profile / "sweeps" / sweep


def graded_folder(profile: str, sweep: str) -> Path:
    """The same files with `answer` and `correct` filled in (stages/score)."""
    return store.DATA / profile / "graded" / sweep


def check_file(profile: str) -> Path:
    """Which sweeps are graded, and that their benchmarks can be (stages/score)."""
    return store.DATA / profile / "graded" / "check.json"


def points_file(profile: str) -> Path:
    """The checked form of every sweep that is measured: titles and the names of its points (stages/points)."""
    return store.DATA / profile / "sweeps" / "points.json"


def grid_file(profile: str, sweep: str) -> Path:
    """A sweep's points with all their settings, and the drafters, prompts and texts they stand on (stages/grid)."""
    return store.DATA / profile / "grids" / f"{sweep}.json"


def size_folder(profile: str, size: str) -> Path:
    """The drafter of another size than `adapt`'s (stages/sizes)."""
    return store.DATA / profile / "drafters_of_size" / size


def texts_sha256(texts: Iterable[Sequence[int]]) -> str:
    """Digest of texts as ids, in this order."""
    return hashlib.sha256(json.dumps([list(ids) for ids in texts]).encode()).hexdigest()
