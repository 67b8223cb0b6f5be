"""One cell: a benchmark decoded with one method, each prompt paired with vanilla steps of the very same text.

Shared machines drift, and cells run minutes apart. So within every text, each `yardstick_every` emitted tokens, the
last `yardstick_tokens` committed tokens are decoded again one at a time and timed: the paired yardstick. Speed-up is
the method's tokens/s over the yardstick's, and the vanilla cell, measured the same way, must come out at 1.

With position-keyed coins every Match method emits vanilla's text. Where it differs, the difference is excused only if
vanilla's top-2 gap there is below `excuse_multiple` times the rounding measured between a block pass and one-token
passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels import sampling
from kernels.tree import chain
from stages.common.params import Count, Natural, NonNegative, Share
from stages.evaluate.contract import Method, Sampling, Text
from stages.evaluate.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Shared:
    """`<profile>.evaluate.shared`: what every method is measured with."""

    temperature: NonNegative  # T_v
    top_k: Natural  # 0: all words
    top_p: Share
    max_new_tokens: Count
    repeats: Count
    warm_up_tokens: Count  # decoded before the clock starts
    yardstick_every: Count
    yardstick_tokens: Count
    excuse_multiple: NonNegative  # 0: every difference fails


@dataclass(frozen=True, kw_only=True)
class Behind:
    """A later turn of a chat: its prompt stands when vanilla has answered the turns before.

    answers: ids of those prompts. render: from their output ids to the prompt's.
    """

    answers: tuple[str, ...]
    render: Callable[[Sequence[Sequence[int]]], list[int]]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`ids` of a later turn are empty: `behind` renders them."""

    id: str
    split: str
    ids: tuple[int, ...]
    behind: Behind | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Vanilla's texts by (prompt, repeat); None in the vanilla cell itself."""

    texts: dict[tuple[str, int], list[int]]


def measure(
    engine: Engine,
    method: Method,
    prompts: Sequence[Prompt],
    shared: Shared,
    *,
    seed: int,
    reference: Reference | None,
    covered: Tensor | None,
    comparable: bool,
    progress: Any,
) -> tuple[list[dict[str, Any]], float]:
    """(rows of the cell without their names and texts, rounding in logit units).

    covered: bool [V], words that can be drafted; None if nothing is. comparable: the method answers with vanilla's
    own coins.
    """
    rounding = warm_up(engine, method, prompts[0], shared)
    rows, decoded = [], dict[tuple[str, int], list[int]]()
    for repeat in range(shared.repeats):
        engine.sampling = Sampling(
            temperature=shared.temperature, top_k=shared.top_k, top_p=shared.top_p, seed=seed + repeat
        )
        for prompt in prompts:
            text, laps = Text(prompt_ids(prompt, repeat, reference.texts if reference else decoded)), list[float]()
            for _ in paired(engine, method, prompt, shared, text, laps):
                pass
            decoded[prompt.id, repeat] = text.output_ids
            row = account(text, laps) | {
                "split": prompt.split,
                "prompt_id": prompt.id,
                "repeat": repeat,
                "seed": seed + repeat,
                "temperature": shared.temperature,
                "covered_tokens": (len(text.output_ids) if covered is None else int(covered[text.output_ids].sum())),
            }
            wanted = vanilla_text(prompt.id, repeat, reference.texts if reference else decoded)
            rows.append(row | compare(engine, text, wanted, prompt, shared, rounding, comparable=comparable))
            progress.update(1)
    return rows, rounding


def prompt_ids(prompt: Prompt, repeat: int, vanilla: Mapping[tuple[str, int], list[int]]) -> list[int]:
    """The ids to decode behind; of a later turn with vanilla's answers of the same repeat before it."""
    if prompt.behind is None:
        return list(prompt.ids)
    return prompt.behind.render([vanilla_text(name, repeat, vanilla) for name in prompt.behind.answers])


def vanilla_text(prompt_id: str, repeat: int, vanilla: Mapping[tuple[str, int], list[int]]) -> list[int]:
    """ValueError: vanilla has not decoded the prompt."""
    if (prompt_id, repeat) not in vanilla:
        raise ValueError(f"the vanilla cell has no text for prompt {prompt_id}, repeat {repeat}; run dvc repro vanilla")
    return vanilla[prompt_id, repeat]


def warm_up(engine: Engine, method: Method, prompt: Prompt, shared: Shared) -> float:
    """Decode a little outside the clock; the largest difference between block and one-token logits there."""
    limit = engine.max_new_tokens
    engine.max_new_tokens = min(limit, shared.warm_up_tokens)
    text = engine.decode(prompt.ids, method, prompt_id=prompt.id)
    engine.max_new_tokens = limit
    return block_rounding(engine, text)


@torch.inference_mode()
def block_rounding(engine: Engine, text: Text) -> float:
    """Largest absolute difference of any logit between one pass over the text's tokens and a pass for each."""
    tokens, prompt = text.output_ids, len(text.prompt_ids)
    if not tokens:
        return 0.0  # the prompt fills the context: nothing was measured, so nothing will be excused
    engine.cache.roll_back(prompt)
    block_MV = engine.verify(tokens[0], chain(torch.tensor(tokens[1:], dtype=torch.long)))
    worst = 0.0
    for index, token in enumerate(tokens):
        engine.cache.roll_back(prompt + index)
        single_V = engine.verify(token)[0]
        engine.cache.keep([0])
        worst = max(worst, float((single_V - block_MV[index]).abs().max()))
    return worst


def paired(
    engine: Engine, method: Method, prompt: Prompt, shared: Shared, text: Text, laps: list[float]
) -> Iterator[list[int]]:
    """Decode into `text`, yielding what each cycle emits; seconds of the vanilla steps within it go to `laps`."""
    due = shared.yardstick_every
    for tokens in engine.stream(text, method, prompt_id=prompt.id):
        yield tokens
        if len(text.output_ids) >= due or text.finish_reason:
            count = max(0, min(shared.yardstick_tokens, len(text.output_ids) - 1))
            laps += engine.vanilla_steps(text, count, prompt_id=prompt.id)
            due = len(text.output_ids) + shared.yardstick_every


def account(text: Text, laps: Sequence[float]) -> dict[str, Any]:
    """The measured columns of a row."""
    return {
        "output_ids": text.output_ids,
        "new_tokens": len(text.output_ids),
        "accepted": [cycle.accepted for cycle in text.cycles],
        "num_draft_tokens": sum(cycle.proposed for cycle in text.cycles),
        "window": max((cycle.proposed for cycle in text.cycles), default=0),
        "nodes": max((cycle.nodes for cycle in text.cycles), default=0),
        "prefill_s": text.prefill_s,
        "decode_s": text.decode_s,
        "draft_s": text.seconds("draft_s"),
        "verify_s": text.seconds("verify_s"),
        "other_s": text.seconds("other_s"),
        "yardstick_tokens": len(laps),
        "yardstick_s": sum(laps),
        "step_s": median(laps) if laps else 0.0,
    }


def compare(
    engine: Engine,
    text: Text,
    wanted: Sequence[int],
    prompt: Prompt,
    shared: Shared,
    rounding: float,
    *,
    comparable: bool,
) -> dict[str, Any]:
    """Where a text leaves vanilla's, and whether rounding explains it.

    Texts are equal or they differ: no waving through.
    """
    equal = text.output_ids == list(wanted)
    found: dict[str, Any] = {
        "matches_vanilla": equal,
        "first_difference": -1,
        "top2_gap": float("nan"),
        "excused": False,
    }
    if equal or not comparable:
        return found
    pairs = zip(text.output_ids, wanted, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(text.output_ids)))
    gap = engine.gap(text, index, prompt_id=prompt.id)
    return found | {
        "first_difference": index,
        "top2_gap": gap,
        "excused": gap < shared.excuse_multiple * rounding,
    }


def greedy_or_match(shared: Shared, rule: str) -> bool:
    """Whether a method answers with vanilla's own coins (Leviathan does at T_v = 0 only)."""
    return rule != "leviathan" or sampling.is_greedy(shared.temperature)
