"""Sweep: decode a few prompts at every point of a sweep, by the evaluate stage's engine and harness.

    python -m stages.sweep <profile> <sweep>

Reads   the verifier, data/<profile>/grids/<sweep>.json, and the prompts, drafters and vanilla cells that it pins
Writes  data/<profile>/sweeps/<sweep>/<point>.parquet
Params  seed, <profile>.device

Finished points are kept in data/scratch/, so a killed sweep goes on with the next one. Every point is compared with
vanilla's texts at its own sampling settings, and the stage fails if one differs where rounding does not explain it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

import kernels
from stages.common import entry, provenance, scratch, spread, store, studies, sweeps
from stages.common.params import load
from stages.evaluate.__main__ import refuse_differences
from stages.sweep.bench import Bench, Grid, Point, read_grid
from stages.sweep.references import decoded_here, reference

ROOT = Path(kernels.__file__).parents[1]
CODE = [
    file
    for folder in ("kernels", "stages/common", "stages/evaluate", "stages/sweep")
    for file in sorted((ROOT / folder).rglob("*.py"))
]  # what a resumed run must find unchanged


def main(run: entry.Run) -> None:
    device = run.device()
    spread.refuse_ranks(device.placement, "sweeps")  # ranks would not agree on what a killed one has finished
    sweep(run.profile, run.sweep, device, seed=load(int, "seed"))


def sweep(profile: str, name: str, device: entry.Device, *, seed: int) -> None:
    grid = read_grid(profile, name)
    bench = Bench(profile, grid, device, seed=seed)
    digests = {"verifier": store.sha256_folder(store.verifier_folder(profile)), "stage": f"sweep {profile} {name}"}
    mark = scratch.fingerprint([store.read_json(studies.grid_file(profile, name)), seed, bench.stamp], digests, CODE)
    state, folder = scratch.scratch_folder(mark), studies.sweep_folder(profile, name)
    missing = [point for point in grid.points if not (state / f"{point.name}.parquet").exists()]
    total = bench.texts(*(point.shared for point in missing), *decoded_here(missing, state))
    with tqdm(total=total, desc=f"sweep {name}", unit="text", mininterval=5) as bar:
        for point in missing:
            texts = reference(bench, point, state, bar)
            bar.set_postfix_str(point.name)
            rows, facts = bench.measure(point.method, point.params, point.shared, point.drafter, texts, bar)
            refuse_differences(rows, facts["rounding"], folder / f"{point.name}.parquet")
            found = described(profile, name, grid, point, facts)
            store.write_parquet(state / f"{point.name}.parquet", rows, store.CELLS, found)
    with store.replace_folder(folder) as out:
        for point in grid.points:
            shutil.copy2(state / f"{point.name}.parquet", out)
    scratch.discard(mark)


def described(profile: str, name: str, grid: Grid, point: Point, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance of a point: a cell's, and the point's place in the sweep."""
    place = {
        "name": name,
        "point": point.name,
        "index": point.index,
        "x": point.x,
        "x_name": grid.x_name,
        "series": point.series,
        "settings": point.settings,
    }
    return {
        "profile": profile,
        "benchmark": grid.benchmark,
        "method": point.method,
        "command": provenance.command(),
        **facts,
        "sweep": place,
    }


if __name__ == "__main__":
    entry.run(main, sweep=lambda profile: sweeps.names())
