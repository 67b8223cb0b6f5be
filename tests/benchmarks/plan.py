"""Seconds of a toy training step and of a decoding pass beside what stages/plan says at this machine's own rates.

    python -m tests.benchmarks.plan --repeats 9 --out reports/benchmarks/plan

The rates are measured in every turn: a product of two square matrices gives operations a second, a product of one row
with matrices too many for the caches bytes a second. The plan's shares of them are then 1, since these are no data
sheet's. Another one first in each turn; medians over turns, of the ratio, too. What a plan leaves out (norms,
activations, copies, the optimizer) is in the measured seconds. Run it on an idle machine.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kernels import objectives
from kernels.window import causal_mask
from stages.common import tiny, windows
from stages.common.drafters import prune
from stages.common.models import Verifier
from stages.common.windows import Example
from stages.plan import needs, work
from stages.plan.settings import Training
from stages.plan.shapes import of_config
from stages.plan.work import Gpu
from tests.benchmarks import tables

ROOT = Path(__file__).resolve().parents[2]
WORDS = 2000
TRAINING = Training(
    steps=1, sequences=4, accumulation=1, max_tokens=192, optimizer="adamw", evaluate_every=1, windows=6, window=6
)
CACHED, NODES = 128, 384  # few rows cost a CPU more than either of its rates says
Contestants = dict[str, Callable[[], Any]]


def contestants(width: int, layers: int) -> tuple[Contestants, dict[str, Callable[[Gpu], float]]]:
    """What is timed, and the plan's seconds of each at given rates."""
    causal_lm = tiny.build_tiny(
        "llama", seed=0, tied=False, layers=layers, width=width, heads=8, key_heads=4, vocab=WORDS, context=512
    )
    shape, exact = of_config(causal_lm.config.to_dict()), replace(needs.ASSUMED, bandwidth_share=1.0, layer_s=0.0)
    drafter = prune(causal_lm, layers=range(layers), d2t=torch.arange(WORDS), vocab_size=WORDS)
    for p in drafter.trained():
        p.requires_grad_(True)
    t, g = TRAINING, torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (t.sequences, t.max_tokens), generator=g).tolist()
    texts = [Example(id=str(i), ids=tuple(row), prompt_length=32) for i, row in enumerate(ids)]
    batch = windows.collate(
        texts, drafter, None, windows=t.windows, window=t.window, full_mask_share=1.0, seed=0, step=1
    )
    rows = needs.rows_of(t, "own", texts=t.sequences)
    step = work.step(shape, rows=rows.total, columns=rows.columns, heads=rows.heads, vocab=WORDS)

    def train() -> None:
        drafter.zero_grad(set_to_none=True)
        objectives.streak(windows.log_q(drafter, batch), batch.layout.valid_BWG.flatten(0, 1)).backward()

    verifier = Verifier(causal_lm, vocab_size=WORDS, end_ids=())
    cache = verifier.new_cache(CACHED + NODES)
    with torch.inference_mode():
        verifier.prefill([1] * CACHED, cache)

    def passing(count: int) -> Callable[[], Tensor]:
        ids, places = torch.ones(1, count, dtype=torch.long), torch.arange(CACHED, CACHED + count)[None]
        sees = causal_mask(cached=CACHED, new=count)

        def run() -> Tensor:
            with torch.inference_mode():
                scores = verifier.logits(verifier(ids, places, sees, cache))
            cache.roll_back(CACHED)
            return scores

        return run

    def planned(count: int) -> Callable[[Gpu], float]:
        flops = work.forward(shape, rows=count, columns=CACHED + count, heads=count)
        read = 4 * (shape.parameters - shape.embedding) + CACHED * shape.cache_bytes(number=4)
        return lambda gpu: work.pass_seconds(gpu, exact, flops=flops, read=read, layers=layers, share=1.0)

    timed: Contestants = {"training step": train, "one-token pass": passing(1), f"{NODES}-token pass": passing(NODES)}
    said: dict[str, Callable[[Gpu], float]] = {
        "training step": lambda gpu: step / gpu.flops,
        "one-token pass": planned(1),
        f"{NODES}-token pass": planned(NODES),
    }
    return timed, said


def rates(side: int) -> Callable[[], Gpu]:
    """This machine's own, now: operations of a square product, bytes of a row with many matrices."""
    row, matrices = torch.randn(1, side), [torch.randn(side, side) for _ in range(max(8, 2**28 // (4 * side * side)))]

    def measured() -> Gpu:
        products = seconds(lambda: [matrices[i] @ matrices[i + 1] for i in range(6)])
        read = seconds(lambda: [row @ m for m in matrices])
        return Gpu(memory=0.0, flops=12 * side**3 / products, bandwidth=sum(m.nbytes for m in matrices) / read)

    return measured


def seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.plan", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    timed, said = contestants(args.width, args.layers)
    for run in timed.values():
        run()
    machine, gpus = rates(args.width), list[Gpu]()
    machine()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for turn in range(args.repeats):
        gpus.append(machine())
        for name in tables.turns(list(timed), turn):
            found[name].append((said[name](gpus[-1]), seconds(timed[name])))
    rows = [
        {
            "what": name,
            "planned_s": median(planned for planned, _ in pairs),
            "measured_s": median(measured for _, measured in pairs),
            "planned_over_measured": median(planned / measured for planned, measured in pairs),
        }
        for name, pairs in found.items()
    ]
    flops, bandwidth = median(gpu.flops for gpu in gpus), median(gpu.bandwidth for gpu in gpus)
    about = (
        f"{args.layers} layers of width {args.width}, float32; measured rates {flops / 1e9:.1f} GFLOP/s and "
        f"{bandwidth / 1e9:.1f} GB/s; medians of {args.repeats} turns."
    )
    shown = [{name: value if isinstance(value, str) else f"{value:.4g}" for name, value in row.items()} for row in rows]
    lines = [*tables.setting("tests.benchmarks.plan", dtype=torch.float32, root=ROOT, argv=words), about, ""]
    tables.publish(args.out, [*lines, *tables.markdown(shown)], rows)


if __name__ == "__main__":
    main()
