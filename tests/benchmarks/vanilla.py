"""Plain decoding in our engine beside transformers' `generate`, batch 1, greedy: what our ratios are ratios to.

    python -m tests.benchmarks.vanilla --model data/cpu/models/verifier \\
        --prompts data/cpu/prompts/gsm_symbolic.parquet --count 24 --max-new-tokens 96 --out reports/benchmarks/vanilla

Each is measured with transformers' plain linear layers and with those packed once for the processor, so that what the
loop gives and what packing gives stand apart. The first line is packed, as every method of ours is. Prompt by prompt in
one process, another first each time. Run it on an idle machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import checkout, side_by_side, tables
from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import Measured, System
from tests.benchmarks.systems import Generate, Ours

OURS, THEIRS = "our vanilla", "transformers generate"
PLAIN, PACKED = "plain linear layers", "packed linear layers"
ROOT = Path(__file__).resolve().parents[2]


def contestants(folder: Path, *, dtype: str) -> list[System]:
    usual = Models(folder, dtype=dtype, packed_ours=True, packed_theirs=False)
    swapped = Models(folder, dtype=dtype, packed_ours=False, packed_theirs=True)
    return [
        Ours(usual, "vanilla", name=OURS),
        Ours(swapped, "vanilla", name=f"{OURS}, {PLAIN}"),
        Generate(usual, name=THEIRS, note=PLAIN),
        Generate(swapped, name=f"{THEIRS}, {PACKED}", note=PACKED),
    ]


def page(systems: Sequence[System], measured: Measured, lines: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Lines of the page and rows of the CSV; the verdict compares our vanilla with each way to run `generate`."""
    rows = [side_by_side.row(s.name, measured, reference=OURS, base=THEIRS) for s in systems]
    table = [
        {
            "system": row["system"],
            "tokens/s": f"{row['tokens_per_s']:.1f}",
            "times `generate` (95 %)": tables.interval(row["ratio"], row["ratio_low"], row["ratio_high"]),
            "tokens/s, prompt apart": f"{row['decode_tokens_per_s'] or float('nan'):.1f}",
            "tokens per call": f"{row['tokens_per_call']:.2f}",
            "equal texts": f"{row['equal_texts']} of {row['prompts']}",
        }
        for row in rows
    ]
    verdicts = []
    for other in (THEIRS, f"{THEIRS}, {PACKED}"):
        ratio = side_by_side.speed_ratio(measured.texts[OURS], measured.texts[other])
        word = "faster than" if ratio.low > 1 else "slower than" if ratio.high < 1 else "not told apart from"
        verdicts.append(f"{OURS} is {word} {other}: {tables.interval(*ratio)} times as fast.")
    return [*lines, *tables.markdown(table), "", *verdicts], rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = checkout.parser_of("tests.benchmarks.vanilla", __doc__, max_new_tokens=96)
    parser.add_argument("--warm-up-tokens", type=int, default=16)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    systems = contestants(args.model, dtype=args.dtype)
    models, prompts = checkout.open_checkout(args)
    measured = side_by_side.measure(
        systems,
        prompts,
        max_new_tokens=args.max_new_tokens,
        warm_up_tokens=args.warm_up_tokens,
        say=lambda line: print(line, flush=True),
    )
    if measured.skipped:
        raise ValueError("; ".join(f"{name} {reason}" for name, reason in measured.skipped.items()))
    about = (
        f"The first {len(prompts)} prompts of {args.prompts.name}, at most {args.max_new_tokens} new tokens, greedy."
    )
    lines = tables.setting("tests.benchmarks.vanilla", dtype=models.dtype, root=ROOT, argv=words)
    tables.publish(args.out, *page(systems, measured, [*lines, about, ""]))


if __name__ == "__main__":
    checkout.run(main)
