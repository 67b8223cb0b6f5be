"""Whole texts as rows of an EAGLE head, and chains that feed on the head's own states, from every place at once.

    step 0    row t has the verifier's state at t, and sees the rows of step 0 up to itself
    step s    row t has the state that row t - 1 of step s - 1 came to; it sees the rows of step 0 up to t - s, where
              its chain begins, then its own chain: row t - s + 1 of step 1, .. t - 1 of step s - 1, and itself

That is what decoding does behind a text of t - s + 2 tokens whose next words are the text's own (EAGLE-3's
training-time test, arXiv 2503.01840, section 3.2). The words are always the text's: a chain counts only while it is
right, so for acceptance nothing is lost.

Letters: B texts, T tokens, N = T - 1 rows, C columns of features, D width, W places, S steps.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.common.bodies import Cache
from stages.common.eagle import OneLayer
from stages.common.features import Features
from stages.common.validation import Row
from stages.common.windows import Example


class Rows(NamedTuple):
    words_BN: Tensor  # x_(t+1), the verifier's id
    features_BTC: Tensor  # float32; row t has those at token t, and what it leads to are those at t + 1
    targets_BN: Tensor  # draft id of x_(t+2); -1 outside the draft vocabulary and behind the text
    first_B: Tensor  # the first row that decoding drafts from: the state at the prompt's last token


class StepCache:
    """The rows of the steps before, of one layer; differentiable."""

    def __init__(self) -> None:
        self._kv: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append a step; called by the attention layer of transformers."""
        kv = (key_BHND, value_BHND)
        if self._kv is not None:
            kv = torch.cat([self._kv[0], key_BHND], 2), torch.cat([self._kv[1], value_BHND], 2)
        self._kv = kv
        return kv

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows so far, under the name transformers asks for."""
        return 0 if self._kv is None else self._kv[0].shape[2]


def collate(chosen: Sequence[Example], features: Features, head: OneLayer) -> Rows:
    """Texts padded on the right, where causal rows do not look."""
    lengths = [len(e.ids) for e in chosen]
    total = max(lengths)
    ids_BT = torch.stack([F.pad(torch.tensor(e.ids), (0, total - len(e.ids))) for e in chosen])
    rows = [features[e.id][: len(e.ids)].float() for e in chosen]
    features_BTC = torch.stack([F.pad(rows_TC, (0, 0, 0, total - len(rows_TC))) for rows_TC in rows])
    behind_BN = torch.arange(2, total + 1)[None] >= torch.tensor(lengths)[:, None]
    after_BN = F.pad(ids_BT[:, 2:], (0, 1))
    targets_BN = head.t2d.cpu()[after_BN].masked_fill(behind_BN, -1)
    first_B = torch.tensor([e.prompt_length - 1 for e in chosen])
    return Rows(*(x.to(head.device) for x in (ids_BT[:, 1:], features_BTC, targets_BN, first_B)))


def inside(rows: Rows, *, step: int) -> Tensor:
    """Bool [B, N]: rows of a chain that decoding could draft, whose word ends in the text and in the vocabulary."""
    row_N = torch.arange(rows.words_BN.shape[1], device=rows.words_BN.device)
    return (row_N - step >= rows.first_B[:, None]) & (rows.targets_BN >= 0)


def unroll(head: OneLayer, rows: Rows, states_BND: Tensor, *, steps: int) -> Iterator[Tensor]:
    """States [B, N, D] of each step, from g [B, N, D] on."""
    num_rows, device = rows.words_BN.shape[1], rows.words_BN.device
    positions_1N, cache = torch.arange(num_rows, device=device)[None], StepCache()
    for step in range(steps):
        sees = step_mask(num_rows, step=step, device=device)
        states_BND = head(rows.words_BN, states_BND, positions_1N, sees, cast(Cache, cache))
        yield states_BND
        states_BND = F.pad(states_BND, (0, 0, 1, 0))[:, :-1]


def step_mask(num_rows: int, *, step: int, device: torch.device | str = "cpu") -> Tensor:
    """Bool [N, (step + 1) N]: what the rows of a step see of all steps up to theirs. No chain reaches rows < step."""
    row_N1 = torch.arange(num_rows, device=device)[:, None]
    column_1N = torch.arange(num_rows, device=device)[None]
    chain = [column_1N == row_N1 - (step - before) for before in range(1, step + 1)]
    return torch.cat([column_1N <= row_N1 - step, *chain], 1)


@torch.no_grad()
def measure(
    head: OneLayer, held_out: Sequence[Example], features: Features, *, places: int, window: int, sequences: int
) -> Row:
    """Held-out acceptance from `places` places of each text, evenly spread, `sequences` texts in a pass.

    loss: mean -log q of the next word at the verifier's own states, where it can be drafted. accuracy: share of places
    where it is the arg max. streak: accepted length of the arg-max chain of up to `window` words, each drafted from the
    head's own states; windows whose text ends within them count what was there to accept.
    """
    losses, firsts, streaks = [], [], []
    for start in range(0, len(held_out), sequences):
        chosen = held_out[start : start + sequences]
        rows = collate(chosen, features, head)
        num_rows = rows.words_BN.shape[1]
        starts_BW = torch.stack([_spread(e, places) for e in chosen]).to(head.device)
        alive_BW = torch.ones_like(starts_BW, dtype=torch.bool)
        length_BW = torch.zeros_like(starts_BW)
        for step, states_BND in enumerate(unroll(head, rows, head.fuse(rows.features_BTC[:, :-1]), steps=window)):
            at_BW = (starts_BW + step).clamp(max=num_rows - 1)
            targets_BW = rows.targets_BN.gather(1, at_BW).masked_fill(starts_BW + step >= num_rows, -1)
            picked_BWD = states_BND.gather(1, at_BW[..., None].expand(-1, -1, states_BND.shape[2]))
            scores_BWV = head.logits(picked_BWD)
            right_BW = scores_BWV.argmax(-1) == targets_BW
            if step == 0:
                known_BW = targets_BW >= 0
                losses.append(F.cross_entropy(scores_BWV[known_BW], targets_BW[known_BW], reduction="none"))
                firsts.append(right_BW.float().flatten())
            alive_BW &= right_BW
            length_BW += alive_BW
        streaks.append(length_BW.float().flatten())
    found = torch.cat(losses)
    return {
        "loss": float(found.mean()) if len(found) else None,
        "accuracy": float(torch.cat(firsts).mean()),
        "streak": float(torch.cat(streaks).mean()),
    }


def _spread(e: Example, count: int) -> Tensor:
    """Rows of one text from which decoding could draft, the first among them; repeated if it has fewer."""
    return torch.arange(count) * len(e.anchors) // count + e.anchors.start - 2
