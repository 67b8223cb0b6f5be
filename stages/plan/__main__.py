"""Plan: the points of a sweep with all their settings, and what they stand on, pinned by hash.

    python -m stages.plan <profile> <sweep>

Reads   the prompts and vanilla cells; data/<profile>/{drafters,checkpoints,drafters_of_size}/
Writes  data/<profile>/plans/<sweep>.json
Params  <profile>.evaluate, <profile>.sweeps.<sweep>; baselines, objectives, soft_objectives, sizes

A sweep depends on its plan alone, so a retrained drafter or another value of a method measures the sweeps again that
use it, and no others.
"""

from dataclasses import asdict
from typing import Any

from stages.common import entry, store, studies, sweeps
from stages.common.params import ParamError, keys_at, load
from stages.common.sweeps import Spelled, Sweep
from stages.evaluate.harness import Shared
from stages.evaluate.parts import VANILLA
from stages.plan import drafters
from stages.plan.settings import method_params, shared_params


def main(run: entry.Run) -> None:
    store.write_json(studies.plan_file(run.profile, run.sweep), plan(run.profile, run.sweep))


def plan(profile: str, name: str) -> dict[str, Any]:
    """What data/<profile>/plans/<name>.json holds. ParamError names what does not fit."""
    sweep, shared = sweeps.read(profile, name), load(Shared, profile, "evaluate", "shared")
    key = f"{profile}.sweeps.{name}"
    prompts, listed = chosen_prompts(profile, sweep, key), drafters.listed()
    return {
        "benchmark": sweep.benchmark,
        "split": sweep.split,
        "x_name": sweep.x,
        "prompts": prompts,
        "points": [planned(profile, sweep, point, shared, prompts, listed, key) for point in sweeps.points(sweep)],
    }


def planned(
    profile: str,
    sweep: Sweep,
    point: Spelled,
    shared: Shared,
    prompts: list[dict[str, str]],
    listed: list[str],
    key: str,
) -> dict[str, Any]:
    """A point with all its settings. reference: the vanilla cell it is compared with; None where there is none."""
    params = method_params(profile, sweep, point, key)
    changed = shared_params(shared, sweep, point, key)
    pin = None
    if params.drafter is not None:
        line = sweep.where("drafter", point.method)
        blame = f"{key}.{line}" if line else f"{profile}.evaluate.{point.method}.drafter"
        pin = drafters.pin(profile, params.drafter, point.method, blame, listed)
    x = point.x if point.x is not None else drafters.number(sweep.x, pin, f"{key}.x")
    same = all(getattr(changed, setting) == getattr(shared, setting) for setting in sweeps.SHARED)
    return {
        "name": point.name,
        "index": point.index,
        "method": point.method,
        "x": x,
        "series": point.series,
        "settings": point.settings,
        "params": asdict(params),
        "shared": asdict(changed),
        "drafter": pin,
        "reference": reference(profile, sweep.benchmark, prompts, changed.repeats) if same else None,
    }


def chosen_prompts(profile: str, sweep: Sweep, key: str) -> list[dict[str, str]]:
    """The split's first prompts, later turns of a chat left out: id and hash of their ids."""
    known = keys_at(profile, "download", "benchmarks")
    if sweep.benchmark not in known:
        there = ", ".join(known)
        raise ParamError(f"params.yaml: {key}.benchmark: no benchmark {sweep.benchmark!r}; there are {there}")
    rows = store.read_parquet(store.prompts_file(profile, sweep.benchmark), store.PROMPTS)
    mine = [row for row in rows if row["split"] == sweep.split and len(row["turns"]) == 1]
    if not mine:
        splits = sorted({row["split"] for row in rows})
        raise ParamError(f"params.yaml: {key}.split: no split {sweep.split!r}; there are {', '.join(splits)}")
    if sweep.prompts > len(mine):
        limit = f"{profile}.download.benchmarks.{sweep.benchmark}.splits.{sweep.split}.limit"
        raise ParamError(
            f"params.yaml: {key}.prompts: {sweep.prompts}, but the split has {len(mine)}; write less, or raise {limit}"
        )
    return [{"id": row["id"], "sha256": row["prompt_sha256"]} for row in mine[: sweep.prompts]]


def reference(profile: str, benchmark: str, prompts: list[dict[str, str]], repeats: int) -> dict[str, str] | None:
    """The vanilla cell of the profile's own settings and a hash of its texts; a benchmark without cells has none."""
    if benchmark not in keys_at("benchmarks"):
        return None
    path = store.cell_file(profile, benchmark, VANILLA)
    texts = {(row["prompt_id"], row["repeat"]): row["output_ids"] for row in store.read_parquet(path, store.CELLS)}
    wanted = [(prompt["id"], repeat) for prompt in prompts for repeat in range(repeats)]
    if lost := [place for place in wanted if place not in texts]:
        raise ValueError(f"{path}: no text for prompt {lost[0][0]}, repeat {lost[0][1]}; run dvc repro vanilla")
    return {"file": path.as_posix(), "sha256": studies.texts_sha256(texts[place] for place in wanted)}


if __name__ == "__main__":
    entry.run(main, compute=False, sweep=lambda profile: sweeps.names())
