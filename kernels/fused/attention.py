"""Triton twin of kernels/attention.py: the same blocks and order, split along the prefix.

One program works on a tile of rows against one block of places and leaves a partial result; a second kernel merges the
partial results of a row in the order of the blocks. Two kinds of tile share one compiled kernel, so that both have
products of the same shape and layout:

    block of prefix alone    consecutive rows of a key head: keys are read once for all rows of a tile
    block behind it          the H / J heads of one row, which share a text: keys are gathered by depth

Scores, weights and sums are float32; float32 products are not rounded to TF32; weights are rounded to v's number format
before they meet v, which the eager reference does not do. Sizes that change from pass to pass are never specialised
on: a compilation for a round prefix might lay a sum out in another order.

Letters: as in kernels/attention.py; S partial results (one for each block).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import Paths

LEAST_TILE = 16  # tl.dot takes no fewer rows


def tree_attention(q_HND: Tensor, k_JTD: Tensor, v_JTD: Tensor, paths: Paths, *, scaling: float) -> Tensor:
    """Attention [H, N, D], as kernels.attention.tree_attention; `paths` on q's device, its block a power of two."""
    (H, N, D), (J, T, _), prefix, block = q_HND.shape, k_JTD.shape, paths.prefix, paths.block
    if block < LEAST_TILE or block & (block - 1):
        raise ValueError(f"blocks of {block} places: the fused attention takes a power of two from {LEAST_TILE} on")
    assert (len(paths.seen_N), T, H % J) == (N, prefix + N, 0), (q_HND.shape, k_JTD.shape, prefix, len(paths.seen_N))
    assert k_JTD.stride(2) == v_JTD.stride(2) == 1, "keys and values must lie densely along their width"
    R, shared = H // J * N, prefix // block
    S = shared + paths.column_LP.shape[1] // block
    out_JRD = torch.zeros(J, R, D, dtype=q_HND.dtype, device=q_HND.device)
    if S == 0 or R == 0:
        return out_JRD.reshape(H, N, D)
    q_JRD = q_HND.reshape(J, R, D).contiguous()
    top_JSR, total_JSR = (torch.empty(J, S, R, device=q_HND.device) for _ in range(2))
    part_JSRD = torch.empty(J, S, R, D, device=q_HND.device)
    tile, wide = max(LEAST_TILE, triton.next_power_of_2(H // J)), max(LEAST_TILE, triton.next_power_of_2(D))
    strides = (k_JTD.stride(0), k_JTD.stride(1), v_JTD.stride(0), v_JTD.stride(1))
    tables = (paths.seen_N, paths.leaf_N, paths.column_LP.contiguous())
    sizes = (N, R, D, paths.column_LP.shape[1], shared, S)
    programs = shared * triton.cdiv(R, tile) + (S - shared) * N
    _partials[(programs, J)](  # pyright: ignore[reportIndexIssue]
        q_JRD, k_JTD, v_JTD, *tables, top_JSR, total_JSR, part_JSRD, *strides, *sizes, scaling,
        TILE=tile, BLOCK=block, WIDE=wide, WIDEN=triton.knobs.runtime.interpret,
    )  # fmt: skip
    _merge[(R, J)](top_JSR, total_JSR, part_JSRD, out_JRD, R, D, S, WIDE=wide)  # pyright: ignore[reportIndexIssue]
    return out_JRD.reshape(H, N, D)


@triton.jit(do_not_specialize=["N", "R", "P", "shared", "S"])
def _partials(
    q, k, v, seen, leaf, column, top, total, part,
    k_head, k_column, v_head, v_column, N, R, D, P, shared, S, scaling,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows against one block: m_b, l_b and o_b of kernels/attention.py."""
    item, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(R, TILE)
    own = item >= shared * tiles  # the block has places of the rows' own texts
    rest = tl.where(own, item - shared * tiles, 0)
    node, block = rest % N, tl.where(own, shared + rest // N, item // tiles)
    row = tl.where(own, node, item % tiles * TILE) + tl.where(own, N, 1) * tl.arange(0, TILE)
    width, place = tl.arange(0, WIDE), block * BLOCK + tl.arange(0, BLOCK)
    is_row, is_width = row < R, width < D

    behind = place - shared * BLOCK
    path = column + tl.load(leaf + node) * P + behind
    at = tl.where(behind >= 0, tl.load(path, mask=behind >= 0, other=0), place)
    q_tile = tl.load(
        q + (head * R + row[:, None]) * D + width[None, :], mask=is_row[:, None] & is_width[None, :], other=0.0
    )
    k_tile = tl.load(k + head * k_head + at[:, None] * k_column + width[None, :], mask=is_width[None, :], other=0.0)
    v_tile = tl.load(v + head * v_head + at[:, None] * v_column + width[None, :], mask=is_width[None, :], other=0.0)
    v_type = v_tile.dtype
    if WIDEN:  # the interpreter's dot would multiply the bits of bf16 as if they were integers
        q_tile, k_tile, v_tile = q_tile.to(tl.float32), k_tile.to(tl.float32), v_tile.to(tl.float32)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scaling
    limit = tl.load(seen + row % N, mask=is_row, other=0)
    scores = tl.where(place[None, :] < limit[:, None], scores, float("-inf"))
    m = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(m == float("-inf"), 0.0, m)[:, None])
    o = tl.dot(weights.to(v_type).to(v_tile.dtype), v_tile, input_precision="ieee")

    to = (head * S + block) * R + row
    tl.store(top + to, m, mask=is_row)
    tl.store(total + to, tl.sum(weights, 1), mask=is_row)
    tl.store(part + to[:, None] * D + width[None, :], o, mask=is_row[:, None] & is_width[None, :])


@triton.jit(do_not_specialize=["R", "S"])
def _merge(top, total, part, out, R, D, S, WIDE: tl.constexpr):
    """The partial results of one row of one key head, one block after the other."""
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    width = tl.arange(0, WIDE)
    first = head * S * R + row
    m = tl.load(top + first)
    for block in range(1, S):
        m = tl.maximum(m, tl.load(top + first + block * R))
    m = tl.where(m == float("-inf"), 0.0, m)
    weight, o = 0.0, tl.zeros([WIDE], dtype=tl.float32)
    for block in range(S):
        at = first + block * R
        share = tl.exp(tl.load(top + at) - m)
        weight += share * tl.load(total + at)
        o += share * tl.load(part + at * D + width, mask=width < D, other=0.0)
    o = o / tl.maximum(weight, 1.0)
    tl.store(out + (head * R + row) * D + width, o.to(out.dtype.element_ty), mask=width < D)
