"""From trajectories to training batches: many windows of each text in one pass, the mask drawn as in masked diffusion.

Every draw is a function of (seed, step), so a resumed run sees what an undisturbed one saw. A text's first output token
is never a target: at decoding it comes from the prefill, not from a draft.

Letters: B texts, T clean tokens, W windows of each text, G window, R rows of a pass (kernels/window.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.window import WindowBatch, training_windows
from stages.common.drafters import Drafter

SEED_STRIDE = 1_000_003  # apart from any step count, so that the generators of two seeds never meet


@dataclass(frozen=True, kw_only=True)
class Example:
    """One text: the prompt, and the verifier's continuation after it."""

    id: str
    ids: tuple[int, ...]
    prompt_length: int

    @property
    def anchors(self) -> range:
        """Places of a window's first token: from the second output token to the last."""
        return range(self.prompt_length + 1, len(self.ids))


class Batch(NamedTuple):
    ids_BR: Tensor  # clean tokens, then window rows (mask id, or the token where it is revealed)
    layout: WindowBatch
    targets_BWG: Tensor  # draft ids of x_1 .. x_G; -1 outside the draft vocabulary
    weights_BWG: Tensor  # loss weight of each position: 1/t where masked, 0 where revealed


def examples(rows: Sequence[dict[str, Any]], *, max_tokens: int) -> list[Example]:
    """Texts with at least one window, cut to `max_tokens`. Raises ValueError if none is left."""
    found = [
        Example(
            id=row["id"],
            ids=tuple([*row["prompt_ids"], *row["output_ids"]][:max_tokens]),
            prompt_length=len(row["prompt_ids"]),
        )
        for row in rows
    ]
    usable = [example for example in found if len(example.anchors) > 0]
    if not usable:
        raise ValueError(
            f"none of {len(found)} trajectories has a second output token within {max_tokens} tokens; "
            "raise max_tokens or the trajectories' max_new_tokens"
        )
    return usable


def split_by_prompt(found: Sequence[Example], *, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, validation): whole prompts, the same ones for adapt and distill. At least one each."""
    if len(found) < 2:
        raise ValueError("a validation split needs at least two trajectories; enlarge download.corpus")
    order = torch.randperm(len(found), generator=_generator(seed, 0)).tolist()
    held = min(len(found) - 1, max(1, round(share * len(found))))
    return [found[i] for i in order[held:]], [found[i] for i in order[:held]]


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
    *,
    windows: int,
    window: int,
    full_mask_share: float,
    seed: int,
    step: int,
) -> Batch:
    """One pass over `windows` random windows of each text.

    A window is fully masked with probability `full_mask_share` (what one-step decoding meets); otherwise t ~ U(0, 1],
    each position is masked with probability t and its loss weighs 1/t.
    """
    g = _generator(seed, step)
    lengths_B = torch.tensor([len(example.ids) for example in chosen])
    text = int(lengths_B.max())
    clean_BT = torch.stack([F.pad(torch.tensor(e.ids), (0, text - len(e.ids))) for e in chosen])
    anchors_BW = torch.stack([_spread(example.anchors, windows, g) for example in chosen])
    layout = training_windows(anchors_BW, lengths_B, text=text, window=window)

    shape = layout.target_BWG.shape
    t_BW1 = (1 - torch.rand((*shape[:2], 1), generator=g)).masked_fill(
        torch.rand((*shape[:2], 1), generator=g) < full_mask_share, 1.0
    )
    masked_BWG = torch.rand(shape, generator=g) < t_BW1
    words_BWG = clean_BT.gather(1, layout.target_BWG.flatten(1)).view(shape)
    window_BS = torch.where(masked_BWG | ~layout.valid_BWG, drafter.mask_id, words_BWG)[..., : window - 1]
    return Batch(
        torch.cat([clean_BT, window_BS.flatten(1)], 1),
        layout,
        drafter.t2d.cpu()[words_BWG],
        masked_BWG.float() / t_BW1,
    )


def log_q(drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """(log q_j(x_j) [BW, G] float32, -inf outside the draft vocabulary.

    Scores [rows, V_d] of the rows that have one).
    """
    device = drafter.device
    layout = batch.layout
    hidden_BRD = drafter(batch.ids_BR.to(device), layout.positions_BR.to(device), layout.sees_BRR.to(device))
    wanted_BWG = (layout.valid_BWG & (batch.targets_BWG >= 0) & (batch.weights_BWG > 0)).to(device)
    texts_BWG = torch.arange(hidden_BRD.shape[0], device=device)[:, None, None].expand(wanted_BWG.shape)
    rows_XD = hidden_BRD[texts_BWG[wanted_BWG], layout.source_BWG.to(device)[wanted_BWG]]
    scores_XV = drafter.logits(rows_XD)
    found_X = -F.cross_entropy(scores_XV, batch.targets_BWG.to(device)[wanted_BWG], reduction="none")
    log_q_BWG = torch.full(wanted_BWG.shape, -torch.inf, device=device).masked_scatter(wanted_BWG, found_X)
    return log_q_BWG.flatten(0, 1), scores_XV


def _spread(anchors: range, count: int, g: torch.Generator) -> Tensor:
    """`count` anchors, as different as the text allows."""
    repeats = -(-count // len(anchors))
    shuffled = [torch.randperm(len(anchors), generator=g) for _ in range(repeats)]
    return torch.cat(shuffled)[:count] + anchors.start


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * SEED_STRIDE + step)
