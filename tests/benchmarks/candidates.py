"""Which reasoning-gym tasks a verifier can do: accuracy with an interval, for the choice of reasoning benchmarks.

    python -m tests.benchmarks.candidates --model data/cpu/models/verifier --prompts 48 --max-new-tokens 200

Each candidate is a dataset with options and a wording. The verifier answers greedily; answers are extracted and
compared as in stage `score`. A benchmark serves the curves of accuracy against seconds if it is neither near 0 nor near
1 and its answers take a while, so the length of the answers and the share cut by the limit are printed too.
"""

import argparse
import math
import statistics
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from stages.common.decode import decode_batch
from stages.common.models import load_verifier
from stages.common.tokenizers import load_tokenizer
from stages.download.collect import worded
from stages.download.generated import from_generator
from stages.download.items import without_duplicates
from stages.download.params import Generator
from stages.score import extract


class Candidate(NamedTuple):
    dataset: str
    options: dict[str, int]
    wording: str


SUMS = """State the final answer to the following arithmetic problem: 5 + 3 - 2 =
5 + 3 = 8
8 - 2 = 6
The answer is 6.

State the final answer to the following arithmetic problem: 9 - 4 + 1 =
9 - 4 = 5
5 + 1 = 6
The answer is 6.

{prompt}"""
LETTERS = """How many times does the letter "e" appear in the text: "we see it"?
we: 1
see: 2
it: 0
1 + 2 + 0 = 3
The answer is 3.

How many times does the letter "a" appear in the text: "an old cat"?
an: 1
old: 0
cat: 1
1 + 0 + 1 = 2
The answer is 2.

{prompt}"""
CANDIDATES = {
    "sums": Candidate("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1}, SUMS),
    "sums_explained": Candidate("chain_sum", {"max_terms": 2, "max_digits": 1}, "{prompt} Explain how you got it."),
    "sums_short": Candidate("chain_sum", {"max_terms": 2, "max_digits": 1}, "{prompt}"),
    "products_short": Candidate("products", {"max_digits": 1}, "{prompt}"),
    "products_explained": Candidate("products", {"max_digits": 1}, "{prompt} Explain how you got it."),
    "letters": Candidate("letter_counting", {"min_words": 2, "max_words": 4}, LETTERS),
    "letters_short": Candidate("letter_counting", {"min_words": 2, "max_words": 4}, "{prompt}"),
    "equations": Candidate("simple_equations", {"max_terms": 2, "max_value": 10}, "{prompt}"),
    "legs": Candidate("leg_counting", {"min_animals": 1, "max_animals": 2, "max_instances": 5}, "{prompt}"),
    "gcd": Candidate("gcd", {"max_value": 20}, "{prompt}"),
    "comparison": Candidate("number_format", {"max_num_candidates": 3}, "{prompt}"),
    "gsm": Candidate("gsm_symbolic", {}, "{prompt}"),
}


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a proportion."""
    share, middle = right / count, (right + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(count * share * (1 - share) + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a verifier on candidate tasks.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the verifier")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--seed", type=int, default=9_600_000)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--show", type=int, default=0, help="texts to print of each candidate")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    verifier, tokenizer = load_verifier(args.model, dtype=torch.float32), load_tokenizer(args.model)
    for name in args.only:
        candidate, start = CANDIDATES[name], perf_counter()
        source = Generator(
            source="generator",
            dataset=candidate.dataset,
            seed=args.seed,
            size=4 * args.prompts,
            options=dict(candidate.options),
        )
        items = without_duplicates(from_generator(source, held_out=()))[: args.prompts]
        turns = [worded(item.text, candidate.wording) for item in items]
        texts = decode_batch(
            verifier,
            [tokenizer.encode_prompt([turn]) for turn in turns],
            keys=[item.id for item in items],
            seed=0,
            temperature=0.0,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
        )
        right, cut = 0, 0
        for number, (item, turn, text) in enumerate(zip(items, turns, texts, strict=True)):
            said, whole = tokenizer.decode(text.output_ids), text.finish_reason == "stop"
            answer = extract.final_answer(said, whole=whole)
            good = answer is not None and extract.is_right(answer, item.reference or "")
            right, cut = right + good, cut + (not whole)
            if number < args.show:
                print(f"--- {turn}\n{said}\n=> {answer!r}, wanted {item.reference!r}: {good}")
        low, high = wilson(right, len(items))
        lengths = [len(text.output_ids) for text in texts]
        print(
            f"{name}: {right} of {len(items)} right, {right / len(items):.0%} [{low:.0%}, {high:.0%}]; median "
            f"{statistics.median(lengths):.0f} tokens, {cut} cut; {perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
