"""Acceptance rules: Match, self-selection, Leviathan, and two rules for K drafts and their q (METHOD.md section 3).

Match is lossless for any tree that was fixed before the coins were drawn: every emitted token is the coin y ~
p of its row. Leviathan (arXiv 2211.17192), recursive rejection (arXiv 2305.09781) and K-SEQ (arXiv 2310.15141)
need the very q the drafts were drawn from. Rows follow kernels.tree: row 0 is the root's, row n + 1 is node n's.

Shapes: N nodes, M = N + 1 rows, G window, K drafts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling import residual, sample_rows
from kernels.tree import Tree, children


class Verdict(NamedTuple):
    path: list[int]  # accepted nodes in order
    token: int  # replacement or bonus: the next pending token


class Branch(NamedTuple):
    tree: Tree  # one path of a bigger tree, as a chain
    nodes: list[int]  # its node i in the bigger tree
    rows: list[int]  # its row i in the bigger tree's row tables


class Pick(NamedTuple):
    draw: int | None  # index of the accepted draw; None: none was
    law_V: Tensor  # float64: what the token is then drawn from


class Ending(NamedTuple):
    path: list[int]  # accepted nodes in order
    law_V: Tensor  # of the token behind them


# p, q, tokens drawn i.i.d. from q in drawn order, a fresh uniform for each
PickRule = Callable[[Tensor, Tensor, list[int], Sequence[float]], Pick]


def match(tree: Tree, choices: Tensor | Sequence[int]) -> Verdict:
    """Walk from the root to the child that carries the row's coin; where there is none, emit the coin and
    stop.

    At a leaf the coin is the bonus. choices[0] is the coin drawn at the root's row, choices[n + 1] the one at
    node n's row.
    """
    coins = choices.tolist() if isinstance(choices, Tensor) else choices
    assert len(coins) == len(tree.parents) + 1, (len(coins), len(tree.parents))
    child_of = children(tree)
    path: list[int] = []
    row = 0
    while (node := child_of[row].get(coins[row])) is not None:
        path.append(node)
        row = node + 1
    return Verdict(path, coins[row])


def node_probabilities(tree: Tree, scores_MV: Tensor) -> Tensor:
    """p(token of n | path to n) for every node [N], float32, from processed scores or log-probabilities.

    Costs one logsumexp a row that has children, never an M x V copy of probabilities.
    """
    rows = [parent + 1 for parent in tree.parents]
    used, where = torch.tensor(rows, dtype=torch.int64).unique(return_inverse=True)
    log_norm = scores_MV[used.to(scores_MV.device)].float().logsumexp(dim=-1)
    picked = scores_MV[rows, tree.tokens_N].float()
    return (picked - log_norm[where.to(scores_MV.device)]).exp()


def node_matches(tree: Tree, choices: Tensor) -> Tensor:
    """The greedy node_probabilities: 1 where a node carries its parent row's arg max, else 0 [N]."""
    rows = [parent + 1 for parent in tree.parents]
    return (choices[rows] == tree.tokens_N).float()


def score_drafts(paths: list[list[int]], tree: Tree, p: Tensor) -> Tensor:
    """S_K = sum_m prod_{j<=m} p(x_j | s, x_<j): each draft's expected accepted length under Match, float64.

    `p` is either probabilities by row [M, V] or the nodes' own probabilities [N] (node_probabilities,
    node_matches). Greedy p is one-hot: then S counts leading matches.
    """
    reach = _reach(tree, p)
    return torch.tensor([sum(reach[node] for node in path) for path in paths], dtype=torch.float64)


def self_select(paths: list[list[int]], tree: Tree, p: Tensor) -> int:
    """Index of the draft with the largest S (the paper's Alg. 1, Eq. 7), the lowest on ties."""
    return int(score_drafts(paths, tree, p).argmax())


def select_chain(tree: Tree, path: list[int]) -> Branch:
    """One path of a tree as a chain, with the rows it owns: match(branch.tree, choices[branch.rows]).

    The verdict's indices count along the chain; branch.nodes leads back to the tree.
    """
    for above, node in zip([-1, *path], path, strict=False):
        assert tree.parents[node] == above, f"node {node} is not a child of {above}: not a path"
    return Branch(Tree(tree.tokens_N[path], list(range(-1, len(path) - 1))), path, [0, *(n + 1 for n in path)])


def leviathan(
    tokens_G: Tensor, q_GV: Tensor, p_MV: Tensor, *, uniforms_G: Tensor, final_uniform: float | Tensor
) -> Verdict:
    """Accept x_i if u_i < min(1, p/q); a first rejection draws from the residual, G accepts a bonus from p.

    q_GV must be the very tensor x_i was drawn from (row i, in the verifier's vocabulary), and x_i drawn
    independently of p and of these uniforms: the caller asserts identity, not equality. Raises ValueError on
    NaN or an x_i with q = 0.
    """
    num_tokens = len(tokens_G)
    assert q_GV.shape[0] == num_tokens, (q_GV.shape, num_tokens)
    assert p_MV.shape == (num_tokens + 1, q_GV.shape[1]), (p_MV.shape, q_GV.shape)
    if bool(torch.isnan(p_MV.sum()) | torch.isnan(q_GV.sum())):
        raise ValueError("leviathan: NaN in p or q; check the logits of verifier and drafter")
    at = torch.arange(num_tokens, device=q_GV.device)
    q_G, p_G = q_GV[at, tokens_G].double(), p_MV[at, tokens_G].double()
    if not bool((q_G > 0).all()):
        raise ValueError(
            "leviathan: a draft token has q = 0, so it was not drawn from this q; pass the tensor drawn from"
        )
    accepted_G = (uniforms_G.to(q_G) * q_G < p_G).tolist()
    num_accepted = accepted_G.index(False) if False in accepted_G else num_tokens
    law_V = p_MV[num_accepted]
    if num_accepted < num_tokens:
        law_V = residual(law_V, q_GV[num_accepted])
    token = int(sample_rows(law_V, torch.as_tensor(final_uniform, dtype=torch.float64)))
    return Verdict(list(range(num_accepted)), token)


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


def _reach(tree: Tree, p: Tensor) -> list[float]:
    """P(node): the probability that Match reaches it, the product of p along its path."""
    if p.ndim == 2:
        assert p.shape[0] == len(tree.parents) + 1, (p.shape, len(tree.parents))
        p = p[[parent + 1 for parent in tree.parents], tree.tokens_N]
    assert p.shape == tree.tokens_N.shape, (p.shape, tree.tokens_N.shape)
    reach: list[float] = []
    for value, parent in zip(p.double().tolist(), tree.parents, strict=True):
        reach.append(value * (reach[parent] if parent >= 0 else 1.0))
    if any(value != value for value in reach):
        raise ValueError("NaN in the verifier's probabilities; check its logits")
    return reach
