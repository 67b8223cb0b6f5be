"""Right answers within a budget of seconds: one chain, and a majority vote over the chains that the budget buys.

An answer counts once its whole text is there: prefill and decoding fit into the budget. A text that was cut before an
answer has none (stages/score) and never counts, nor does a wrong one. One chain: the mean over a prompt's repeats.
Vote: the repeats one after the other, as drawn; of those that fit whole, the most frequent answer wins, ties by first
seen, and texts without an answer abstain.

The methods of a sweep are measured one after the other on a machine whose pace drifts. So a row's seconds are first put
into vanilla steps, by the steps timed within that very row, and then into seconds by the step of the vanilla row of the
same prompt and repeat: seconds of one machine at one pace, vanilla's own as they were measured. A row too short to hold
a timed step keeps its seconds.

Letters: P prompts, B budgets, R resamples.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]  # of a cell


class Chain(NamedTuple):
    """One sampled text: seconds at vanilla's pace until it is whole, its answer, and whether that is right."""

    seconds: float
    answer: str | None
    correct: bool


Chains = dict[str, list[Chain]]  # by prompt, as drawn


class Curve(NamedTuple):
    """Mean over prompts at each budget, and the ends of its bootstrap interval."""

    mean_B: np.ndarray
    low_B: np.ndarray
    high_B: np.ndarray


def chains(rows: Sequence[Row], vanilla: Sequence[Row]) -> Chains:
    """The rows of one method by prompt. ValueError: not vanilla's prompts and repeats, or not graded."""
    steps = {(row["prompt_id"], row["repeat"]): row["step_s"] for row in vanilla}
    records = sorted(rows, key=lambda row: (row["prompt_id"], row["repeat"]))
    if sorted(steps) != [(row["prompt_id"], row["repeat"]) for row in records]:
        raise ValueError("not the prompts and repeats of its vanilla point; run dvc repro of the sweep")
    found: Chains = {}
    for row in records:
        if row["correct"] is None:
            raise ValueError(f"prompt {row['prompt_id']} is not graded; run dvc repro score")
        step = steps[row["prompt_id"], row["repeat"]]
        pace = step / row["step_s"] if step > 0 and row["step_s"] > 0 else 1.0
        seconds = (row["prefill_s"] + row["decode_s"]) * pace
        found.setdefault(row["prompt_id"], []).append(Chain(seconds, row["answer"], bool(row["correct"])))
    return found


def one_chain(chains: Sequence[Chain], budget: float) -> float:
    """Share of the chains that are right and whole within the budget."""
    return sum(chain.correct and chain.seconds <= budget for chain in chains) / len(chains)


def vote(chains: Sequence[Chain], budget: float) -> float:
    """1 if the majority of the chains that fit into the budget, one after the other, is right, else 0."""
    ends = accumulate(chain.seconds for chain in chains)
    whole = [chain for chain, end in zip(chains, ends, strict=True) if end <= budget]
    counts = Counter(chain.answer for chain in whole if chain.answer is not None)
    if not counts:
        return 0.0
    winner = max(counts, key=lambda answer: counts[answer])  # a Counter keeps the order of first sight
    return float(next(chain.correct for chain in whole if chain.answer == winner))


def accuracy_PB(
    chains: Chains, budgets: Sequence[float], rule: Callable[[Sequence[Chain], float], float]
) -> np.ndarray:
    """[P, B] of a rule, prompts by name."""
    return np.array([[rule(chains[name], budget) for budget in budgets] for name in sorted(chains)])


def curve(values_PB: np.ndarray, *, resamples: int, confidence: float, seed: int) -> Curve:
    """Mean over prompts with a bootstrap interval over prompts. One seed draws the same prompts for every method."""
    draws_RP = np.random.default_rng(seed).integers(len(values_PB), size=(resamples, len(values_PB)))
    means_RB = np.stack([values_PB[draw_P].mean(axis=0) for draw_P in draws_RP])
    low_B, high_B = np.quantile(means_RB, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return Curve(values_PB.mean(axis=0), low_B, high_B)


def median_answer_s(chains: Chains) -> float:
    """Seconds until the median text is whole: of vanilla's chains, the budget everything is compared at."""
    return float(np.median([chain.seconds for mine in chains.values() for chain in mine]))
