"""Many texts at once: the verifier's own continuations of a list of prompts.

    decode_batch(verifier, prompts, keys=ids, seed=0, temperature=0.0, max_new_tokens=112, batch_size=48)

Continuous batching over slots of one cache: a finished text leaves, the next prompt takes its place, and when
no prompt waits the batch shrinks. Prompts go longest first, so that neighbours are alike, and what they all
begin with (the chat template's header) is computed once. Answers come back in the order asked. The coin of a
token is a function of seed, prompt key and place in the text (kernels/sampling.py), so a text does not depend
on its neighbours: each is what the same prompt gives alone.

Letters: B texts of a pass, N rows each, T rows seen, V vocabulary, D width.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import RaggedKVCache
from kernels.sampling import KeyedNoise, is_greedy, keyed_choice, prompt_key
from stages.common.models import Verifier

PREFILL_ROWS = 1024  # of one pass, padding included: bounds memory, wide enough to keep the cores busy
REFILL_SHARE = 8  # newcomers enter when an eighth of the slots is free: fewer, wider prefill passes


class Decoded(NamedTuple):
    """The continuation of one prompt. An end id, if there is one, is its last id."""

    output_ids: list[int]
    finish_reason: str  # "stop": an end id; "length": max_new_tokens or the context limit
    context: Tensor | None = None  # float16 [L, 2, H, T, D]: what the kept layers cached of all tokens but the last


def room(*, context_limit: int, prompt_length: int, max_new_tokens: int) -> int:
    """New tokens a prompt may get: a text never outgrows the positions its model was made for."""
    return max(0, min(max_new_tokens, context_limit - prompt_length))


@dataclass(kw_only=True)
class _Text:
    index: int
    prompt: list[int]
    key: int
    room: int
    output: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


@torch.inference_mode()
def decode_batch(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    *,
    keys: Sequence[str],
    seed: int,
    temperature: float,
    max_new_tokens: int,
    batch_size: int,
    top_k: int = 0,
    top_p: float = 1.0,
    keep_layers: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Decoded]:
    """Continue every prompt until an end id, `max_new_tokens` or the context limit; results in input order.

    keys: names whose noise the prompts use, one each (equal names, equal coins). keep_layers: whose keys and values
    come back with each text. progress: called after every pass with the tokens and the finished texts it brought.
    ValueError for an empty or overlong prompt, or a layer that the verifier does not have.
    """
    _check(prompts, keys, verifier.context_limit, batch_size)
    if verifier.split is not None:
        raise ValueError(
            "device.placement.verifier: auto decodes one text at a time; for many at once write tp, one, or "
            "trajectories.engine: {name: vllm, ...}"
        )
    if any(not 0 <= layer < verifier.num_layers for layer in keep_layers):
        raise ValueError(f"keep_layers: {list(keep_layers)} are not layers of a model with {verifier.num_layers}")
    done: list[Decoded | None] = [None] * len(prompts)
    waiting: deque[_Text] = deque()
    for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        prompt = list(prompts[index])
        left = room(context_limit=verifier.context_limit, prompt_length=len(prompt), max_new_tokens=max_new_tokens)
        if left == 0:
            done[index] = Decoded([], "length")
        else:
            waiting.append(_Text(index=index, prompt=prompt, key=prompt_key(keys[index]), room=left))
    if progress and len(waiting) < len(prompts):
        progress(0, len(prompts) - len(waiting))

    slots = min(batch_size, len(waiting))
    live: list[_Text] = []  # live[i] lives in slot i
    cache = RaggedKVCache(
        layers=verifier.num_layers,
        slots=slots + 1,  # the last one holds the shared beginning
        capacity=max((len(text.prompt) + text.room for text in waiting), default=1),
    )
    if len(waiting) > 1:
        _share(verifier, cache, [text.prompt for text in waiting])
    while waiting or live:
        free = slots - len(live)
        if waiting and free * REFILL_SHARE >= slots:
            first = len(live)
            live += [waiting.popleft() for _ in range(min(free, len(waiting)))]
            hidden_BD = _prefill(verifier, cache, live[first:], first)
        else:
            first = 0
            pending_B1 = torch.tensor([text.output[-1:] for text in live], device=verifier.device)
            hidden_BD = _pass(verifier, cache, pending_B1, first=0, counts=[1] * len(live))[:, -1]
        moved = live[first:]
        for text, token in zip(
            moved,
            _choose(verifier, hidden_BD, moved, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p),
            strict=True,
        ):
            text.output.append(token)
        finished = _leave(live, cache, verifier.end_ids, done, keep_layers)
        if progress:
            progress(len(moved), finished)
    return [decoded for decoded in done if decoded is not None]


def _check(prompts: Sequence[Sequence[int]], keys: Sequence[str], context_limit: int, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least one text must fit")
    if len(keys) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(keys)} keys")
    for prompt, key in zip(prompts, keys, strict=True):
        if not prompt:
            raise ValueError(f"prompt {key!r} is empty: there is no last token to continue from")
        if len(prompt) > context_limit:
            raise ValueError(
                f"prompt {key!r} has {len(prompt)} tokens, the model's context {context_limit}; leave it out"
            )


def _pass(verifier: Verifier, cache: RaggedKVCache, ids_BN: Tensor, *, first: int, counts: list[int]) -> Tensor:
    """Last hidden states [B, N, D]; the first counts[i] rows of each text are kept."""
    positions_BN, sees_BNT = cache.open(first, first + len(counts), new=ids_BN.shape[1], device=verifier.device)
    hidden_BND = verifier(ids_BN, positions_BN, sees_BNT, cache)
    cache.commit(counts)
    return hidden_BND


def _share(verifier: Verifier, cache: RaggedKVCache, prompts: list[list[int]]) -> None:
    """Put what all prompts begin with into the cache's last slot; each keeps a token of its own to run."""
    columns = zip(*prompts, strict=False)  # as long as the shortest
    equal = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    count = min(equal, min(map(len, prompts)) - 1)
    for start in range(0, count, PREFILL_ROWS):
        part = prompts[0][start : min(start + PREFILL_ROWS, count)]
        ids_1N = torch.tensor([part], device=verifier.device)
        _pass(verifier, cache, ids_1N, first=cache.slots - 1, counts=[len(part)])


def _prefill(verifier: Verifier, cache: RaggedKVCache, texts: list[_Text], first: int) -> Tensor:
    """Hidden state [B, D] of each prompt's last token, from right-padded passes of like lengths."""
    shared = cache.lengths[-1]
    last: list[Tensor] = []
    while len(last) < len(texts):
        longest = len(texts[len(last)].prompt)
        group = texts[len(last) : len(last) + max(1, PREFILL_ROWS // (longest - shared))]
        slot = first + len(last)
        for target in range(slot, slot + len(group)):
            cache.copy(cache.slots - 1, target)
        hidden_BND = torch.empty(0)
        counts: list[int] = []
        for start in range(shared, longest, PREFILL_ROWS):  # several only for a prompt that goes alone
            parts = [text.prompt[start : start + PREFILL_ROWS] for text in group]
            counts = [len(part) for part in parts]
            padded = [part + [0] * (counts[0] - len(part)) for part in parts]
            ids_BN = torch.tensor(padded, device=verifier.device)
            hidden_BND = _pass(verifier, cache, ids_BN, first=slot, counts=counts)
        last += [hidden_BND[i, count - 1] for i, count in enumerate(counts)]
    return torch.stack(last)


def _choose(
    verifier: Verifier,
    hidden_BD: Tensor,
    texts: list[_Text],
    *,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> list[int]:
    """The next token of each text, with the coin of the place it will take."""
    logits_BV = verifier.logits(hidden_BD)
    spans = [slice(0, len(texts))] if is_greedy(temperature) else [slice(i, i + 1) for i in range(len(texts))]
    tokens: list[int] = []
    for span in spans:  # greedy needs no coin, so all texts go at once
        noise = KeyedNoise(
            seed=seed, prompt_key=texts[span.start].key, vocab=logits_BV.shape[1], device=logits_BV.device
        )
        places = [text.length for text in texts[span]]
        tokens += keyed_choice(
            logits_BV[span], places, noise, temperature=temperature, top_k=top_k, top_p=top_p
        ).tolist()
    return tokens


def _leave(
    live: list[_Text],
    cache: RaggedKVCache,
    end_ids: frozenset[int],
    done: list[Decoded | None],
    keep_layers: Sequence[int],
) -> int:
    """Take finished texts out of the batch; the last text moves into the gap. Returns how many left."""
    before = len(live)
    for slot in reversed(range(before)):
        text = live[slot]
        stopped = text.output[-1] in end_ids
        if not stopped and len(text.output) < text.room:
            continue
        context = cache.rows_of(slot, keep_layers).to("cpu", torch.float16) if keep_layers else None
        done[text.index] = Decoded(text.output, "stop" if stopped else "length", context)
        if slot < len(live) - 1:
            cache.copy(len(live) - 1, slot)
            live[slot] = live[-1]
        live.pop()
    return before - len(live)
