"""What a cycle costs behind a long context and behind a short one, for vanilla and methods of ours.

    python -m tests.benchmarks.context --model data/cpu/models/verifier --prompts data/cpu/prompts/corpus.parquet \\
        --short 200 --long 2000 --rounds 6 --max-new-tokens 48 --out reports/benchmarks/context

A prefix that is cached exactly is read by attention and by nothing else, so a cycle may not grow much with it: by
`--limit` times at most. Contexts are prompts of the file one behind another, cut to length; each round takes others. In
every round each method decodes behind both lengths, another pair first each time. End tokens stop no text, so that all
have their cycles. A cycle is drafting, verifying and all between, by the engine's own clock; the prompt's pass is in
none. The interval is a bootstrap over rounds. Run it on an idle machine.

Letters: R rounds.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stages.evaluate.contract import Text
from stages.report import measures
from tests.benchmarks import checkout, tables
from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import CONFIDENCE, RESAMPLES

METHODS = ("vanilla", "specdiff2_tree", "specdiff2_fed")
ROOT = Path(__file__).resolve().parents[2]


class Cost(NamedTuple):
    """Means over the cycles of one text."""

    cycle_s: float
    draft_s: float
    verify_s: float
    nodes: float


def context_of(prompts: Sequence[Sequence[int]], *, length: int, start: int) -> list[int]:
    """`length` ids: the prompts from number `start` on, one behind another and round again."""
    order = islice(cycle(prompts), start % len(prompts), None)
    return list(islice(chain.from_iterable(order), length))


def cost_of(text: Text) -> Cost:
    cycles = len(text.cycles)
    assert cycles, "a text without a cycle: decode at least two tokens"
    nodes = sum(cycle.nodes for cycle in text.cycles)
    return Cost(
        text.decode_s / cycles, text.seconds("draft_s") / cycles, text.seconds("verify_s") / cycles, nodes / cycles
    )


def measure(
    models: Models,
    methods: Sequence[str],
    lengths: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int,
    max_new_tokens: int,
) -> dict[tuple[str, int], list[Cost]]:
    """Costs by method and length, one for each round; a round ahead of them warms up."""
    models.verifier.end_ids = frozenset()
    longest, limit = max(lengths) + max_new_tokens, models.verifier.context_limit
    if longest > limit:
        raise ValueError(f"--long {max(lengths)}: the verifier's context holds {limit} tokens, {longest} are wanted")
    engine = models.engine(max_new_tokens)
    decoders = {name: models.method(name) for name in methods}
    pairs = [(name, length) for name in methods for length in lengths]
    costs: dict[tuple[str, int], list[Cost]] = {pair: [] for pair in pairs}
    for number in range(rounds + 1):
        for name, length in tables.turns(pairs, number):
            ids = context_of(prompts, length=length, start=number)
            cost = cost_of(engine.decode(ids, decoders[name], prompt_id="context"))
            print(f"round {number}: {name} behind {length}: {1e3 * cost.cycle_s:.1f} ms a cycle", flush=True)
            if number:
                costs[name, length].append(cost)
    return costs


def page(
    costs: dict[tuple[str, int], list[Cost]], *, short: int, long: int, limit: float, lines: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    rows = []
    for name in dict.fromkeys(name for name, _ in costs):
        near, far = (np.array(costs[name, length]) for length in (short, long))  # [R, 4]
        ratio = measures.ratio(far[:, 0], near[:, 0], resamples=RESAMPLES, confidence=CONFIDENCE, seed=0)
        row: dict[str, Any] = {"method": name, "rounds": len(near), "short": short, "long": long}
        for end, found in (("short", near), ("long", far)):
            for column, mean in zip(Cost._fields, found.mean(0), strict=True):
                row[f"{column}_{end}"] = float(mean)
        rows.append({**row, "ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "limit": limit})
    table = [
        {
            "method": row["method"],
            **{f"ms a cycle at {row[end]}": f"{1e3 * row[f'cycle_s_{end}']:.1f}" for end in ("short", "long")},
            "ratio (95 %)": tables.interval(row["ratio"], row["ratio_low"], row["ratio_high"]),
            f"at most {limit:g}": "yes" if row["ratio"] <= limit else "NO",
            "drafting, ms": f"{1e3 * row['draft_s_short']:.1f}, {1e3 * row['draft_s_long']:.1f}",
            "verifying, ms": f"{1e3 * row['verify_s_short']:.1f}, {1e3 * row['verify_s_long']:.1f}",
            "nodes": f"{row['nodes_short']:.1f}, {row['nodes_long']:.1f}",
        }
        for row in rows
    ]
    legend = "Pairs are at the short and at the long context. A tree of other size costs another cycle: mind the nodes."
    return [*lines, *tables.markdown(table), "", legend], rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = checkout.parser_of("tests.benchmarks.context", __doc__, max_new_tokens=48)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--short", type=checkout.natural, default=200)
    parser.add_argument("--long", type=checkout.natural, default=2000)
    parser.add_argument("--rounds", type=checkout.natural, default=6)
    parser.add_argument("--limit", type=float, default=1.3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    models, prompts = checkout.open_checkout(args)
    lengths = (args.short, args.long)
    costs = measure(models, args.methods, lengths, prompts, rounds=args.rounds, max_new_tokens=args.max_new_tokens)
    about = (
        f"{args.rounds} rounds over {args.prompts.name}, {args.max_new_tokens} new tokens behind each context, greedy."
    )
    lines = tables.setting("tests.benchmarks.context", dtype=models.dtype, root=ROOT, argv=words)
    lines += [about, ""]
    tables.publish(args.out, *page(costs, short=args.short, long=args.long, limit=args.limit, lines=lines))


if __name__ == "__main__":
    checkout.run(main)
