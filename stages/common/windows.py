"""From trajectories to training batches: many windows of each text in one pass, the mask drawn as in masked diffusion.

Every draw is a function of (seed, step), so a resumed run sees what an undisturbed one saw. A text's first output token
is never a target: at decoding it comes from the prefill, not from a draft.

Letters: B texts, T clean tokens, W windows of each text, G window, R rows of a pass (kernels/window.py).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cache import FixedCache
from kernels.window import WindowBatch, bidirectional_windows, context_windows, training_windows
from stages.common.contexts import Contexts
from stages.common.drafters import Drafter

SEED_STRIDE = 1_000_003  # apart from any step count, so that the generators of two seeds never meet


@dataclass(frozen=True, kw_only=True)
class Example:
    """One text: the prompt, and the verifier's continuation after it.

    starts: places where a token of the verifier begins, if a drafter reads the text in other tokens; None: everywhere.
    """

    id: str
    ids: tuple[int, ...]
    prompt_length: int
    starts: tuple[int, ...] | None = None

    @property
    def anchors(self) -> range:
        """Places of a window's first token: from the second output token to the last."""
        return range(self.prompt_length + 1, len(self.ids))

    @property
    def places(self) -> Sequence[int]:
        """Of these, where a token of the verifier begins."""
        return self.anchors if self.starts is None else [start for start in self.starts if start in self.anchors]


class Batch(NamedTuple):
    ids_BR: Tensor  # what stands on each row of the layout: clean tokens, mask ids, tokens where they are revealed
    layout: WindowBatch
    cache: FixedCache | None  # the verifier's, for a drafter that reads it
    targets_BWG: Tensor  # draft ids of x_1 .. x_G; -1 outside the draft vocabulary
    weights_BWG: Tensor  # loss weight of each position: 1/t where masked, 0 where revealed


def examples(
    rows: Sequence[dict[str, Any]], *, max_tokens: int, read: Callable[[Sequence[int]], Sequence[int]] | None = None
) -> list[Example]:
    """Texts with at least one window, cut to `max_tokens`. Raises ValueError if none is left.

    read: the rows a drafter reads of a text (`Drafter.read`), where they may be other than the verifier's ids.
    """
    found = [
        Example(
            id=row["id"],
            ids=tuple([*row["prompt_ids"], *row["output_ids"]][:max_tokens]),
            prompt_length=len(row["prompt_ids"]),
        )
        for row in rows
    ]
    if read is not None:
        found = [reread(example, read, max_tokens=max_tokens) for example in found]
    usable = [example for example in found if len(example.places) > 0]
    if not usable:
        raise ValueError(
            f"none of {len(found)} trajectories has a second output token within {max_tokens} tokens; "
            "raise max_tokens or the trajectories' max_new_tokens"
        )
    return usable


def reread(example: Example, read: Callable[[Sequence[int]], Sequence[int]], *, max_tokens: int) -> Example:
    """A text of the verifier in the rows of a drafter; itself where they are the same."""
    rows, starts = list[int](), list[int]()
    for token in example.ids:
        starts.append(len(rows))
        rows += read([token])
    if rows == list(example.ids):
        return example
    prompt_length = [*starts, len(rows)][min(example.prompt_length, len(starts))]
    return Example(id=example.id, ids=tuple(rows[:max_tokens]), prompt_length=prompt_length, starts=tuple(starts))


def split_by_prompt(found: Sequence[Example], *, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, validation): whole prompts, about `share` of them held out. Raises ValueError if a side is empty.

    A prompt's side is a function of its id, the share and the seed alone, so that stages whose length limits leave
    them different texts never train on what another held out.
    """
    training, held_out = list[Example](), list[Example]()
    for e in found:
        place = int.from_bytes(hashlib.sha256(f"{seed}/{e.id}".encode()).digest()[:8]) / 2**64
        (held_out if place < share else training).append(e)
    if not training or not held_out:
        raise ValueError(
            f"params.yaml: validation.share: {share} leaves {len(training)} of {len(found)} trajectories to train "
            f"on and {len(held_out)} to validate on; change it, or enlarge download.corpus"
        )
    return training, held_out


def draft_vocabulary(found: Sequence[Example], *, size: int, vocab_size: int, always: Sequence[int]) -> Tensor:
    """d2t.

    The most frequent output tokens of the training texts (ties to the lower id), sorted; `always` among them.
    """
    outputs = torch.tensor([token for example in found for token in example.ids[example.prompt_length :]])
    counts = torch.bincount(outputs, minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    ranked = torch.argsort(counts, descending=True, stable=True)[: min(size, int((counts > 0).sum()))]
    return ranked.sort().values


def order(found: Sequence[Example], *, sequences: int, seed: int) -> Iterator[list[int]]:
    """Endless steps of `sequences` indices: epochs in a shuffled order, each text once an epoch."""
    epoch, queue = 0, list[int]()
    while True:
        while len(queue) < sequences:
            epoch += 1
            queue += torch.randperm(len(found), generator=_generator(seed, epoch)).tolist()
        yield queue[:sequences]
        queue = queue[sequences:]


def collate(
    chosen: Sequence[Example],
    drafter: Drafter,
    contexts: Contexts | None,
    *,
    windows: int,
    window: int,
    full_mask_share: float,
    seed: int,
    step: int,
    part: slice = slice(None),
) -> Batch:
    """One pass over `windows` random windows of each text.

    A window is fully masked with probability `full_mask_share` (what one-step decoding meets); otherwise t ~ U(0, 1],
    each position is masked with probability t and its loss weighs 1/t. contexts: what the verifier cached of each
    text, for a drafter that reads it. For one whose prefix is bidirectional every window is a text of its own: B is
    the number of windows, and W is 1. part: the texts that are laid out; windows and masks are drawn for all of them,
    so that a text's are the same whichever process computes it. Every window holds a target at least.
    """
    g = _generator(seed, step)
    anchors_BW = torch.stack([_spread(example.places, windows, g) for example in chosen])
    shape = (*anchors_BW.shape, window)
    t_BW1 = (1 - torch.rand((*shape[:2], 1), generator=g)).masked_fill(
        torch.rand((*shape[:2], 1), generator=g) < full_mask_share, 1.0
    )
    masked_BWG = torch.rand(shape, generator=g) < t_BW1
    chosen, anchors_BW, t_BW1, masked_BWG = chosen[part], anchors_BW[part], t_BW1[part], masked_BWG[part]
    if drafter.prefix == "bidirectional":
        chosen = [example for example in chosen for _ in range(windows)]
        anchors_BW, t_BW1, masked_BWG = (x.flatten(0, 1)[:, None] for x in (anchors_BW, t_BW1, masked_BWG))

    lengths_B = torch.tensor([len(example.ids) for example in chosen])
    text = int(lengths_B.max())
    clean_BT = torch.stack([F.pad(torch.tensor(e.ids), (0, text - len(e.ids))) for e in chosen])
    cache = None if contexts is None else _cache(chosen, drafter, contexts)
    if drafter.prefix == "bidirectional":
        layout = bidirectional_windows(anchors_BW, lengths_B, window=window)
    elif cache is None:
        layout = training_windows(anchors_BW, lengths_B, text=text, window=window)
    else:
        layout = context_windows(anchors_BW, lengths_B, cached=cache.get_seq_length(), window=window)

    words_BWG = clean_BT.gather(1, layout.target_BWG.clamp(max=text - 1).flatten(1)).view(masked_BWG.shape)
    window_BWS = torch.where(masked_BWG | ~layout.valid_BWG, drafter.mask_id, words_BWG)[..., : window - 1]
    if cache is None:
        before = layout.positions_BR.shape[1] - window_BWS[0].numel()  # rows of clean tokens
        ids_BR = torch.cat([clean_BT[:, :before], window_BWS.flatten(1)], 1)
    else:
        pending_BW1 = clean_BT.gather(1, anchors_BW - 1)[..., None]
        ids_BR = torch.cat([pending_BW1, window_BWS], 2).flatten(1)
    return Batch(ids_BR, layout, cache, drafter.t2d.cpu()[words_BWG], masked_BWG.float() / t_BW1)


def hidden(drafter: Drafter, batch: Batch) -> Tensor:
    """[B, W, G, D]: what speaks for x_1 .. x_G of each window."""
    device, layout = drafter.device, batch.layout
    hidden_BRD = drafter(
        batch.ids_BR.to(device), layout.positions_BR.to(device), layout.sees_BRC.to(device), batch.cache
    )
    texts_B11 = torch.arange(hidden_BRD.shape[0], device=device)[:, None, None]
    return hidden_BRD[texts_B11, layout.source_BWG.to(device)]


def log_q(drafter: Drafter, batch: Batch) -> Tensor:
    """log q_j(x_j) [BW, G] float32; -inf outside the draft vocabulary and where no loss is asked for."""
    wanted_BWG = (batch.layout.valid_BWG & (batch.targets_BWG >= 0) & (batch.weights_BWG > 0)).to(drafter.device)
    scores_XV = drafter.logits(hidden(drafter, batch)[wanted_BWG])
    found_X = -F.cross_entropy(scores_XV, batch.targets_BWG.to(drafter.device)[wanted_BWG], reduction="none")
    log_q_BWG = torch.full(wanted_BWG.shape, -torch.inf, device=drafter.device).masked_scatter(wanted_BWG, found_X)
    return log_q_BWG.flatten(0, 1)


def _cache(chosen: Sequence[Example], drafter: Drafter, contexts: Contexts) -> FixedCache:
    """The verifier's cache of each text, padded on the right to one length: places no window looks at."""
    caches = [contexts[example.id][..., : len(example.ids) - 1, :] for example in chosen]  # [L, 2, H, T, D] each
    columns = max(cache.shape[3] for cache in caches)
    padded = [F.pad(cache, (0, 0, 0, columns - cache.shape[3])) for cache in caches]
    return FixedCache(torch.stack(padded, 2).to(device=drafter.device, dtype=drafter.dtype))


def _spread(places: Sequence[int], count: int, g: torch.Generator) -> Tensor:
    """`count` anchors, as different as the text allows."""
    repeats = -(-count // len(places))
    shuffled = [torch.randperm(len(places), generator=g) for _ in range(repeats)]
    return torch.tensor(places)[torch.cat(shuffled)[:count]]


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * SEED_STRIDE + step)
