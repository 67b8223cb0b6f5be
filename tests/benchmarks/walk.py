"""Milliseconds of what lies between two passes: building a proposal's tree, drawing its coins, and walking it.

    python -m tests.benchmarks.walk --out reports/benchmarks/walk
    python -m tests.benchmarks.walk --device cuda --words 152064 --dtype bfloat16 --out reports/benchmarks/walk_cuda

`two steps` is keyed_choice and match, or leviathan, as the engine calls them; `one answer` is kernels.walk and `fused`
its Triton twin (on CUDA), each with its one question to the device. A cycle goes on by three tokens, so that two steps
finds some of its noise of the cycle before. The trees are those of `--words` words, without the top-k over them, which
is no work of Python's. Contestants take turns, the order rotating; medians over rounds with the middle half. `share` is
of a cycle of `--cycle-ms`. Run it on an idle machine.

Letters: N nodes, M rows, V vocabulary, G window.
"""

import argparse
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kernels import accept, sampling
from kernels.tree import ancestors_NN, best_first, children, depths, prefix_trie
from kernels.walk import leviathan_walk, match_walk, read
from stages.common import provenance
from tests.benchmarks import tables

ROOT = Path(__file__).resolve().parents[2]
STEP = 3  # tokens of a cycle
Work = Callable[[int], object]  # the cycle's number


def tree_works(nodes: int, *, window: int, width: int) -> dict[str, Work]:
    """What the host does with a tree of so many nodes, by name."""
    generator = torch.Generator().manual_seed(nodes)
    logq_GV = torch.randn(window, 2 * width, generator=generator).mul(3).log_softmax(-1)
    tree = best_first(logq_GV, nodes=nodes, width=width)
    drafts_KG = torch.randint(0, 3, (max(1, 2 * nodes // window), window), generator=generator)
    choices = torch.randint(0, 2 * width, (len(tree.parents) + 1,), generator=generator)
    return {
        "best_first": lambda _: best_first(logq_GV, nodes=nodes, width=width),
        f"prefix_trie ({len(prefix_trie(drafts_KG).tree.parents)} nodes)": lambda _: prefix_trie(drafts_KG),
        "depths": lambda _: depths(tree.parents),
        "ancestors_NN": lambda _: ancestors_NN(tree),
        "children": lambda _: children(tree),
        "match": lambda _: accept.match(tree, choices),
    }


def match_works(
    nodes: int, *, words: int, window: int, width: int, temperature: float, dtype: torch.dtype, device: torch.device
) -> dict[str, Work]:
    """Coins and walk of a best-first tree whose rows lean to their children."""
    generator = torch.Generator().manual_seed(nodes)
    tree = best_first(torch.randn(window, width, generator=generator).log_softmax(-1), nodes=nodes, width=width)
    logits_MV = torch.randn(len(tree.parents) + 1, words, generator=generator)
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        logits_MV[parent + 1, token] += 6
    logits_MV = logits_MV.to(device, dtype)
    tokens_N, parents_N = tree.tokens_N.to(device), torch.tensor(tree.parents, device=device)
    noise = sampling.KeyedNoise(seed=0, prompt_key=1, vocab=words, device=device)
    deepest = max(depths(tree.parents))

    def two_steps(cycle: int) -> accept.Verdict:
        positions = [STEP * cycle + depth for depth in (0, *depths(tree.parents))]
        return accept.match(tree, sampling.keyed_choice(logits_MV, positions, noise, temperature=temperature))

    def one_answer(walk: Callable[..., Tensor]) -> Work:
        given = {"max_depth": deepest, "temperature": temperature}
        return lambda cycle: read(walk(logits_MV, tokens_N, parents_N, noise, position=STEP * cycle, **given))

    return {"two steps": two_steps, **{name: one_answer(walk) for name, walk in walks(device).items()}}


def walks(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {"one answer": match_walk}
    if device.type == "cuda":
        from kernels.fused.walk import match_walk as fused

        found["fused"] = fused
    return found


def leviathan_works(*, words: int, window: int, device: torch.device) -> dict[str, Work]:
    generator = torch.Generator().manual_seed(0)
    p_MV = torch.randn(window + 1, words, generator=generator).mul(3).softmax(-1).to(device)
    q_GV = (p_MV[:-1] + 0.1 / words).div_(1.1)
    tokens_G = torch.multinomial(q_GV.cpu(), 1, generator=generator)[:, 0].to(device)
    uniforms_G = torch.rand(window, dtype=torch.float64, generator=generator).to(device)
    given, coins = (tokens_G, q_GV, p_MV), {"uniforms_G": uniforms_G, "final_uniform": 0.5}
    return {
        "two steps": lambda _: accept.leviathan(*given, **coins),
        "one answer": lambda _: read(leviathan_walk(*given, **coins)),
    }


def timed(works: dict[str, Work], *, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Quartiles in ms; the first two rounds warm up."""
    names, laps = list(works), {name: list[float]() for name in works}
    for turn in range(rounds + 2):
        for name in tables.turns(names, turn):
            start = perf_counter()
            works[name](turn)
            if device.type == "cuda":
                torch.cuda.synchronize()
            laps[name].append(1e3 * (perf_counter() - start))
    return {name: quantiles(found[2:], n=4, method="inclusive") for name, found in laps.items()}


def agree(works: dict[str, Work]) -> bool:
    """Whether all contestants find the same. On CUDA the fused one's coins may differ where two scores nearly tie."""
    found = [work(0) for work in works.values()]
    return all(verdict == found[0] for verdict in found)


def setting(args: argparse.Namespace) -> list[str]:
    stamp = provenance.stamp(device=args.device, dtype=args.dtype)
    return [
        f"`python -m tests.benchmarks.walk {shlex.join(sys.argv[1:])}`",
        "",
        f"{stamp['device']}, {stamp['threads']} threads, {stamp['dtype']}, {args.words} words, window {args.window}, "
        f"width {args.width}; torch {stamp['torch']}, Python {platform.python_version()}; {args.rounds} rounds; commit "
        f"{tables.commit(ROOT)}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--words", type=int, default=49_152)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cycle-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--out", type=Path, help="writes <out>.md and <out>.csv")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or provenance.cores())
    device, dtype, shape = torch.device(args.device), getattr(torch, args.dtype), {"window": args.window}
    rows = list[dict[str, Any]]()

    def contest(what: str, nodes: int, works: dict[str, Work], *, same: bool | None) -> None:
        for name, (low, middle, high) in timed(works, rounds=args.rounds, device=device).items():
            row = {"what": what, "nodes": nodes, "way": name, "ms": middle, "ms_low": low, "ms_high": high}
            rows.append({**row, "share": middle / args.cycle_ms, "same_verdict": same})
            print(rows[-1], flush=True)

    for nodes in args.nodes:
        contest("tree", nodes, tree_works(nodes, **shape, width=args.width), same=None)
        for temperature in args.temperatures:
            given = {**shape, "width": args.width, "words": args.words, "dtype": dtype, "device": device}
            works = match_works(nodes, temperature=temperature, **given)
            contest(f"match, T = {temperature:g}", nodes, works, same=agree(works))
    works = leviathan_works(words=args.words, **shape, device=device)
    contest("leviathan", args.window, works, same=agree(works))
    cells = [
        {
            "what": row["what"],
            "nodes": str(row["nodes"]),
            "way": row["way"],
            "ms (middle half)": tables.interval(row["ms"], row["ms_low"], row["ms_high"], 3),
            f"share of {args.cycle_ms:g} ms": f"{row['share']:.1%}",
            "same verdict": {None: "", True: "yes", False: "NO"}[row["same_verdict"]],
        }
        for row in rows
    ]
    tables.publish(args.out, [*setting(args), *tables.markdown(cells)], rows)


if __name__ == "__main__":
    main()
