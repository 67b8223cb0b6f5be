"""The training loop of adapt and distill: schedule, clipping, accumulation, validation, checkpoints, exact resume.

    loss(step) -> gradients over `accumulation` micro-batches -> clip -> AdamW, or Muon for the matrices

Optimizer: Muon (Jordan et al. 2024; torch.optim.Muon) orthogonalises the momentum of every weight matrix; vectors,
the head and the mask embedding take AdamW. Everything random is keyed by (seed, step), so the saved state is weights,
optimizer and curve.
"""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

import kernels.objectives
import kernels.window
from kernels import tree
from stages.common import drafters, models, windows
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative, Share
from stages.common.windows import Example

CODE = [Path(module.__file__ or "") for module in (kernels.objectives, kernels.window, models, drafters, windows)] + [
    Path(__file__)
]  # what a resumed run must find unchanged

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # log_q_WG, valid_WG, weights_WG -> loss
Row = dict[str, float | int | str | None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training section of params.yaml."""

    steps: Count
    sequences: Count  # texts of one micro-batch
    accumulation: Count  # micro-batches of one optimizer step
    windows: Count  # windows of each text
    window: Count  # G
    max_tokens: Count  # prompt and output together; longer texts are cut
    optimizer: Literal["adamw", "muon"]
    lr: NonNegative  # of the weight matrices
    lr_other: NonNegative  # of vectors, head and mask embedding
    weight_decay: NonNegative
    warmup: Share  # of the steps, linear
    final_lr: Share  # of the rate, reached by cosine at the last step
    clip: NonNegative  # largest gradient norm
    full_mask_share: Share
    validation: Share  # of the prompts
    validation_windows: Count  # of each held-out text
    tree_nodes: Count  # N of the tree whose accepted length the curve reports
    evaluate_every: Count
    checkpoint_every: Count


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz in float32; matrices of one shape are done together.

    torch's own computes in bfloat16, which only pays where the processor has matrix units for it.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)
    ITERATIONS = 5

    def __init__(self, params: Sequence[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, same in shapes.items():
                updates = [self._momentum(p, group["momentum"]) for p in same]
                stacked = self.orthogonal(torch.stack(updates))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(same, stacked, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        assert p.grad is not None
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)

    @classmethod
    def orthogonal(cls, x: Tensor) -> Tensor:
        """Singular values of each matrix [.., rows, columns] drawn towards 1."""
        a, b, c = cls.COEFFICIENTS
        wide = x if x.shape[-2] <= x.shape[-1] else x.mT
        y = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
        for _ in range(cls.ITERATIONS):
            gram = y @ y.mT
            y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        return y if wide is x else y.mT


def rate(step: int, t: Training) -> float:
    """The schedule's factor at a step counted from 0: linear warm-up, then cosine down to `final_lr`."""
    warm = round(t.warmup * t.steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, t.steps - 1 - warm)
    return t.final_lr + (1 - t.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def optimizers(drafter: Drafter, t: Training) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for p in drafter.trained():
        head = p is drafter.lm_head.weight
        (matrices if p.ndim == 2 and not head and t.optimizer == "muon" else others).append(p)
    lr_others = t.lr_other
    if t.optimizer == "adamw":
        body = [p for p in others if p.ndim == 2 and p is not drafter.lm_head.weight]
        rest = [p for p in others if not any(p is q for q in body)]
        groups = [{"params": body, "lr": t.lr}, {"params": rest, "lr": lr_others}]
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=t.weight_decay, foreach=True)]
    return [
        Muon(matrices, lr=t.lr, momentum=0.95, weight_decay=t.weight_decay),
        torch.optim.AdamW(others, lr=lr_others, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]


def train(
    drafter: Drafter,
    examples: tuple[Sequence[Example], Sequence[Example]],
    objective: Objective,
    t: Training,
    *,
    seed: int,
    scratch: Path,
    keep: Callable[[int], None] | None = None,
    title: str = "train",
) -> list[Row]:
    """Train in place; the curve's rows. Continues from `scratch/state.pt` where that is there.

    keep(step): called after every evaluation with the drafter as it stands, for checkpoints that stay.
    """
    training, held_out = examples
    optims = optimizers(drafter, t)
    rows: list[Row] = []
    done = _resume(scratch, drafter, optims, rows)
    batches = windows.order(training, sequences=t.sequences * t.accumulation, seed=seed)
    for _ in range(done):
        next(batches)
    if done == 0:
        rows.append({"step": 0, "split": "valid", **validate(drafter, held_out, t, seed=seed)})
    bar = tqdm(range(done, t.steps), initial=done, total=t.steps, desc=title, unit="step", mininterval=5)
    for step in bar:
        factor = rate(step, t)
        for optim in optims:
            for group in optim.param_groups:
                group.setdefault("peak", group["lr"])
                group["lr"] = group["peak"] * factor
        loss, norm, tokens = _step(drafter, [training[i] for i in next(batches)], objective, t, optims, seed, step)
        row: Row = {"step": step + 1, "split": "train", "lr": factor * t.lr, "loss": loss, "grad_norm": norm}
        rows.append(row | {"tokens": tokens, "windows": t.sequences * t.accumulation * t.windows})
        bar.set_postfix(loss=f"{loss:.3f}")
        last = step + 1 == t.steps
        if last or (step + 1) % t.evaluate_every == 0:
            rows.append({"step": step + 1, "split": "valid", **validate(drafter, held_out, t, seed=seed)})
            if keep is not None:
                keep(step + 1)
        if not last and (step + 1) % t.checkpoint_every == 0:
            _save(scratch, step + 1, drafter, optims, rows)
    return rows


def _step(
    drafter: Drafter,
    chosen: Sequence[Example],
    objective: Objective,
    t: Training,
    optims: Sequence[torch.optim.Optimizer],
    seed: int,
    step: int,
) -> tuple[float, float, int]:
    """(loss, gradient norm before clipping, clean tokens read) of one optimizer step."""
    drafter.train()
    for optim in optims:
        optim.zero_grad(set_to_none=True)
    total, tokens = 0.0, 0
    for micro in range(t.accumulation):
        part = chosen[micro * t.sequences : (micro + 1) * t.sequences]
        batch = windows.collate(
            part,
            drafter,
            windows=t.windows,
            window=t.window,
            full_mask_share=t.full_mask_share,
            seed=seed,
            step=1 + step * t.accumulation + micro,
        )
        log_q_WG, _ = windows.log_q(drafter, batch)
        loss = objective(log_q_WG, batch.layout.valid_BWG.flatten(0, 1), batch.weights_BWG.flatten(0, 1))
        (loss / t.accumulation).backward()
        total += float(loss.detach()) / t.accumulation
        tokens += sum(len(example.ids) for example in part)
    norm = float(nn.utils.clip_grad_norm_(drafter.trained(), t.clip, error_if_nonfinite=True))
    for optim in optims:
        optim.step()
    return total, norm, tokens


@torch.no_grad()
def validate(drafter: Drafter, held_out: Sequence[Example], t: Training, *, seed: int) -> Row:
    """Teacher-forced acceptance on fully masked windows of held-out texts.

    streak: accepted length of the arg-max chain. sampled_streak: sum C_m, of one sampled draft under Match. trie16:
    of the trie of 16. tree: of the best-first tree of `tree_nodes`. accept_j: share of windows whose arg-max chain is
    right to depth j. Windows whose text ends within the window count what was there to accept.
    """
    drafter.eval()
    hits, sampled, trie, in_tree, losses = [], [], [], [], []
    for start in range(0, len(held_out), t.sequences):
        batch = windows.collate(
            held_out[start : start + t.sequences],
            drafter,
            windows=t.validation_windows,
            window=t.window,
            full_mask_share=1.0,
            seed=seed,
            step=0,
        )
        log_q_WG, scores_XV = windows.log_q(drafter, batch)
        usable_WG = (batch.layout.valid_BWG & (batch.targets_BWG >= 0)).flatten(0, 1)
        right_WG = torch.zeros_like(usable_WG).masked_scatter(
            usable_WG, scores_XV.argmax(-1) == batch.targets_BWG.flatten(0, 1)[usable_WG]
        )
        hits.append(right_WG.long().cumprod(-1))
        reach_WG = torch.where(usable_WG.long().cumprod(-1).bool(), log_q_WG.cumsum(-1).exp(), 0.0)
        sampled.append(reach_WG.sum(-1))
        trie.append((-torch.expm1(16 * torch.log1p(-reach_WG.clamp(max=1 - 1e-6)))).sum(-1))
        losses.append(-log_q_WG[usable_WG])
        in_tree += _tree_lengths(scores_XV, usable_WG, batch.targets_BWG.flatten(0, 1), t.tree_nodes)
    hits_WG = torch.cat(hits).float()
    row: Row = {
        "loss": float(torch.cat(losses).mean()),
        "streak": float(hits_WG.sum(-1).mean()),
        "sampled_streak": float(torch.cat(sampled).mean()),
        "trie16": float(torch.cat(trie).mean()),
        "tree": sum(in_tree) / len(in_tree),
    }
    return row | {f"accept_{j + 1}": float(value) for j, value in enumerate(hits_WG.mean(0))}


def _tree_lengths(scores_XV: Tensor, usable_WG: Tensor, targets_WG: Tensor, nodes: int) -> list[int]:
    """Depth to which each window's best-first tree holds the text, up to its first unusable target."""
    logq_XV, lengths, used = torch.log_softmax(scores_XV, -1), [], 0
    for usable_G, target_G in zip(usable_WG.tolist(), targets_WG.tolist(), strict=True):
        depth = usable_G.index(False) if False in usable_G else len(usable_G)
        child_of = tree.children(tree.best_first(logq_XV[used : used + depth], nodes=nodes, width=nodes))
        used += sum(usable_G)
        row, length = 0, 0
        while length < depth and (node := child_of[row].get(target_G[length])) is not None:
            row, length = node + 1, length + 1
        lengths.append(length)
    return lengths


def _save(
    scratch: Path, step: int, drafter: Drafter, optims: Sequence[torch.optim.Optimizer], rows: Sequence[Row]
) -> None:
    state = {
        "step": step,
        "weights": [p.detach() for p in drafter.trained()],
        "optims": [optim.state_dict() for optim in optims],
        "rows": list(rows),
    }
    partial = scratch / ".state.pt.partial"
    torch.save(state, partial)
    partial.replace(scratch / "state.pt")


def _resume(scratch: Path, drafter: Drafter, optims: Sequence[torch.optim.Optimizer], rows: list[Row]) -> int:
    """Steps already done; weights, optimizers and curve as they were then."""
    path = scratch / "state.pt"
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    with torch.no_grad():
        for p, saved in zip(drafter.trained(), state["weights"], strict=True):
            p.copy_(saved)
    for optim, saved in zip(optims, state["optims"], strict=True):
        optim.load_state_dict(saved)
    rows[:] = state["rows"]
    return state["step"]


def curve_csv(rows: Sequence[Row]) -> str:
    """The curve as CSV, one column for every name that occurs; empty where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()
