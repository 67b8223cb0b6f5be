"""The engine's own time as a share of a cycle: all but drafting and the verifier's pass, by the cycles' own clocks.

    python -m tests.benchmarks.overhead --model data/cpu/models/verifier \\
        --prompts data/cpu/prompts/gsm_symbolic.parquet --count 16 --max-new-tokens 96 --out reports/benchmarks/overhead

The share is the seconds `other` of all cycles over the seconds of all cycles; its interval is a bootstrap over prompts.
What a method does to turn scores into a tree is in `drafting`, not in `other`: the clock is read around `propose`.
Prompt by prompt, another method first each time. Run it on an idle machine.

Letters: P prompts.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.evaluate.contract import Text
from stages.report import measures
from tests.benchmarks import checkout, tables
from tests.benchmarks.checkout import Models
from tests.benchmarks.side_by_side import CONFIDENCE, RESAMPLES

METHODS = ("vanilla", "specdiff2_tree", "specdiff2_fed")
ROOT = Path(__file__).resolve().parents[2]


def measure(
    models: Models,
    methods: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    warm_up_tokens: int,
) -> dict[str, list[Text]]:
    decoders = {name: models.method(name) for name in methods}
    engine = models.engine(warm_up_tokens)
    for decoder in decoders.values():
        engine.decode(prompts[0], decoder, prompt_id="overhead")
    engine.max_new_tokens = max_new_tokens
    texts: dict[str, list[Text]] = {name: [] for name in methods}
    for turn, ids in enumerate(prompts):
        for name in tables.turns(methods, turn):
            texts[name].append(engine.decode(ids, decoders[name], prompt_id="overhead"))
        print(f"prompt {turn + 1} of {len(prompts)}", flush=True)
    return texts


def page(texts: dict[str, list[Text]], *, limit: float, lines: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    rows = []
    for name, all_found in texts.items():
        found = [text for text in all_found if text.cycles]
        if not found:
            raise ValueError(f"{name}: no text has a cycle; take a larger --max-new-tokens or other prompts")
        other_P = np.array([text.seconds("other_s") for text in found])
        whole_P = np.array([text.decode_s for text in found])
        share = measures.ratio(other_P, whole_P, resamples=RESAMPLES, confidence=CONFIDENCE, seed=0)
        cycles = sum(len(text.cycles) for text in found)
        row: dict[str, Any] = {"method": name, "prompts": len(found), "cycles": cycles}
        row["cycle_s"] = sum(text.decode_s for text in found) / cycles
        for part in ("draft_s", "verify_s", "other_s"):
            row[part] = sum(text.seconds(part) for text in found) / cycles
        rows.append({**row, "share": share.value, "share_low": share.low, "share_high": share.high, "limit": limit})
    table = [
        {
            "method": row["method"],
            "cycles": str(row["cycles"]),
            "ms a cycle": f"{1e3 * row['cycle_s']:.2f}",
            "drafting": f"{1e3 * row['draft_s']:.2f}",
            "verifying": f"{1e3 * row['verify_s']:.2f}",
            "other": f"{1e3 * row['other_s']:.2f}",
            "share of other, % (95 %)": tables.interval(*(100 * row[k] for k in ("share", "share_low", "share_high"))),
            f"at most {100 * limit:g} %": "yes" if row["share"] <= limit else "NO",
        }
        for row in rows
    ]
    return [*lines, *tables.markdown(table)], rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = checkout.parser_of("tests.benchmarks.overhead", __doc__, max_new_tokens=96)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--warm-up-tokens", type=int, default=16)
    parser.add_argument("--limit", type=float, default=0.05)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    models, prompts = checkout.open_checkout(args)
    texts = measure(
        models, args.methods, prompts, max_new_tokens=args.max_new_tokens, warm_up_tokens=args.warm_up_tokens
    )
    about = (
        f"The first {len(prompts)} prompts of {args.prompts.name}, at most {args.max_new_tokens} new tokens, greedy."
    )
    lines = [*tables.setting("tests.benchmarks.overhead", dtype=models.dtype, root=ROOT, argv=words), about, ""]
    tables.publish(args.out, *page(texts, limit=args.limit, lines=lines))


if __name__ == "__main__":
    checkout.run(main)
