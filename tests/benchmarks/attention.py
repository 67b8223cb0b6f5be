"""What one layer's attention costs in a pass over a tree: a dense mask, and blocks that keep a row's bits.

    python -m tests.benchmarks.attention --blocks 32 64 128 256 --prefix 200 1000 4000

The dense one is PyTorch's own, grouped as stages/common/models.py packs it. Times are for a verifier of 9 query heads
and 3 key heads of 64 unless said otherwise, interleaved, medians over rounds with the middle half as the spread; a pass
has as many of these as the model has layers, and one layout, timed apart. Run it on an idle machine.
"""

import argparse
from collections.abc import Callable
from statistics import quantiles
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import lay_out, path_words, tree_attention, unpack
from kernels.window import additive

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 13, 33])
    parser.add_argument("--prefix", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="query heads, key heads, head width")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.dtype}, {args.threads} threads, heads {args.heads}, {args.rounds} rounds; microseconds of one layer")
    for prefix in args.prefix:
        for rows in args.rows:
            report(ways(rows, prefix, args.blocks, args.heads, DTYPES[args.dtype]), rows, prefix, args.rounds)


def ways(
    rows: int, prefix: int, blocks: list[int], heads: list[int], dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Every way to run the attention of one pass over a tree of `rows` rows, two children to a node."""
    H, J, D = heads
    q, k, v = (torch.randn(n, length, D).to(dtype) for n, length in ((H, rows), (J, prefix + rows), (J, prefix + rows)))
    words = path_words([node // 2 - 1 for node in range(rows - 1)], rows=rows)
    sees = torch.cat([torch.ones(rows, prefix, dtype=torch.bool), unpack(words)], 1)
    bias = additive(sees, dtype).repeat(H // J, 1)
    scaling = D**-0.5

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(
            q.reshape(1, J, H // J * rows, D), k[None], v[None], attn_mask=bias, scale=scaling
        )

    found: dict[str, Callable[[], object]] = {"dense": dense}
    for block in blocks:
        paths = lay_out(words, prefix=prefix, block=block)
        found[f"block {block}"] = lambda paths=paths: tree_attention(q, k, v, paths, scaling=scaling)
    found["layout"] = lambda: lay_out(words, prefix=prefix, block=blocks[-1])
    return found


@torch.inference_mode()
def report(runs: dict[str, Callable[[], object]], rows: int, prefix: int, rounds: int) -> None:
    """Time the ways in turn and print a line."""
    micros: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = perf_counter()
            run()
            micros[name].append(1e6 * (perf_counter() - start))
    cells = []
    for name, laps in micros.items():
        low, mid, high = quantiles(laps[1:])
        cells.append(f"{name} {mid:.0f} [{low:.0f}, {high:.0f}]")
    print(f"{prefix:5d} cached, {rows:3d} rows: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
