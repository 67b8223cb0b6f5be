"""What a drafter would be accepted for, on held-out prompts, without running the verifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import tree
from stages.common import parallel, windows
from stages.common.contexts import Contexts
from stages.common.drafters import Drafter
from stages.common.params import Count, Share
from stages.common.windows import Example

TRIE_DRAFTS = 16  # K of the column trie16
Row = dict[str, float | int | str | None]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """`<profile>.validation`: what adapt and distill hold out, and what they measure on it."""

    share: Share  # of the texts
    windows: Count  # of each held-out text
    tree_nodes: Count  # N of the tree whose accepted length the curve reports


@torch.no_grad()
def validate(
    drafter: Drafter,
    held_out: Sequence[Example],
    contexts: Contexts | None,
    v: Validation,
    *,
    window: int,
    sequences: int,
    seed: int,
    compute: Callable[[Callable[[], Any]], Any] | None = None,
) -> Row:
    """Teacher-forced acceptance on fully masked windows of held-out texts, `sequences` of them in a pass.

    loss: mean -log q of what can be drafted; empty if nothing can. streak: accepted length of the arg-max chain.
    sampled_streak: sum C_m, of one sampled draft under Match. trie16: of the trie of 16. tree: of the best-first tree
    of `v.tree_nodes`. accept_j: share of windows whose arg-max chain is right to depth j. Windows whose text ends
    within the window count what was there to accept. Processes share the texts; compute: how passes of all of them run.
    """
    drafter.eval()
    hits, reach, losses, in_tree = [], [], [], list[int]()
    for start in range(0, len(held_out), sequences):
        chosen = held_out[start : start + sequences]
        shared = len(chosen) >= parallel.size()  # else everybody computes them, and they count once
        measure = partial(
            _measure,
            drafter,
            partial(
                windows.collate,
                chosen,
                drafter,
                contexts,
                windows=v.windows,
                window=window,
                full_mask_share=1.0,
                seed=seed,
                step=0,
                part=parallel.part_of(len(chosen)) if shared else slice(None),
            ),
        )
        logq_WGV, targets_WG, usable_WG = measure() if compute is None else compute(measure)
        if not shared and not parallel.first():
            continue
        found_WG = logq_WGV.gather(2, targets_WG.clamp(min=0)[..., None])[..., 0]
        alive_WG = usable_WG.long().cumprod(-1).bool()
        hits.append((usable_WG & (logq_WGV.argmax(-1) == targets_WG)).long().cumprod(-1).float().cpu())
        reach.append(torch.where(alive_WG, torch.where(alive_WG, found_WG, 0.0).cumsum(-1).exp(), 0.0).cpu())
        losses.append(-found_WG[usable_WG].cpu())
        wanted = targets_WG.masked_fill(~usable_WG, -1).tolist()
        in_tree += [tree_length(logq_GV, path, v.tree_nodes) for logq_GV, path in zip(logq_WGV, wanted, strict=True)]
    everyone: list[tuple[list[Tensor], ...]] = parallel.gathered((hits, reach, losses))
    hits_WG, reach_WG, losses_X = (torch.cat([x for own in everyone for x in own[i]]) for i in range(3))
    in_tree = [depth for own in parallel.gathered(in_tree) for depth in own]
    trie_WG = -torch.expm1(TRIE_DRAFTS * torch.log1p(-reach_WG.clamp(max=1 - 1e-6)))
    row: Row = {
        "loss": float(losses_X.mean()) if len(losses_X) else None,
        "streak": float(hits_WG.sum(-1).mean()),
        "sampled_streak": float(reach_WG.sum(-1).mean()),
        "trie16": float(trie_WG.sum(-1).mean()),
        "tree": sum(in_tree) / len(in_tree),
    }
    return row | {f"accept_{j + 1}": float(value) for j, value in enumerate(hits_WG.mean(0))}


def _measure(drafter: Drafter, collate: Callable[[], windows.Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """log q [BW, G, V_d] of a batch, its targets and which of them can be drafted [BW, G]."""
    batch = collate()
    targets_WG = batch.targets_BWG.flatten(0, 1).to(drafter.device)
    usable_WG = batch.layout.valid_BWG.flatten(0, 1).to(drafter.device) & (targets_WG >= 0)
    logq_WGV = torch.log_softmax(drafter.logits(windows.hidden(drafter, batch)), -1).flatten(0, 1)
    return logq_WGV, targets_WG, usable_WG


def tree_length(logq_GV: Tensor, target_G: Sequence[int], nodes: int) -> int:
    """Depth to which the best-first tree of a whole window holds a text; -1 in the text is a word it cannot hold."""
    child_of = tree.children(tree.best_first(logq_GV, nodes=nodes, width=nodes))
    row, length = 0, 0
    while length < len(target_G) and (node := child_of[row].get(target_G[length])) is not None:
        row, length = node + 1, length + 1
    return length
