"""What a verifier pass costs by its number of rows, plain and packed linear layers, interleaved in one process.

    python -m tests.benchmarks.passes --profile cpu

The ratio to one packed row is what a tree of that many nodes must earn back (t_verify / t_1 of the cost model).
Medians over rounds, with the middle half of the rounds as the spread. Run it on an idle machine.
"""

import argparse
from statistics import quantiles
from time import perf_counter

import torch

from kernels.cache import KVCache
from kernels.window import causal_mask
from stages.common import entry, store
from stages.common.models import Verifier, load_verifier, resolve_dtype
from stages.common.params import load, profiles

ROWS = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--profile", default="cpu", choices=profiles())
    parser.add_argument("--cached", type=int, default=200, help="tokens already in the cache")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    device = load(entry.Device, args.profile, "device")
    entry.set_threads(device.threads)
    dtype = resolve_dtype(device.dtype, device.name)
    folder = store.verifier_folder(args.profile)
    models = {
        kind: load_verifier(folder, dtype=dtype, device=device.name, packed=kind == "packed")
        for kind in ("packed", "plain")
    }
    seconds: dict[tuple[str, int], list[float]] = {(kind, rows): [] for kind in models for rows in ROWS}
    caches = {kind: filled(model, args.cached) for kind, model in models.items()}
    for _ in range(args.rounds + 1):
        for kind, rows in seconds:
            seconds[kind, rows].append(one_pass(models[kind], caches[kind], rows))
    base = quantiles(seconds["packed", 1][1:])[1]
    setting = f"{dtype}, {torch.get_num_threads()} threads, {args.cached} cached tokens, {args.rounds} rounds"
    print(f"{setting}; ms and ratio to one packed row")
    for rows in ROWS:
        cells = []
        for kind in models:
            low, mid, high = quantiles(seconds[kind, rows][1:])
            cells.append(f"{kind} {1e3 * mid:6.1f} ms, {mid / base:.2f} [{low / base:.2f}, {high / base:.2f}]")
        print(f"{rows:3d} rows: " + "; ".join(cells))


def filled(verifier: Verifier, cached: int) -> KVCache:
    """A cache of `cached` tokens, at least one."""
    cache = verifier.new_cache(cached + max(ROWS))
    verifier.prefill([5] * max(1, cached), cache)
    return cache


@torch.inference_mode()
def one_pass(verifier: Verifier, cache: KVCache, rows: int) -> float:
    """Seconds of one pass of `rows` rows behind what is cached, head included; commits nothing."""
    cached = cache.length
    ids, places = torch.full((1, rows), 7), torch.arange(cached, cached + rows)[None]
    sees = causal_mask(cached=cached, new=rows)
    start = perf_counter()
    verifier.logits(verifier(ids, places, sees, cache)[0]).argmax(-1)
    return perf_counter() - start


if __name__ == "__main__":
    main()
