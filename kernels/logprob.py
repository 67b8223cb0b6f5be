"""log q(x) of one word a row, without ever holding the scores of all rows and words.

    log q(x_r) = s_{r x_r} - lse_r,    s_{rv} = hidden_r . head_v,    lse_r = log sum_v exp s_{rv}

With g_r the gradient that arrives at log q(x_r), that of the scores is

    slope_{rv} = g_r (1[v = x_r] - exp(s_{rv} - lse_r)),    d hidden = slope head,    d head = slope^T hidden

so one number a row, lse_r, is all that forward keeps for backward, which forms the scores again (as in arXiv
2411.09009). Both go over chunks of the words, not of the rows: the head is the larger of the two and is read once a
product, the rows of its gradient are finished in their own chunk, and what is summed over chunks is R x D numbers;
chunks of rows would sum V x D of them.

Products are of numbers in the inputs' dtype, with sums in float32 (float64 for float64); the slopes are rounded to the
inputs' dtype before they enter a product, as in an ordinary backward pass. Everything else is in float32, and each
gradient is rounded once, at its end. Extra memory: about two tables of R x chunk and three of R x D, in float32.

kernels/fused/logprob.py is the same in Triton, for CUDA.

Shapes: R rows, V words of the (draft) vocabulary, D width, C words of a chunk, N chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def target_logprob(hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, *, chunk: int) -> Tensor:
    """log q(targets_R) [R] under softmax(hidden head^T), float32 (float64 for float64 inputs); differentiable once.

    targets: rows of the head, int64; -1 is a word outside the draft vocabulary (t2d), which has -inf and gives no
    gradient, and nothing in its row of hidden, NaN included, reaches anything. chunk: words scored at a time. Raises
    ValueError on a target the head has no row for, on a chunk below 1, and on hidden and head of two dtypes.
    """
    hidden_RD = prepared(hidden_RD, head_VD, targets_R, chunk=chunk)
    return _TargetLogprob.apply(hidden_RD, head_VD, targets_R, chunk)  # pyright: ignore[reportReturnType]


class _TargetLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, chunk: int) -> Tensor:
        parts, found_R = list[Tensor](), hidden_RD.new_zeros(len(hidden_RD), dtype=wide(hidden_RD))
        for start in range(0, len(head_VD), chunk):
            part_R, score_R, inside_R = _partial(hidden_RD, head_VD[start : start + chunk], targets_R - start)
            parts.append(part_R)
            found_R = torch.where(inside_R, score_R, found_R)
        # One sum over all parts at the end: a running one would round once a chunk.
        lse_R = torch.stack(parts, 1).logsumexp(1)
        ctx.save_for_backward(hidden_RD, head_VD, targets_R, lse_R)
        ctx.chunk = chunk
        return torch.where(targets_R >= 0, found_R - lse_R, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_RD, head_VD, targets_R, lse_R = ctx.saved_tensors
        grad_R = torch.where(targets_R >= 0, grad_R, 0.0)

        def slope_of(start: int, head_CD: Tensor) -> Tensor:
            return _slope(hidden_RD, head_CD, targets_R - start, lse_R, grad_R)

        return *gradients(slope_of, hidden_RD, head_VD, chunk=ctx.chunk, wanted=ctx.needs_input_grad), None, None


def prepared(hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, *, chunk: int) -> Tensor:
    """Checks what a caller can get wrong; hidden with the rows of no target emptied, not multiplied away later."""
    assert hidden_RD.dim() == head_VD.dim() == 2, (hidden_RD.shape, head_VD.shape)
    assert hidden_RD.shape[1] == head_VD.shape[1], (hidden_RD.shape, head_VD.shape)
    assert targets_R.shape == hidden_RD.shape[:1], (targets_R.shape, hidden_RD.shape)
    assert len(head_VD) > 0
    if chunk < 1:
        raise ValueError(f"target_logprob: chunk is {chunk}; score at least one word at a time")
    if hidden_RD.dtype != head_VD.dtype:
        raise ValueError(f"target_logprob: hidden is {hidden_RD.dtype} and head {head_VD.dtype}; cast one of them")
    if len(targets_R):
        low, high = torch.stack(targets_R.aminmax()).tolist()  # one wait for the device, not two
        if low < -1 or high >= len(head_VD):
            raise ValueError(
                f"target_logprob: targets from {low} to {high} for a head of {len(head_VD)} rows; "
                "map them with t2d, and write -1 where there is no such word"
            )
    return hidden_RD.masked_fill((targets_R < 0)[:, None], 0.0)


def gradients(
    slope_of: Callable[[int, Tensor], Tensor],
    hidden_RD: Tensor,
    head_VD: Tensor,
    *,
    chunk: int,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Those of hidden and head, where `wanted`, from slope_of(first word, head's rows of the chunk) [R, C]."""
    hidden_sum_RD = torch.zeros_like(hidden_RD, dtype=wide(hidden_RD)) if wanted[0] else None
    head_grad_VD = torch.empty_like(head_VD) if wanted[1] else None
    for start in range(0, len(head_VD), chunk):
        head_CD = head_VD[start : start + chunk]
        slope_RC = slope_of(start, head_CD)
        if hidden_sum_RD is not None:
            hidden_sum_RD += product(slope_RC, head_CD)
        if head_grad_VD is not None:
            head_grad_VD[start : start + chunk] = product(slope_RC.T, hidden_RD)
        del slope_RC  # before the next one is formed
    return None if hidden_sum_RD is None else hidden_sum_RD.to(hidden_RD.dtype), head_grad_VD


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of numbers in their own dtype, with sums and result in float32 at least."""
    if a.dtype == wide(a):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide(a))
    return a.to(wide(a)) @ b.to(wide(b))  # exact: two bf16 numbers have their product in float32


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _partial(hidden_RD: Tensor, head_CD: Tensor, places_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: its logsumexp [R], the score of the target [R], and whether the target is of the chunk [R]."""
    scores_RC = product(hidden_RD, head_CD.T)
    inside_R = (places_R >= 0) & (places_R < len(head_CD))
    picked_R1 = scores_RC.gather(1, places_R.clamp(0, len(head_CD) - 1)[:, None])
    return scores_RC.logsumexp(1), picked_R1[:, 0], inside_R


def _slope(hidden_RD: Tensor, head_CD: Tensor, places_R: Tensor, lse_R: Tensor, grad_R: Tensor) -> Tensor:
    """Gradient of the scores of one chunk [R, C], in the inputs' dtype."""
    slope_RC = product(hidden_RD, head_CD.T).sub_(lse_R[:, None]).exp_().mul_(-grad_R[:, None])
    inside_R = (places_R >= 0) & (places_R < len(head_CD))
    places_R1 = places_R.clamp(0, len(head_CD) - 1)[:, None]
    slope_RC.scatter_add_(1, places_R1, torch.where(inside_R, grad_R, 0.0)[:, None])
    return slope_RC.to(hidden_RD.dtype)
