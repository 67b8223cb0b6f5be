"""Triton twin of kernels/logprob.py, which has the equations: same signature, same roundings, for CUDA.

Forward: a program for every block of rows and every `chunk` of words. It goes over tiles of its words with a running
maximum and sum (online softmax, arXiv 1805.02867), picks the target's score out of the tile that holds it, and writes
one logsumexp a row: R x N numbers, joined at the end. The scores stay on the chip.

Backward: a kernel forms the scores of a chunk again and writes their slopes, R x chunk in the inputs' dtype; the two
products that follow are plain matrix products. To fuse these too, programs would have to add to one another's gradients
in memory, or form the scores again for every slice of the width.

A word's place times the width may pass 2^31, so places are int64. Tile sizes were chosen on paper, not tuned: a pair of
tiles is the same number of bytes in bf16 and float32, so that three stages fit the shared memory of an A100.

Shapes: R rows, V words, D width, C words of a tile, N chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.logprob import gradients, prepared

ROWS, WORDS = 128, 128  # of a tile
BYTES = 128  # of a tile's width
WARPS = 8


def target_logprob(hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, *, chunk: int) -> Tensor:
    """As kernels.logprob.target_logprob, for bf16 and float32. chunk: words of one program, best a multiple of 128."""
    hidden_RD = prepared(hidden_RD, head_VD, targets_R, chunk=chunk).contiguous()
    if hidden_RD.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"fused target_logprob: {hidden_RD.dtype} inputs; use kernels.logprob, or bf16 or float32")
    return _TargetLogprob.apply(hidden_RD, head_VD, targets_R.contiguous(), chunk)  # pyright: ignore[reportReturnType]


class _TargetLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, chunk: int) -> Tensor:
        chunks = triton.cdiv(len(head_VD), chunk)
        part_RN = hidden_RD.new_empty(len(hidden_RD), chunks, dtype=torch.float32)
        found_R = part_RN.new_zeros(len(hidden_RD))
        if len(hidden_RD):
            grid = (triton.cdiv(len(hidden_RD), ROWS), chunks)
            _partial_kernel[grid](  # pyright: ignore[reportIndexIssue]
                *(hidden_RD, head_VD, targets_R, part_RN, found_R),
                *(*hidden_RD.shape, len(head_VD), *head_VD.stride(), chunk, chunks),
                **_tiles(hidden_RD),
            )
        lse_R = part_RN.logsumexp(1)
        ctx.save_for_backward(hidden_RD, head_VD, targets_R, lse_R)
        ctx.chunk = chunk
        return torch.where(targets_R >= 0, found_R - lse_R, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_RD, head_VD, targets_R, lse_R = ctx.saved_tensors
        grad_R = torch.where(targets_R >= 0, grad_R, 0.0).contiguous()

        def slope_of(start: int, head_CD: Tensor) -> Tensor:
            slope_RC = hidden_RD.new_empty(len(hidden_RD), len(head_CD))
            if len(hidden_RD):
                grid = (triton.cdiv(len(hidden_RD), ROWS), triton.cdiv(len(head_CD), WORDS))
                _slope_kernel[grid](  # pyright: ignore[reportIndexIssue]
                    *(hidden_RD, head_CD, targets_R, lse_R, grad_R, slope_RC),
                    *(*hidden_RD.shape, len(head_CD), *head_CD.stride(), start),
                    **_tiles(hidden_RD),
                )
            return slope_RC

        return *gradients(slope_of, hidden_RD, head_VD, chunk=ctx.chunk, wanted=ctx.needs_input_grad), None, None


def _tiles(hidden_RD: Tensor) -> dict[str, Any]:
    interpreted = triton.knobs.runtime.interpret  # its dot would multiply the bits of bf16 as if they were integers
    sizes = {"R": ROWS, "C": WORDS, "D": BYTES // hidden_RD.element_size()}
    return {**sizes, "WIDEN": interpreted, "num_warps": WARPS}


@triton.jit
def _partial_kernel(
    hidden,
    head,
    targets,
    part,
    found,
    rows,
    width,
    words,
    head_row,
    head_column,
    chunk,
    chunks,
    R: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """part[r, n] = logsumexp of row r over chunk n; found[r] = the score of row r's target."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    target_R = tl.load(targets + row_R, mask=row_R < rows, other=-1)
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, words)
    top_R = tl.full((R,), float("-inf"), tl.float32)
    sum_R = tl.zeros((R,), tl.float32)
    picked_R = tl.zeros((R,), tl.float32)
    for start in range(first, end, C):
        word_C = start + tl.arange(0, C)
        score_RC = _scores(hidden, head, row_R, word_C, rows, width, end, head_row, head_column, R, C, D, WIDEN)
        score_RC = tl.where((word_C < end)[None, :], score_RC, float("-inf"))
        picked_R += tl.sum(tl.where(word_C[None, :] == target_R[:, None], score_RC, 0.0), 1)
        higher_R = tl.maximum(top_R, tl.max(score_RC, 1))
        sum_R = sum_R * tl.exp(top_R - higher_R) + tl.sum(tl.exp(score_RC - higher_R[:, None]), 1)
        top_R = higher_R
    tl.store(part + row_R.to(tl.int64) * chunks + tl.program_id(1), top_R + tl.log(sum_R), mask=row_R < rows)
    tl.store(found + row_R, picked_R, mask=(target_R >= first) & (target_R < end))


@triton.jit
def _slope_kernel(
    hidden,
    head,
    targets,
    lse,
    grad,
    slope,
    rows,
    width,
    words,
    head_row,
    head_column,
    first,
    R: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """slope[r, c] = g_r (1[first + c = x_r] - q_r(first + c)), for the `words` of a chunk that starts at `first`."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    word_C = tl.program_id(1) * C + tl.arange(0, C)
    target_R = tl.load(targets + row_R, mask=row_R < rows, other=-1)
    lse_R = tl.load(lse + row_R, mask=row_R < rows, other=0.0)
    grad_R = tl.load(grad + row_R, mask=row_R < rows, other=0.0)
    score_RC = _scores(hidden, head, row_R, word_C, rows, width, words, head_row, head_column, R, C, D, WIDEN)
    hit_RC = tl.where((first + word_C)[None, :] == target_R[:, None], 1.0, 0.0)
    slope_RC = grad_R[:, None] * (hit_RC - tl.exp(score_RC - lse_R[:, None]))
    place_RC = row_R.to(tl.int64)[:, None] * words + word_C[None, :]
    tl.store(slope + place_RC, slope_RC, mask=(row_R < rows)[:, None] & (word_C < words)[None, :])


@triton.jit
def _scores(
    hidden,
    head,
    row_R,
    word_C,
    rows,
    width,
    end,
    head_row,
    head_column,
    R: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """hidden[rows] . head[words] [R, C] in float32; 0 past the last row and from word `end` on."""
    score_RC = tl.zeros((R, C), tl.float32)
    row_R1 = row_R.to(tl.int64)[:, None]
    word_1C = word_C.to(tl.int64)[None, :]
    for start in range(0, width, D):
        place_D = start + tl.arange(0, D)
        in_RD = (row_R < rows)[:, None] & (place_D < width)[None, :]
        in_DC = (place_D < width)[:, None] & (word_C < end)[None, :]
        hidden_RD = tl.load(hidden + row_R1 * width + place_D[None, :], mask=in_RD, other=0.0)
        head_DC = tl.load(head + word_1C * head_row + place_D[:, None] * head_column, mask=in_DC, other=0.0)
        if WIDEN:
            hidden_RD = hidden_RD.to(tl.float32)
            head_DC = head_DC.to(tl.float32)
        score_RC = tl.dot(hidden_RD, head_DC, score_RC, input_precision="ieee")
    return score_RC
