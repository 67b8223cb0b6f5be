"""Vanilla's texts at a point's own sampling settings: the profile's vanilla cell, or decoded within the sweep.

Decoded ones are measured as any cell, once for each setting, and kept in scratch beside the finished points.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.common import store, studies
from stages.common.sweeps import SHARED
from stages.evaluate.harness import Reference, Shared
from stages.evaluate.methods import vanilla
from stages.evaluate.parts import VANILLA
from stages.sweep.bench import Bench, Point


def kept(state: Path, shared: Shared) -> Path:
    """Where vanilla's texts at these settings lie, named after what they hang on."""
    name = "_".join(f"{name}-{getattr(shared, name)}" for name in SHARED)
    return state / f"{VANILLA}_{name}.parquet"


def decoded_here(points: Sequence[Point], state: Path) -> list[Shared]:
    """The settings that have no vanilla cell and are not decoded yet, each once."""
    wanted = {kept(state, point.shared): point.shared for point in points if point.reference is None}
    return [shared for path, shared in wanted.items() if not path.exists()]


def reference(bench: Bench, point: Point, state: Path, progress: Any) -> Reference:
    """Vanilla's texts for a point. ValueError if its vanilla cell is not the one that the grid pins."""
    if point.reference is not None:
        path = Path(point.reference["file"])
        texts = _texts(path)
        wanted = [(prompt.id, repeat) for prompt in bench.prompts for repeat in range(point.shared.repeats)]
        have = [texts[place] for place in wanted if place in texts]
        if studies.texts_sha256(have) != point.reference["sha256"]:
            raise ValueError(f"{path}: not the texts that the grid pins; run dvc repro grid")
        return Reference(texts=texts)
    path = kept(state, point.shared)
    if not path.exists():
        progress.set_postfix_str(path.stem)
        rows, facts = bench.measure(VANILLA, vanilla.Params(drafter=None), point.shared, None, None, progress)
        store.write_parquet(path, rows, store.CELLS, facts)
    return Reference(texts=_texts(path))


def _texts(path: Path) -> dict[tuple[str, int], list[int]]:
    return {(row["prompt_id"], row["repeat"]): row["output_ids"] for row in store.read_parquet(path, store.CELLS)}
