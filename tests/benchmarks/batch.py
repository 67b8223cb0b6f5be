"""Where drafting stops paying: methods of ours beside vanilla, as many texts at once as one says.

    python -m tests.benchmarks.batch --model data/cpu/models/verifier --prompts data/cpu/prompts/gsm_symbolic.parquet \\
        --batches 1 2 4 8 16 --groups 2 --group 16 --max-new-tokens 48 --out reports/benchmarks/batch

A verifier's pass over few rows costs little more than one row, which is what drafting lives on; rows of other texts use
that up. Prompts go in groups. A group is decoded whole at every batch size and by every method in turn, another one
first each time, up to so many texts side by side (stages/evaluate/batch.py); where a text ends the next one enters. The
ratio is vanilla's decoding seconds per token at the same batch size over the method's, prompts' passes apart; its
interval is a bootstrap over groups and says little for a few of them. Texts are compared with vanilla's of batch 1.
Run it on an idle machine.

Letters: P groups.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stages.evaluate.batch import BatchEngine
from stages.evaluate.contract import Sampling
from stages.evaluate.harness import Prompt
from stages.report import measures
from tests.benchmarks import checkout, tables
from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import CONFIDENCE, RESAMPLES

VANILLA = "vanilla"
METHODS = ("prompt_lookup", "specdiff2_tree", "specdiff2_mix")
ROOT = Path(__file__).resolve().parents[2]


class Turn(NamedTuple):
    """A group decoded once."""

    tokens: int  # the first of each text, which its prompt's pass gives, not counted
    seconds: float
    accepted: float  # a cycle
    nodes: float  # a cycle
    differing: int  # texts that are not vanilla's of batch 1


Pair = tuple[str, int]  # method, batch size


def measure(
    models: Models,
    methods: Sequence[str],
    batches: Sequence[int],
    groups: Sequence[Sequence[Prompt]],
    *,
    max_new_tokens: int,
) -> dict[Pair, list[Turn]]:
    """A turn for each group, by method and batch size. The first group is decoded a little ahead, to warm up."""
    pairs = [(name, batch) for batch in batches for name in (VANILLA, *methods)]
    pairs.sort(key=lambda pair: pair != (VANILLA, 1))  # whose texts the others are compared with
    found: dict[Pair, list[Turn]] = {pair: [] for pair in pairs}
    build = {name: models.builder(name) for name in (VANILLA, *methods)}
    for name, batch in pairs:
        engine_of(models, batch, max_new_tokens=4).decode_all(groups[0][:batch], build[name])
    for number, group in enumerate(groups):
        wanted: list[list[int]] = []
        for name, batch in [pairs[0], *tables.turns(pairs[1:], number)]:
            texts = engine_of(models, batch, max_new_tokens=max_new_tokens).decode_all(group, build[name])
            ids = [text.output_ids for text in texts]
            wanted = wanted or ids
            cycles = [cycle for text in texts for cycle in text.cycles]
            turn = Turn(
                tokens=sum(len(text) - 1 for text in ids),
                seconds=sum(text.decode_s for text in texts),
                accepted=sum(cycle.accepted for cycle in cycles) / max(1, len(cycles)),
                nodes=sum(cycle.nodes for cycle in cycles) / max(1, len(cycles)),
                differing=sum(a != b for a, b in zip(ids, wanted, strict=True)),
            )
            found[name, batch].append(turn)
            print(f"group {number + 1}: {name}, {batch} at once: {turn.tokens / turn.seconds:.1f} tokens/s", flush=True)
    return found


def engine_of(models: Models, slots: int, *, max_new_tokens: int) -> BatchEngine:
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    return BatchEngine(models.verifier, greedy, max_new_tokens=max_new_tokens, slots=slots)


def row(pair: Pair, found: dict[Pair, list[Turn]]) -> dict[str, Any]:
    name, batch = pair
    turns, base = found[pair], found[VANILLA, batch]
    over_P = np.array([b.seconds / b.tokens * t.tokens for t, b in zip(turns, base, strict=True)])
    ratio = measures.ratio(
        over_P, np.array([t.seconds for t in turns]), resamples=RESAMPLES, confidence=CONFIDENCE, seed=0
    )
    return {
        "method": name,
        "batch": batch,
        "groups": len(turns),
        "tokens_per_s": sum(t.tokens for t in turns) / sum(t.seconds for t in turns),
        "speedup": ratio.value,
        "speedup_low": ratio.low,
        "speedup_high": ratio.high,
        "accepted": sum(t.accepted for t in turns) / len(turns),
        "nodes": sum(t.nodes for t in turns) / len(turns),
        "differing_texts": sum(t.differing for t in turns),
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of each method, the batch sizes at which it decodes faster than vanilla and those at which it does not."""
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows if row["method"] != VANILLA):
        faster = [str(row["batch"]) for row in rows if row["method"] == name and row["speedup_low"] > 1]
        not_so = [str(row["batch"]) for row in rows if row["method"] == name and row["speedup_low"] <= 1]
        lines.append(f"- `{name}` is faster than vanilla at {_listed(faster)}, and not so at {_listed(not_so)}.")
    return lines


def _listed(batches: Sequence[str]) -> str:
    return f"batch {', '.join(batches)}" if batches else "no batch measured"


def page(found: dict[Pair, list[Turn]], lines: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    rows = [row(pair, found) for pair in sorted(found, key=lambda pair: pair[1])]
    table = [
        {
            "batch": str(row["batch"]),
            "method": row["method"],
            "tokens/s": f"{row['tokens_per_s']:.1f}",
            "times vanilla at this batch (95 %)": tables.interval(
                row["speedup"], row["speedup_low"], row["speedup_high"]
            ),
            "accepted a cycle": f"{row['accepted']:.2f}",
            "nodes a cycle": f"{row['nodes']:.1f}",
            "differing texts": str(row["differing_texts"]),
        }
        for row in rows
    ]
    return [*lines, *tables.markdown(table), "", *verdicts(rows)], rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = checkout.parser_of("tests.benchmarks.batch", __doc__, max_new_tokens=48)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="beside vanilla")
    parser.add_argument("--batches", nargs="+", type=checkout.natural, default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=checkout.natural, default=2)
    parser.add_argument("--group", type=checkout.natural, default=16, help="prompts of a group")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    args.count = args.groups * args.group
    models, prompts = checkout.open_checkout(args)
    named = [Prompt(id=str(i), split="", ids=tuple(ids)) for i, ids in enumerate(prompts)]
    groups = [named[start : start + args.group] for start in range(0, len(named), args.group)]
    batches = sorted({1, *args.batches})
    found = measure(models, args.methods, batches, groups, max_new_tokens=args.max_new_tokens)
    about = (
        f"{args.groups} groups of {args.group} prompts of {args.prompts.name}, at most {args.max_new_tokens} new "
        "tokens, greedy."
    )
    lines = tables.setting("tests.benchmarks.batch", dtype=models.dtype, root=ROOT, argv=words)
    tables.publish(args.out, *page(found, [*lines, about, ""]))


if __name__ == "__main__":
    checkout.run(main)
