"""Optimizers and their schedule.

Muon (Jordan et al. 2024; torch.optim.Muon) orthogonalises the momentum of every weight matrix; vectors, the head and
the mask embedding take AdamW.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative, Share

BETAS = (0.9, 0.95)  # of AdamW
MOMENTUM = 0.95  # of Muon


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The part of a training section that says how weights move."""

    steps: Count
    optimizer: Literal["adamw", "muon"]
    lr: NonNegative  # of the weight matrices
    lr_other: NonNegative  # of vectors, head and mask embedding
    weight_decay: NonNegative  # of the weight matrices
    warmup: Share  # of the steps, linear
    final_lr: Share  # of the rate, reached by cosine at the last step


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by a Newton-Schulz iteration in float32; matrices of one shape are done together.

    torch's own computes in bfloat16, which only pays where the processor has matrix units for it. The polynomials are
    the first three of Polar Express (arXiv 2505.16932): with them three rounds do what takes five of one polynomial,
    and the optimizer is a large part of a short step. Of matrices that are spread over processes (FSDP2) every process
    makes the whole orthogonal update and takes its own part.
    """

    ROUNDS = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    )

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
                updates = [_whole(self._momentum(p, group["momentum"])) for p in same]
                stacked = self.orthogonal(torch.stack(updates))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(same, stacked, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(_spread_as(p, update), alpha=-rate)

    def _momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        assert p.grad is not None
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)

    @classmethod
    def orthogonal(cls, x: Tensor) -> Tensor:
        """Singular values of each matrix of a stack [matrices, rows, columns] drawn towards 1.

        From a five-hundredth of the matrix's norm upwards they end between 0.18 and 1.87.
        """
        wide = x if x.shape[-2] <= x.shape[-1] else x.mT
        # A little below 1, so that rounding never takes a value out of the polynomials' range.
        y = wide / (1.01 * wide.norm(dim=(-2, -1), keepdim=True)).clamp_min(1e-7)
        for a, b, c in cls.ROUNDS:
            gram = y @ y.mT
            y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        return y if wide is x else y.mT


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _spread_as(p: Tensor, x: Tensor) -> Tensor:
    """The same numbers, which every process has, spread as those of `p`."""
    if not isinstance(p, DTensor):
        return x
    return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)


def clip(params: Sequence[nn.Parameter], largest: float) -> float:
    """Scale the gradients down to a norm of `largest`, over all processes; what it was. RuntimeError on NaN."""
    return float(_whole(nn.utils.clip_grad_norm_(params, largest, error_if_nonfinite=True)))


def rate(step: int, t: Rates) -> float:
    """The schedule's factor at a step counted from 0: linear warm-up, then cosine down to `final_lr`."""
    warm = round(t.warmup * t.steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, t.steps - 1 - warm)
    return t.final_lr + (1 - t.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def optimizers(drafter: Drafter, t: Rates) -> list[torch.optim.Optimizer]:
    """One for the weight matrices at `lr`, one for all else at `lr_other`: head and embedding are tables of words."""
    words = {id(drafter.lm_head.weight)} | {id(m.weight) for m in drafter.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in drafter.trained() if p.ndim == 2 and id(p) not in words]
    others = [p for p in drafter.trained() if p.ndim != 2 or id(p) in words]
    first: torch.optim.Optimizer
    if t.optimizer == "muon":
        first = Muon(matrices, lr=t.lr, momentum=MOMENTUM, weight_decay=t.weight_decay)
    else:
        first = torch.optim.AdamW(matrices, lr=t.lr, betas=BETAS, weight_decay=t.weight_decay, foreach=True)
    if not others:
        return [first]
    return [first, torch.optim.AdamW(others, lr=t.lr_other, betas=BETAS, weight_decay=0.0, foreach=True)]


def set_rates(optims: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Every group's peak rate times `factor`."""
    for optim in optims:
        for group in optim.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor
