"""Match and Leviathan on the device: the walk in tensor operations, one small tensor for the host to read.

    n is accepted  <=>  its token is its parent row's coin, and its parent is accepted or is the root

METHOD.md section 3: on the same device the verdicts are those of kernels.sampling.keyed_choice and kernels.accept, bit
for bit. Those ask the device several questions a cycle; here there is one, `read`. What cannot be raised without asking
travels as a flag. Paths are found by pointer doubling: k steps look 2^k rows up, so a tree of depth d costs log2(d)
steps, whatever its size. Trees are kernels.tree's with the parents as an int64 tensor: -1 is the root, row 0 is the
root's and row n + 1 node n's.

A result is int64 [3 + depth]: flag, accepted nodes, final token, then the accepted path padded with -1.

Shapes: N nodes, M = N + 1 rows, V vocabulary, G window.
"""

import torch
from torch import Tensor

from kernels.accept import Verdict
from kernels.coins import CHUNK, Coins, noisy_argmax
from kernels.sampling import KeyedNoise, is_greedy, process_logits

_SOUND, _BAD_LOGITS, _BAD_TREE, _NAN_LAW, _NOT_DRAWN, _NO_LAW = range(6)
_CAUSES = {
    _BAD_LOGITS: "logits hold NaN or +inf, or a row has no allowed id; check the weights, dtype and masks",
    _NAN_LAW: "leviathan: NaN in p or q; check the logits of verifier and drafter",
    _NOT_DRAWN: "leviathan: a draft token has q = 0, so it was not drawn from this q; pass the tensor drawn from",
    _NO_LAW: "leviathan: the final row is negative, infinite or all zero; check the verifier's logits",
}


def match_walk(
    logits_MV: Tensor,
    tokens_N: Tensor,
    parents_N: Tensor,
    noise: KeyedNoise,
    *,
    position: int,
    max_depth: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """keyed_choice at every row, then match, without a question to the device: int64 [3 + max_depth] for `read`.

    `position` is the root row's, a row at depth d has position + d; no node lies deeper than `max_depth`. Of
    `noise` only the key is used, none of its rows. Beside the logits, memory holds a few tables [M, chunk]. Top-k and
    top-p fall back to process_logits: at T > 0 it makes its float32 copy [M, V] and asks the device whether the rows
    are sound.
    """
    assert logits_MV.shape == (len(tokens_N) + 1, noise.vocab), (logits_MV.shape, len(tokens_N), noise.vocab)
    assert tokens_N.shape == parents_N.shape, (tokens_N.shape, parents_N.shape)
    if not is_greedy(temperature) and (0 < top_k < noise.vocab or top_p < 1.0):
        logits_MV = process_logits(logits_MV, temperature=temperature, top_k=top_k, top_p=top_p)
        temperature = 1.0  # x / 1 is x
    ups = ancestor_rows(parents_N, max_depth=max_depth)
    depth_M = row_depths(ups, len(tokens_N) + 1, device=tokens_N.device)
    coins = noisy_argmax(
        logits_MV,
        depth_M.clamp(max=max_depth),
        noise,
        position=position,
        max_depth=max_depth,
        temperature=temperature,
        chunk=chunk,
    )
    return _walk(coins, tokens_N, parents_N, ups, depth_M, max_depth=max_depth)


def leviathan_walk(
    tokens_G: Tensor, q_GV: Tensor, p_MV: Tensor, *, uniforms_G: Tensor, final_uniform: float | Tensor
) -> Tensor:
    """kernels.accept.leviathan without a question to the device: int64 [3 + G] for `read`. Same terms.

    The uniforms of the chain must lie on the device already; the final one may be a number.
    """
    num_tokens, vocab = q_GV.shape
    assert len(tokens_G) == num_tokens, (tokens_G.shape, q_GV.shape)
    assert p_MV.shape == (num_tokens + 1, vocab), (p_MV.shape, q_GV.shape)
    at = torch.arange(num_tokens, device=q_GV.device)
    q_G, p_G = q_GV[at, tokens_G].double(), p_MV[at, tokens_G].double()
    accepted_G = uniforms_G.to(q_G) * q_G < p_G
    num_accepted = accepted_G.long().cumprod(0).sum(0, keepdim=True)
    law_V = p_MV.index_select(0, num_accepted)[0].double()
    if num_tokens:
        rejected_q_V = q_GV.index_select(0, num_accepted.clamp(max=num_tokens - 1))[0]
        law_V = torch.where(num_accepted < num_tokens, _residual(law_V, rejected_q_V), law_V)
    token, sound = _draw(law_V, final_uniform)
    flag = _flag(
        (_NAN_LAW, torch.isnan(p_MV.sum()) | torch.isnan(q_GV.sum())),
        (_NOT_DRAWN, ~(q_G > 0).all()),
        (_NO_LAW, ~sound),
    )
    return torch.cat([flag, num_accepted, token, torch.where(at < num_accepted, at, -1)])


def read(result: Tensor) -> Verdict:
    """The one question of a cycle: what a walk found. Raises what the rule without a device would raise."""
    flag, num_accepted, token, *path = result.tolist()
    assert flag != _BAD_TREE, "parents must come first, siblings differ, and no node lie deeper than max_depth"
    if flag:
        raise ValueError(_CAUSES[flag])
    return Verdict(path[:num_accepted], token)


def ancestor_rows(parents_N: Tensor, *, max_depth: int) -> list[Tensor]:
    """Rows 1, 2, 4 .. steps up, as many as it takes to get beyond `max_depth`; the root's row stays where it is."""
    ups = [torch.cat([parents_N.new_zeros(1), parents_N + 1])]
    for _ in range(1, max_depth.bit_length()):
        ups.append(ups[-1].index_select(0, ups[-1]))
    return ups[: max_depth.bit_length()]


def row_depths(ups: list[Tensor], num_rows: int, *, device: torch.device) -> Tensor:
    """Depth of every row [M], the root's 0; a row deeper than max_depth gets some depth above it."""
    depth_M = torch.arange(num_rows, device=device).clamp(max=1)
    for up_M in ups:
        depth_M = depth_M + depth_M.index_select(0, up_M)
    return depth_M


def _walk(
    coins: Coins, tokens_N: Tensor, parents_N: Tensor, ups: list[Tensor], depth_M: Tensor, *, max_depth: int
) -> Tensor:
    """kernels.accept.match, and its result with the flag."""
    accepted_M = _accepted(coins.ids_M, tokens_N, parents_N, ups)
    rows_M = torch.where(accepted_M, torch.arange(len(accepted_M), device=accepted_M.device), 0)
    last = rows_M.amax(0, keepdim=True)  # indices grow along a path
    # Slot 0 takes the root and every rejected row: all of them write the root's -1 there.
    path = torch.full((max_depth + 1,), -1, device=accepted_M.device)
    path.scatter_(0, torch.where(accepted_M, depth_M.clamp(max=max_depth), 0), rows_M - 1)
    flag = _flag(
        (_BAD_LOGITS, ~torch.isfinite(coins.maxima_M).all()),
        (_BAD_TREE, _is_unsound(tokens_N, parents_N) | (depth_M > max_depth).any()),
    )
    return torch.cat([flag, accepted_M[1:].sum(0, keepdim=True), coins.ids_M.index_select(0, last), path[1:]])


def _accepted(choices_M: Tensor, tokens_N: Tensor, parents_N: Tensor, ups: list[Tensor]) -> Tensor:
    """Bool [M]: the row's node and all above it carry the coins of their parents' rows."""
    taken_N = choices_M.index_select(0, parents_N + 1) == tokens_N
    accepted_M = torch.cat([taken_N.new_ones(1), taken_N])
    for up_M in ups:
        accepted_M = accepted_M & accepted_M.index_select(0, up_M)
    return accepted_M


def _is_unsound(tokens_N: Tensor, parents_N: Tensor) -> Tensor:
    """A parent behind its child, or two siblings that carry the same token: what kernels.tree.children asserts."""
    nodes_N = torch.arange(len(parents_N), device=parents_N.device)
    edges_N = ((parents_N << 32) + tokens_N).sort().values
    return (parents_N >= nodes_N).any() | (parents_N < -1).any() | (edges_N[1:] == edges_N[:-1]).any()


def _residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """kernels.sampling.residual, its question answered on the device."""
    left_V = (p_V - q_V.double()).clamp_(min=0)
    total = left_V.sum()
    return torch.where(total > 1e-12, left_V / total, p_V / p_V.sum())


def _draw(law_V: Tensor, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """kernels.sampling.sample_rows of one row: token [1], and whether the row is a law at all."""
    ids_V = torch.arange(len(law_V), device=law_V.device)
    cdf_V = law_V.cumsum(dim=-1)
    total, positive_V = cdf_V[-1], law_V > 0
    first = torch.where((cdf_V > total * uniform) & positive_V, ids_V, len(law_V)).amin(0, keepdim=True)
    last = torch.where(positive_V, ids_V, -1).amax(0, keepdim=True)
    return torch.where(first < len(law_V), first, last), torch.isfinite(total) & (total > 0) & ~(law_V < 0).any()


def _flag(*causes: tuple[int, Tensor]) -> Tensor:
    """The first cause that holds, int64 [1]; 0 if none does."""
    flag = torch.full((1,), _SOUND, device=causes[0][1].device)
    for code, holds in reversed(causes):
        flag = torch.where(holds, code, flag)
    return flag
