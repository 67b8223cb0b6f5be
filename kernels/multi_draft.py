"""Two acceptance rules for K drafts and the q they were drawn from (METHOD.md section 3), at `T_v > 0`.

Recursive rejection (SpecInfer, arXiv 2305.09781) and K-SEQ (SpecTr, arXiv 2310.15141). Both need the very q the drafts
were drawn from, and the order of drawing. Rows follow kernels.tree: row 0 is the root's, row n + 1 is node n's.

Shapes: G window, K drafts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.accept import Verdict
from kernels.sampling import residual, sample_rows
from kernels.tree import Tree


class Pick(NamedTuple):
    draw: int | None  # index of the accepted draw; None: none was
    law_V: Tensor  # float64: what the token is then drawn from


class Ending(NamedTuple):
    path: list[int]  # accepted nodes in order
    law_V: Tensor  # of the token behind them


# p, q, tokens drawn i.i.d. from q in drawn order, a fresh uniform for each
PickRule = Callable[[Tensor, Tensor, list[int], Sequence[float]], Pick]


def multi_draft(
    tree: Tree,
    paths: list[list[int]],
    q_GV: Tensor,
    p_at: Callable[[int], Tensor],
    *,
    rule: PickRule,
    uniforms_GK: Tensor | Sequence[Sequence[float]],
    final_uniform: float | Tensor,
) -> Verdict:
    """`walk_drafts`, and a draw from the law it ends with."""
    path, law_V = walk_drafts(tree, paths, q_GV, p_at, rule=rule, uniforms_GK=uniforms_GK)
    return Verdict(path, int(sample_rows(law_V, torch.as_tensor(final_uniform, dtype=torch.float64))))


def walk_drafts(
    tree: Tree,
    paths: list[list[int]],
    q_GV: Tensor,
    p_at: Callable[[int], Tensor],
    *,
    rule: PickRule,
    uniforms_GK: Tensor | Sequence[Sequence[float]],
) -> Ending:
    """At each depth let `rule` (`recursive`, `k_seq`) judge the drafts that share the accepted prefix.

    `paths` are the K drafts in drawn order, equal ones once for each draw; each must be drawn from q_1 .. q_G
    independently of the others, of p and of the uniforms. `p_at(m)` is p [V] behind row m, asked for along the
    accepted path alone. Lossless because the marginals have product form: who takes part at depth j is decided by
    the tokens and uniforms of the depths before, and the drafts' j-th tokens are independent of those, so at every
    depth they are i.i.d. from q_j again, those of drafts whose equal token was tried and rejected included. Only
    their number K' shrinks. A drafter whose q_j depends on its own earlier tokens must not be judged so.
    """
    coins = uniforms_GK.tolist() if isinstance(uniforms_GK, Tensor) else uniforms_GK
    assert all(len(path) == len(q_GV) for path in paths), "a draft of another length than q"
    assert len(coins) == len(q_GV), (len(coins), len(q_GV))
    tokens = tree.tokens_N.tolist()
    live = list(range(len(paths)))
    accepted: list[int] = []
    for depth, q_V in enumerate(q_GV):
        drawn = [paths[k][depth] for k in live]
        p_V = p_at(accepted[-1] + 1 if accepted else 0)
        draw, law_V = rule(p_V, q_V, [tokens[node] for node in drawn], [coins[depth][k] for k in live])
        if draw is None:
            return Ending(accepted, law_V)
        accepted.append(drawn[draw])
        live = [k for k in live if paths[k][depth] == drawn[draw]]
    return Ending(accepted, _law(p_at(accepted[-1] + 1 if accepted else 0)))


def recursive(p_V: Tensor, q_V: Tensor, drawn: list[int], uniforms: Sequence[float]) -> Pick:
    """Recursive rejection sampling (SpecInfer, arXiv 2305.09781, multi-step speculative sampling).

    Accept x with min(1, p/q); a rejection turns p into norm(max(0, p - q)), in which the next draw is tried. In drawn
    order, and an equal draw is tried again: its acceptance is 0 then, yet it was drawn and p must change.
    """
    left_V, q_V = _law(p_V), _law(q_V)
    for draw, (token, uniform) in enumerate(zip(drawn, uniforms, strict=True)):
        if uniform < float(left_V[token]) / _drawn_from(q_V, token):
            return Pick(draw, left_V)
        left_V = residual(left_V, q_V)
    return Pick(None, left_V)


def k_seq(p_V: Tensor, q_V: Tensor, drawn: list[int], uniforms: Sequence[float]) -> Pick:
    """K-SEQ (SpecTr, arXiv 2310.15141, Alg. 2): accept the first x_i with u_i < min(1, p / (rho q)).

    A draw is accepted as x with chance a(x) = min(q, p / rho), in all beta = sum a; one of K is with
    1 - (1 - beta)^K, so that x is emitted this way with a(x) n, n = (1 - (1 - beta)^K) / beta. What p has beyond
    that, (1 - beta)^K in all, is the law when every draw is rejected; a(x) n <= p(x) holds because n <= rho.
    """
    p_V, q_V = _law(p_V), _law(q_V)
    rho = k_seq_rho(p_V, q_V, len(drawn))
    accept_V = torch.minimum(q_V, p_V / rho)
    for draw, (token, uniform) in enumerate(zip(drawn, uniforms, strict=True)):
        if uniform < float(accept_V[token]) / _drawn_from(q_V, token):
            return Pick(draw, p_V)
    return Pick(None, residual(p_V, accept_V * _expected_tries(float(accept_V.sum()), len(drawn))))


def k_seq_rho(p_V: Tensor, q_V: Tensor, draws: int) -> float:
    """The smallest rho in [1, K] that is valid for K draws: 1 - (1 - beta)^K <= rho beta, beta = sum min(q, p / rho).

    rho beta = sum min(rho q, p) grows with rho and the left side falls, so bisection finds it; the upper end is
    returned, which is valid, so the rule is lossless whatever is left of the interval.
    """
    both = (p_V > 0) & (q_V > 0)
    p_X, q_X = p_V[both], q_V[both]

    def valid(rho: float) -> bool:
        return _expected_tries(float(torch.minimum(q_X, p_X / rho).sum()), draws) <= rho

    low, high = 1.0, float(draws)
    if valid(low):
        return low
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if valid(middle) else (middle, high)
    return high


def _expected_tries(beta: float, draws: int) -> float:
    """(1 - (1 - beta)^K) / beta, also at beta = 0: how many of K draws are looked at."""
    return sum((1 - beta) ** i for i in range(draws))


def _law(probs_V: Tensor) -> Tensor:
    """float64, sum 1."""
    probs_V = probs_V.double()
    total = float(probs_V.sum())
    if not 0 < total < float("inf"):
        raise ValueError("NaN, infinity or nothing in p or q; check the logits of verifier and drafter")
    return probs_V / total


def _drawn_from(q_V: Tensor, token: int) -> float:
    value = float(q_V[token])
    if not value > 0:
        raise ValueError("a draft token has q = 0, so it was not drawn from this q; pass the tensor drawn from")
    return value
