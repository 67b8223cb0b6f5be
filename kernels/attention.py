"""Attention of a tree's rows, with bits that do not depend on the rest of the pass.

Row n of a pass stands at place prefix + depth(n) of a text of its own: the cached prefix, then its ancestors by depth,
itself last. Places fall into blocks of fixed size, counted from the start of the text. For each block b

    m_b = max_t s_t,    l_b = sum_t exp(s_t - m_b),    o_b = sum_t exp(s_t - m_b) v_t,    s_t = scaling q . k_t

over the block's places that the row sees, and the partial results are merged in the order of the blocks
(log-sum-exp, as in FlashAttention's split over keys, arXiv 2205.14135 section 3.1 and 2307.08691 section 3.3):

    out = sum_b exp(m_b - m) o_b / sum_b exp(m_b - m) l_b,    m = max_b m_b

Every product has the same shape whatever the tree: all rows of the pass by one block. A block that holds only prefix is
computed once for all rows. Behind it rows differ in their texts, so the keys of each root-to-leaf path are gathered by
depth, the block is computed once for each leaf, and a row takes the result of a leaf it leads to. What a row does not
see has weight exactly 0. So a row has the bits that it has in a chain, or alone behind a longer prefix, in any pass of
as many rows; a dense mask over the tree's own order of rows cannot give that.

What is left to the library is that a product gives a row the same bits wherever it stands and whatever stands beside
it. Measured (torch 2.13, MKL and oneDNN, AVX2 without bf16 units): so do mm, bmm and einsum at every row count from 1
to 48, and linear layers, norms, SiLU and rotary, with NaN beside the row (OpenBLAS does not). Between row counts
float32 products of 1, 2 or 3 rows have other bits than those of 4 or more (rows are added here), and so have products
of under 400 multiplications; bf16, and float32 in packed linear layers (stages/common/models.py), have the same at all.

Letters: H query heads, J key heads, N rows of the pass (H / J heads of them packed as R), T columns (prefix, then the
pass), D width, W words, L leaves, P places from the first block that is not all prefix, b places of a block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 64
MOST_ROWS = 256
LEAST_ROWS = 4  # packed rows: MKL multiplies fewer by other code, to other bits


class Paths(NamedTuple):
    """Where every row of a pass looks: made once a pass, used by every layer."""

    seen_N: Tensor  # long: row n sees the places 0 .. seen_N[n] - 1 of its text
    leaf_N: Tensor  # long: a leaf whose path holds row n
    column_LP: Tensor  # long: the column that stands at each place of a leaf's text
    prefix: int
    block: int

    def to(self, device: torch.device | str) -> "Paths":
        tables = (self.seen_N, self.leaf_N, self.column_LP)
        seen_N, leaf_N, column_LP = (table.to(device) for table in tables)
        return Paths(seen_N, leaf_N, column_LP, self.prefix, self.block)


class Partial(NamedTuple):
    """What the rows have from one block."""

    top_JR1: Tensor  # m_b; -inf where a row sees nothing of the block
    total_JR1: Tensor  # l_b
    out_JRD: Tensor  # o_b


def path_words(parents: list[int], *, rows: int) -> Tensor:
    """Ancestor bits, int64 [rows, W], of a verifier pass over a tree: bit i of row n says that n sees row i.

    Row 0 is the pending token, row n + 1 is node n, rows behind them are padding and see no row, themselves included.
    """
    if not len(parents) < rows <= MOST_ROWS:
        raise ValueError(f"{len(parents)} nodes and the pending token do not fit in {rows} rows (at most {MOST_ROWS})")
    bits = [1]
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"parent {parent} of node {node} must come before it"
        bits.append(bits[parent + 1] | 1 << node + 1)
    bits += [0] * (rows - len(bits))
    words = [[_signed(row >> start) for start in range(0, rows, WORD)] for row in bits]
    return torch.tensor(words, dtype=torch.int64)


def pack(sees_NN: Tensor) -> Tensor:
    """Bool [N, N] as int64 words [N, W]: bit i % 64 of word i // 64 is column i."""
    N = sees_NN.shape[1]
    if N > MOST_ROWS:
        raise ValueError(f"a mask over {N} rows: up to {MOST_ROWS} are built; verify a smaller tree")
    words = max(1, -(-N // WORD))
    bits_NWX = F.pad(sees_NN, (0, words * WORD - N)).unflatten(1, (words, WORD)).long()
    return (bits_NWX << torch.arange(WORD, device=sees_NN.device)).sum(-1)  # bits are distinct: the sum is an or


def unpack(words_NW: Tensor) -> Tensor:
    """Bool [N, N] of the words that `pack` made."""
    bits_NWX = words_NW[..., None] >> torch.arange(WORD, device=words_NW.device) & 1
    return bits_NWX.flatten(1)[:, : len(words_NW)].bool()


def lay_out(words_NW: Tensor, *, prefix: int, block: int) -> Paths:
    """The texts of a pass's rows behind `prefix` cached columns, in blocks of `block` places.

    A row without bits is padding: it sees the prefix alone. Ancestors come before their descendants, so the bits of a
    row in rising order are its path by depth. Reads sizes back from the device: lay out where the words were made.
    """
    if block < 1 or prefix < 0:
        raise ValueError(f"attention in blocks of {block} places behind {prefix}: write a block of at least 1")
    sees_NN = unpack(words_NW)
    assert not sees_NN.triu(1).any(), "a row sees only itself and rows before it"
    N, first, device = len(sees_NN), prefix // block * block, words_NW.device
    seen_N = prefix + sees_NN.sum(1)
    path_LN = sees_NN[sees_NN.sum(0) == 1]  # of rows that are on no other row's path
    if not len(path_LN):
        path_LN = sees_NN.new_zeros(1, N)  # nothing but padding
    places = int(seen_N.max()) - first if N else 0
    place_P = first + torch.arange(places + -places % block, device=device)
    by_depth_LN = (~path_LN).byte().argsort(dim=1, stable=True)
    # Behind a text's end stands its last column again: never seen, and finite where the text is, as padding may not be.
    depth_LP = (place_P - prefix).minimum(path_LN.sum(1, keepdim=True) - 1)
    own_LP = prefix + by_depth_LN.gather(1, depth_LP.clamp(min=0))
    column_LP = torch.where(depth_LP < 0, place_P.clamp(max=prefix - 1), own_LP)
    return Paths(seen_N, path_LN.byte().argmax(0), column_LP, prefix, block)


def tree_attention(q_HND: Tensor, k_JTD: Tensor, v_JTD: Tensor, paths: Paths, *, scaling: float) -> Tensor:
    """Attention [H, N, D] of the rows of a pass, in q's number format; products and sums in float32.

    Head h reads key head h // (H / J). Columns of k and v: the prefix, then the N rows of this pass. A row that sees
    nothing (padding without a prefix) gets 0.
    """
    (H, N, D), (J, T, _), prefix, block = q_HND.shape, k_JTD.shape, paths.prefix, paths.block
    assert (len(paths.seen_N), T, H % J) == (N, prefix + N, 0), (q_HND.shape, k_JTD.shape, prefix, len(paths.seen_N))
    group, first = H // J, prefix // block * block
    more = max(0, LEAST_ROWS - group * N)
    q_JRD = F.pad(q_HND.reshape(J, group * N, D).float(), (0, 0, 0, more))
    leaf_R, seen_R = (F.pad(x.repeat(group), (0, more)) for x in (paths.leaf_N, paths.seen_N))
    parts: list[Partial] = []
    for start in range(0, first, block):
        shared = slice(start, start + block)
        parts.append(_partial(q_JRD, k_JTD[:, None, shared], v_JTD[:, None, shared], leaf_R, None, scaling))
    for start in range(0, paths.column_LP.shape[1], block):
        column_Lb = paths.column_LP[:, start : start + block]
        hidden_Rb = torch.arange(first + start, first + start + block, device=q_HND.device) >= seen_R[:, None]
        parts.append(_partial(q_JRD, k_JTD[:, column_Lb], v_JTD[:, column_Lb], leaf_R, hidden_Rb, scaling))
    return _merge(parts, q_JRD)[:, : group * N].to(q_HND.dtype).reshape(H, N, D)


def _partial(
    q_JRD: Tensor, k_JLbD: Tensor, v_JLbD: Tensor, leaf_R: Tensor, hidden_Rb: Tensor | None, scaling: float
) -> Partial:
    """Every row against one block of its own leaf's text."""
    scores_JRb = _own(q_JRD[:, None] @ k_JLbD.float().transpose(2, 3), leaf_R) * scaling
    if hidden_Rb is not None:
        scores_JRb = scores_JRb.masked_fill(hidden_Rb, -torch.inf)
    top_JR1 = scores_JRb.amax(-1, keepdim=True)
    weights_JRb = (scores_JRb - _finite(top_JR1)).exp()
    out_JRD = _own(weights_JRb[:, None] @ v_JLbD.float(), leaf_R)
    return Partial(top_JR1, weights_JRb.sum(-1, keepdim=True), out_JRD)


def _merge(parts: list[Partial], like_JRD: Tensor) -> Tensor:
    """The partial results as one, one block after the other: a sum over a stack may group them by their number."""
    out_JRD, total_JR1 = torch.zeros_like(like_JRD), torch.zeros_like(like_JRD[..., :1])
    if not parts:
        return out_JRD
    top_JR1 = _finite(torch.stack([part.top_JR1 for part in parts]).amax(0))
    for part in parts:
        share_JR1 = (part.top_JR1 - top_JR1).exp()
        total_JR1 += share_JR1 * part.total_JR1
        out_JRD += share_JR1 * part.out_JRD
    return out_JRD / total_JR1.clamp(min=1)  # at least 1 where anything is seen: its largest score has weight 1


def _own(x_JLRX: Tensor, leaf_R: Tensor) -> Tensor:
    """[J, R, X]: of each row, what its own leaf gave it."""
    if x_JLRX.shape[1] == 1:
        return x_JLRX[:, 0]
    return x_JLRX[:, leaf_R, torch.arange(len(leaf_R), device=leaf_R.device)]


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)


def _signed(bits: int) -> int:
    """The lowest 64 bits as int64 holds them."""
    word = bits & (1 << WORD) - 1
    return word - (1 << WORD) if word >> WORD - 1 else word
