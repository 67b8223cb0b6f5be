"""The mask window of the diffusion drafter: shift, attention pattern and positions, for training and for decoding.

One convention, shared by the loss and by the sampler (METHOD.md sections 2 and 4):

- the prefix is **causal**, so its keys and values are exact to cache (but see `bidirectional_windows`);
- a window of G tokens x_1 .. x_G behind a prefix of n tokens has G - 1 **window rows** at positions n .. n + G - 2;
  row j stands on x_j's place and holds the mask token, or x_j where it is revealed;
- left shift: q_1 comes from the last prefix row (which sees no window row), q_(j+1) from window row j;
- window rows see the whole prefix and one another (bidirectional), and no row of another window.

Three layouts of a training pass, for the three things a drafter may read as its prefix (stages/common/drafters.py):
`training_windows` runs the prefix rows itself, `context_windows` finds them in a cache, and `bidirectional_windows` is
the mask that diffusion models are published with: every row of prefix and window sees every other. Then the prefix
rows depend on the window behind them: nothing can be cached, a text holds one window a pass, and q_1's row sees masks.

Letters: B batch, T clean tokens or cached rows, W windows, G window, R rows of a training pass, C columns they see.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class WindowBatch(NamedTuple):
    """Everything a training pass over many windows of each sequence needs beside the tokens."""

    positions_BR: Tensor  # long: place of every row in its text
    sees_BRC: Tensor  # bool: row, column -> may look
    source_BWG: Tensor  # long: the row that speaks for x_1 .. x_G
    target_BWG: Tensor  # long: the place of x_1 .. x_G in the text (beyond its end where not valid)
    valid_BWG: Tensor  # bool: x_j lies inside the text


def decoding_mask(*, cached: int, new: int, window_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Who sees whom in one drafting pass: bool [new + window_rows, cached + new + window_rows].

    `new` committed tokens not yet cached (causal), then the window rows (all of the prefix and one another).
    """
    rows, columns = new + window_rows, cached + new + window_rows
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
    causal = column <= cached + row
    return torch.where(row < new, causal, torch.ones_like(causal))


def bidirectional_mask(*, rows: int, device: torch.device | str = "cpu") -> Tensor:
    """All of a text and its window rows see one another: bool [rows, rows]."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device)


def causal_mask(*, cached: int, new: int, device: torch.device | str = "cpu") -> Tensor:
    """The ordinary causal pattern of `new` rows behind `cached` ones: bool [new, cached + new]."""
    return decoding_mask(cached=cached, new=new, window_rows=0, device=device)


def training_windows(anchors_BW: Tensor, lengths_B: Tensor, *, text: int, window: int) -> WindowBatch:
    """Lay W windows beside each clean text of `text` padded tokens; window w starts at token `anchors_BW[b, w]`.

    anchors: place of x_1, from 1 (there is always a token before it). lengths: real tokens of each text; places
    from there on are padding, never a target, and never looked at since the prefix is causal.
    """
    target_BWG, valid_BWG = _targets(anchors_BW, lengths_B, window)
    B, W = anchors_BW.shape
    device, span = anchors_BW.device, window - 1
    clean_T = torch.arange(text, device=device)
    places_BWS = anchors_BW[:, :, None] + torch.arange(span, device=device)
    positions_BR = torch.cat([clean_T.expand(B, text), places_BWS.flatten(1)], 1)

    # Column limits: a row sees clean columns below `before`; window rows also see the rows of their own window.
    before_BR = torch.cat([(clean_T + 1).expand(B, text), anchors_BW[:, :, None].expand(B, W, span).flatten(1)], 1)
    owner_R = torch.cat(
        [torch.full((text,), -1, device=device), torch.arange(W, device=device).repeat_interleave(span)]
    )
    sees_clean_BRT = clean_T < before_BR[:, :, None]
    sees_window_RS = (owner_R[:, None] == owner_R[None, text:]) & (owner_R[:, None] >= 0)
    sees_BRC = torch.cat([sees_clean_BRT, sees_window_RS.expand(B, -1, -1)], 2)

    first_row_W = text + torch.arange(W, device=device) * span
    source_BWG = torch.cat(
        [
            (anchors_BW - 1)[:, :, None],
            (first_row_W[:, None] + torch.arange(span, device=device)).expand(B, W, span),
        ],
        2,
    )
    return WindowBatch(positions_BR, sees_BRC, source_BWG, target_BWG, valid_BWG)


def context_windows(anchors_BW: Tensor, lengths_B: Tensor, *, cached: int, window: int) -> WindowBatch:
    """W windows behind a cached prefix: R = W G rows, C = cached + R columns.

    Each window brings the pending token, which stands before its anchor and is not cached yet, and its G - 1 window
    rows: what `decoding_mask(cached=anchor - 1, new=1, window_rows=G - 1)` lays out, for many windows at once. The
    `cached` columns hold places 0 .. cached - 1 of each text; a window sees those before its pending token.
    """
    target_BWG, valid_BWG = _targets(anchors_BW, lengths_B, window)
    B, W = anchors_BW.shape
    device, rows = anchors_BW.device, W * window
    offset_G = torch.arange(window, device=device)
    positions_BR = (anchors_BW[:, :, None] - 1 + offset_G).flatten(1)

    before_BR = (anchors_BW - 1).repeat_interleave(window, 1)
    sees_cached_BRT = torch.arange(cached, device=device) < before_BR[:, :, None]
    own_GG = (offset_G >= 1)[:, None] | (offset_G == 0)  # the pending token sees itself alone
    owner_R = torch.arange(rows, device=device) // window
    sees_rows_RR = (owner_R[:, None] == owner_R) & own_GG.repeat(W, W)
    sees_BRC = torch.cat([sees_cached_BRT, sees_rows_RR.expand(B, -1, -1)], 2)

    source_BWG = torch.arange(rows, device=device).view(1, W, window).expand(B, -1, -1)
    return WindowBatch(positions_BR, sees_BRC, source_BWG, target_BWG, valid_BWG)


def bidirectional_windows(anchors_B1: Tensor, lengths_B: Tensor, *, window: int) -> WindowBatch:
    """One window behind each text, cut where the window starts: R = P + G - 1 rows, P the longest prefix of the batch.

    Row r < P holds token r of its text. Rows from the anchor to P are padding: no row sees them, whatever they hold.
    """
    target_B1G, valid_B1G = _targets(anchors_B1, lengths_B, window)
    B, longest, span, device = len(anchors_B1), int(anchors_B1.max()), window - 1, anchors_B1.device
    prefix_P, offset_S = torch.arange(longest, device=device), torch.arange(span, device=device)
    positions_BR = torch.cat([prefix_P.expand(B, -1), anchors_B1 + offset_S], 1)
    seen_BR = torch.cat([prefix_P < anchors_B1, torch.ones(B, span, dtype=torch.bool, device=device)], 1)
    sees_BRR = seen_BR[:, None].expand(-1, longest + span, -1)
    source_BG = torch.cat([anchors_B1 - 1, (longest + offset_S).expand(B, -1)], 1)
    return WindowBatch(positions_BR, sees_BRR, source_BG[:, None], target_B1G, valid_B1G)


def _targets(anchors_BW: Tensor, lengths_B: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Places of x_1 .. x_G of every window, and whether they lie inside the text."""
    assert window >= 1
    assert int(anchors_BW.min()) >= 1, "a window needs at least one token before it"
    target_BWG = anchors_BW[:, :, None] + torch.arange(window, device=anchors_BW.device)
    return target_BWG, target_BWG < lengths_B[:, None, None]


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention bias of a boolean pattern: 0 where it may look, the smallest number of `dtype` elsewhere."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)
