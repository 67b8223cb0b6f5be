"""Memory and seconds of log q of the targets, forward and backward: by chunks of the words, and by all the scores.

    python -m tests.benchmarks.logprob --out reports/benchmarks/logprob
    python -m tests.benchmarks.logprob --device cuda --dtype bfloat16 --out reports/benchmarks/logprob_cuda

`plain` is what stages/common/windows.py does: float32 scores of every row and word, then cross_entropy. Extra memory is
the most that forward and backward hold at once above the inputs and their gradients; it is counted in a round of its
own, which warms up too. Then the contestants take turns, the order rotating. The fused one runs on CUDA. A table of
scores has 2.5 GB at the default size, and plain holds some of them at once.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.logprob import target_logprob
from stages.common import provenance, store
from tests.benchmarks import tables
from tests.kernels.memory import extra

ROOT = Path(__file__).resolve().parents[2]

Find = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden_RD, head_VD, targets_R -> log q [R]


def plain(hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden_RD, head_VD).float(), targets_R, reduction="none")


def contestants(device: torch.device, chunk: int) -> dict[str, Find]:
    found: dict[str, Find] = {"plain": plain, "by chunks": lambda *given: target_logprob(*given, chunk=chunk)}
    if device.type == "cuda":
        from kernels.fused.logprob import target_logprob as fused

        found["fused"] = lambda *given: fused(*given, chunk=chunk)
    return found


class Problem:
    """Hidden rows, a head and targets, all drawn."""

    def __init__(self, *, rows: int, words: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        g = torch.Generator().manual_seed(0)
        self.hidden_RD = torch.randn(rows, width, generator=g).to(device, dtype).requires_grad_()
        self.head_VD = (torch.randn(words, width, generator=g) / width**0.5).to(device, dtype).requires_grad_()
        self.targets_R = torch.randint(words, (rows,), generator=g).to(device)

    def find(self, find: Find) -> Tensor:
        return find(self.hidden_RD, self.head_VD, self.targets_R)

    def forget(self) -> None:
        self.hidden_RD.grad = self.head_VD.grad = None

    def seconds(self, find: Find) -> float:
        """Of one forward and backward pass."""
        start = perf_counter()
        self.find(find).sum().backward()
        if self.hidden_RD.is_cuda:
            torch.cuda.synchronize()
        took = perf_counter() - start
        self.forget()
        return took

    def extra_bytes(self, find: Find) -> int:
        needed = extra(lambda: self.find(find), (self.hidden_RD, self.head_VD))
        self.forget()
        return needed


def measure(problem: Problem, finds: dict[str, Find], *, rounds: int) -> list[dict[str, Any]]:
    """A row for every contestant: memory, seconds, and how far its values lie from plain's."""
    rows, seconds, names = dict[str, dict[str, Any]](), {name: list[float]() for name in finds}, list(finds)
    with torch.no_grad():
        values = {name: problem.find(find) for name, find in finds.items()}
    for name, find in finds.items():
        gap = float((values[name] - values["plain"]).abs().max())
        rows[name] = {"way": name, "extra_mb": problem.extra_bytes(find) / 1e6, "largest_gap": gap}
    for number in range(rounds):
        for name in tables.turns(names, number):
            seconds[name].append(problem.seconds(finds[name]))
    for name, row in rows.items():
        low, middle, high = statistics.quantiles(seconds[name], n=4, method="inclusive")
        row |= {"seconds": middle, "seconds_low": low, "seconds_high": high}
        row["times_plain"] = middle / statistics.median(seconds["plain"])
    return list(rows.values())


def page(rows: list[dict[str, Any]], setting: dict[str, Any]) -> str:
    stamp = setting["stamp"]
    cells = [
        {
            "width": str(row["width"]),
            "way": row["way"],
            "extra memory, MB": f"{row['extra_mb']:.1f}",
            "seconds": f"{row['seconds']:.3g} ({row['seconds_low']:.3g} to {row['seconds_high']:.3g})",
            "times plain": f"{row['times_plain']:.2f}",
            "largest gap to plain": f"{row['largest_gap']:.1e}",
        }
        for row in rows
    ]
    about = (
        f"{setting['rows']} rows, {setting['words']} words, {setting['chunk']} at a time, forward and backward, "
        f"{stamp['dtype']}, {stamp['device']}, {stamp['threads']} threads, torch {stamp['torch']}, median of "
        f"{setting['rounds']} rounds (middle half), commit {setting['commit']}."
    )
    return "\n".join([about, "", *tables.markdown(cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--words", type=int, default=152_064)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 576, 896])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--out", type=Path, help="writes <out>.json and <out>.md")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: at least 2, to give a spread")
    torch.set_num_threads(args.threads or provenance.cores())
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    rows = list[dict[str, Any]]()
    for width in args.widths:
        problem = Problem(rows=args.rows, words=args.words, width=width, dtype=dtype, device=device)
        for row in measure(problem, contestants(device, args.chunk), rounds=args.rounds):
            rows.append({"width": width, **row})
            print(rows[-1], flush=True)
    setting = {name: getattr(args, name) for name in ("rows", "words", "chunk", "rounds")}
    setting |= {"stamp": provenance.stamp(device=device, dtype=dtype), "commit": tables.commit(ROOT)}
    table = page(rows, setting)
    print(table)
    if args.out:
        store.write_json(args.out.with_suffix(".json"), {**setting, "results": rows})
        store.write_text(args.out.with_suffix(".md"), table)


if __name__ == "__main__":
    main()
