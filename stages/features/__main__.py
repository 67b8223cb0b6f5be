"""Features: the verifier reads its own trajectories once, and its hidden states are kept.

    python -m stages.features <profile> verifier

Reads   the verifier, data/<profile>/trajectories.parquet
Writes  data/<profile>/features/verifier/ (layout in stages/common/features.py)
Params  <profile>.device, <profile>.features

One pass over each text gives what decoding saw token by token, up to rounding. A killed run goes on behind the last
whole shard. Only baselines read the output: with `baselines: []` write `features: []` in params.yaml, too.

"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

import kernels.cache
import kernels.window
from stages.common import bodies, contexts, entry, features, models, provenance, scratch, spread, store
from stages.common.features import Taps
from stages.common.models import Verifier, load_verifier, resolve_dtype
from stages.common.params import Count, load

CODE = [Path(module.__file__ or "") for module in (kernels.cache, kernels.window, bodies, features, models)] + [
    Path(__file__)
]  # what a resumed run must find unchanged


@dataclass(frozen=True, kw_only=True)
class Params:
    layers: tuple[int, ...]  # of the verifier; -1: behind its last norm
    shard_size: Count  # texts of a file, and between two saves


def main(run: entry.Run) -> None:
    write_features(run.profile, load(Params, run.profile, "features"), run.device())


def write_features(profile: str, params: Params, device: entry.Device) -> None:
    """Read every trajectory of a profile again and keep its hidden states."""
    path, folder = store.trajectories_file(profile), store.verifier_folder(profile)
    rows = store.read_parquet(path, store.TRAJECTORIES)
    dtype = resolve_dtype(device.dtype, device.name)
    mark = scratch.fingerprint(
        [params, provenance.stamp(device=device.name, dtype=dtype)],
        {"trajectories": store.sha256_file(path), "verifier": store.sha256_folder(folder), "stage": "features"},
        CODE,
    )
    unfinished = scratch.scratch_folder(mark)
    spread.refuse_ranks(device.placement, "features")
    verifier = load_verifier(folder, dtype=dtype, device=device.name, placement=device.placement)
    files: dict[str, str] = {}
    with tqdm(total=len(rows), desc="features", unit="text", mininterval=5) as bar:
        for start in range(0, len(rows), params.shard_size):
            shard = {row["id"]: row for row in rows[start : start + params.shard_size]}
            name = f"{start // params.shard_size:05}.safetensors"
            if not contexts.holds(unfinished / name, list(shard)):
                found = {text_id: read(verifier, row, params.layers) for text_id, row in shard.items()}
                features.write_shard(unfinished / name, found)
            files |= dict.fromkeys(shard, name)
            bar.update(len(shard))
    with store.replace_folder(features.features_folder(profile)) as out:
        for name in sorted(set(files.values())):
            shutil.copyfile(unfinished / name, out / name)
        features.write_index(out, params.layers, files)
    scratch.discard(mark)


def read(verifier: Verifier, row: dict[str, Any], layers: Sequence[int]) -> Tensor:
    """[T, C]: the hidden states at every token of one trajectory."""
    taps, ids = Taps(verifier.body, layers, verifier.device), [*row["prompt_ids"], *row["output_ids"]]
    try:
        verifier.prefill(ids, verifier.new_cache(len(ids)))
        taps.keep()
        return taps.rows()
    finally:
        taps.close()


if __name__ == "__main__":
    entry.run(main, model=lambda _: [features.VERIFIER])
