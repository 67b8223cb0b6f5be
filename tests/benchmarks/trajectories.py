"""Throughput of `decode_batch` beside transformers' `generate`, same model, prompts and process.

    python -m tests.benchmarks.trajectories --model data/cpu/models/verifier \\
        --prompts-file data/cpu/prompts/corpus.parquet --prompts 256 --new-tokens 96 --out throughput

Both decode greedily in float32. `generate` pads on the left; it runs once over prompts sorted by length (as a
careful user would) and once in the order given. Each contestant first picks its batch size on a sample. Then the
prompts are dealt into rounds, every contestant decodes every round, the order rotating; a ratio is that of the
summed times, its interval a bootstrap over rounds. New tokens are counted to the first end id, for all alike.
`rows per token` is what a contestant asked of the model, padding and finished texts included: a number that does
not depend on the machine. Takes about eight minutes for 256 prompts on two idle cores.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stages.common import provenance, store
from stages.common.decode import decode_batch
from stages.common.models import Verifier, end_ids_of, load_causal_lm, load_verifier
from stages.common.tokenizers import load_tokenizer
from tests.benchmarks import tables

Decoder = Callable[[list[list[int]], int, int], list[list[int]]]  # prompts, batch size, new tokens
RESAMPLES = 4000


class Timed(NamedTuple):
    seconds: float
    tokens: int
    rows: int
    outputs: list[list[int]]


class Contestant:
    """A decoder and a count of the rows it asks of the model."""

    def __init__(self, name: str, decode: Decoder, rows: Callable[[], int]) -> None:
        self.name, self.decode, self.rows = name, decode, rows
        self.batch_size = 1
        self.rounds: list[Timed] = []

    def time(self, prompts: list[list[int]], new_tokens: int, *, batch_size: int) -> Timed:
        rows, start = self.rows(), time.perf_counter()
        outputs = self.decode(prompts, batch_size, new_tokens)
        seconds = time.perf_counter() - start
        return Timed(seconds, sum(map(len, outputs)), self.rows() - rows, outputs)


def ours(verifier: Verifier) -> Contestant:
    def decode(prompts: list[list[int]], batch_size: int, new_tokens: int) -> list[list[int]]:
        decoded = decode_batch(
            verifier,
            prompts,
            keys=[str(i) for i in range(len(prompts))],
            seed=0,
            temperature=0.0,
            max_new_tokens=new_tokens,
            batch_size=batch_size,
        )
        return [text.output_ids for text in decoded]

    return Contestant("decode_batch", decode, _rows_of(verifier.body))


def generate(causal_lm: Any, end_ids: Sequence[int], *, by_length: bool) -> Contestant:
    pad = min(end_ids, default=0)

    def decode(prompts: list[list[int]], batch_size: int, new_tokens: int) -> list[list[int]]:
        order = list(range(len(prompts)))
        if by_length:
            order.sort(key=lambda i: -len(prompts[i]))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            width = max(len(prompts[i]) for i in batch)
            ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in batch])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
            with torch.inference_mode():
                texts = causal_lm.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    pad_token_id=pad,
                    eos_token_id=list(end_ids) or None,
                )
            for i, text in zip(batch, texts[:, width:].tolist(), strict=True):
                stop = next((n for n, token in enumerate(text, 1) if token in end_ids), len(text))
                outputs[i] = text[:stop]
        return outputs

    name = "generate, sorted by length" if by_length else "generate, order as given"
    return Contestant(name, decode, _rows_of(causal_lm.model))


def _rows_of(body: Any) -> Callable[[], int]:
    """Rows (texts times tokens) this body has been run over so far."""
    total = 0

    def count(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal total
        embeds = kwargs.get("inputs_embeds")
        ids = args[0] if args else kwargs.get("input_ids")
        shape = embeds.shape[:2] if embeds is not None else ids.shape
        total += shape[0] * shape[1]

    body.register_forward_pre_hook(count, with_kwargs=True)
    return lambda: total


def pick_batch_size(
    contestant: Contestant, prompts: list[list[int]], sizes: Sequence[int], new_tokens: int
) -> dict[int, float]:
    """Tokens/s at each batch size on a sample; keeps the best."""
    rates: dict[int, float] = {}
    for size in sizes:
        timed = contestant.time(prompts, new_tokens, batch_size=size)
        rates[size] = timed.tokens / timed.seconds
        print(f"  {contestant.name}: batch {size}: {rates[size]:.0f} tokens/s", flush=True)
    contestant.batch_size = max(rates, key=lambda size: rates[size])
    return rates


def speed(rounds: Sequence[Timed]) -> float:
    return sum(timed.tokens for timed in rounds) / sum(timed.seconds for timed in rounds)


def ratio_interval(first: Contestant, other: Contestant) -> tuple[float, float, float]:
    """Ratio of tokens/s over all rounds, with the middle 95 % of a bootstrap over rounds."""
    count, dice = len(first.rounds), random.Random(0)
    draws = []
    for _ in range(RESAMPLES):
        chosen = [dice.randrange(count) for _ in range(count)]
        draws.append(speed([first.rounds[i] for i in chosen]) / speed([other.rounds[i] for i in chosen]))
    cuts = statistics.quantiles(draws, n=40)
    return speed(first.rounds) / speed(other.rounds), cuts[0], cuts[-1]


def summary(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    first = contestants[0]
    rows = []
    for contestant in contestants:
        tokens = sum(timed.tokens for timed in contestant.rounds)
        ratio, low, high = ratio_interval(first, contestant)
        pairs = [
            mine == other
            for a, b in zip(first.rounds, contestant.rounds, strict=True)
            for mine, other in zip(a.outputs, b.outputs, strict=True)
        ]
        rows.append(
            {
                "contestant": contestant.name,
                "batch_size": contestant.batch_size,
                "new_tokens": tokens,
                "seconds": sum(timed.seconds for timed in contestant.rounds),
                "tokens_per_s": speed(contestant.rounds),
                "rows_per_token": sum(timed.rows for timed in contestant.rounds) / tokens,
                "same_text": sum(pairs),
                "speedup_of_ours": ratio,
                "speedup_low": low,
                "speedup_high": high,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]], setting: dict[str, Any]) -> str:
    stamp = setting["stamp"]
    lengths = setting["prompt_tokens"]
    lines = [
        f"{setting['prompts']} prompts of {lengths['min']} to {lengths['max']} tokens (median {lengths['median']}), "
        f"at most {setting['new_tokens']} new tokens, greedy, {stamp['dtype']}, {stamp['device']}, "
        f"{stamp['threads']} threads, {setting['rounds']} rounds.",
        "",
        "| decoder | batch | tokens/s | rows per token | same text as ours | ours is faster by (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        faster = f"{row['speedup_of_ours']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
        lines.append(
            f"| {row['contestant']} | {row['batch_size']} | {row['tokens_per_s']:.0f} | "
            f"{row['rows_per_token']:.2f} | {row['same_text']} | {faster if row is not rows[0] else ''} |"
        )
    return "\n".join(lines) + "\n"


def read_prompts(path: Path, model: Path, count: int) -> list[list[int]]:
    """`count` prompts drawn over the whole file, in a mixed order."""
    tokenizer = load_tokenizer(model)
    rows = store.read_parquet(path, store.PROMPTS)
    if len(rows) < count:
        raise SystemExit(f"{path} holds {len(rows)} prompts; ask for --prompts {len(rows)} or name another file")
    return [tokenizer.encode_prompt(row["turns"]) for row in random.Random(0).sample(rows, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of decode_batch beside transformers' generate.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the verifier")
    parser.add_argument("--prompts-file", type=Path, default=store.corpus_file("cpu"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--sample", type=int, default=64, help="prompts that batch sizes are tried on")
    parser.add_argument("--sample-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--out", type=Path, help="writes <out>.json and <out>.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or provenance.cores())

    prompts = read_prompts(args.prompts_file, args.model, args.prompts)
    end_ids = end_ids_of(args.model)
    causal_lm = load_causal_lm(args.model, torch.float32)
    contestants = [
        ours(load_verifier(args.model, dtype=torch.float32)),
        generate(causal_lm, end_ids, by_length=True),
        generate(causal_lm, end_ids, by_length=False),
    ]
    tried: dict[str, dict[int, float]] = {}
    for contestant in contestants:
        contestant.time(prompts[:2], 4, batch_size=2)  # warm-up
        tried[contestant.name] = pick_batch_size(
            contestant, prompts[: args.sample], args.batch_sizes, args.sample_tokens
        )
    rounds = max(1, min(args.rounds, len(prompts)))
    for number in range(rounds):
        dealt = prompts[number::rounds]
        for contestant in tables.turns(contestants, number):
            timed = contestant.time(dealt, args.new_tokens, batch_size=contestant.batch_size)
            contestant.rounds.append(timed)
            rate = timed.tokens / timed.seconds
            print(f"  round {number + 1}: {contestant.name}: {rate:.0f} tokens/s", flush=True)

    lengths = [len(prompt) for prompt in prompts]
    setting = {
        "stamp": provenance.stamp(device="cpu", dtype=torch.float32),
        "prompts": len(prompts),
        "prompt_tokens": {
            "min": min(lengths),
            "median": int(statistics.median(lengths)),
            "max": max(lengths),
        },
        "new_tokens": args.new_tokens,
        "rounds": rounds,
        "tokens_per_s_by_batch_size": tried,
    }
    rows = summary(contestants)
    table = markdown(rows, setting)
    print(table)
    if args.out:
        store.write_json(args.out.with_suffix(".json"), json.loads(json.dumps({**setting, "results": rows})))
        store.write_text(args.out.with_suffix(".md"), table)


if __name__ == "__main__":
    main()
