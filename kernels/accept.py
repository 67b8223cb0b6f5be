"""Acceptance rules: Match, self-selection, and Leviathan (METHOD.md section 3).

Match is lossless for any tree that was fixed before the coins were drawn: every emitted token is the coin y ~
p of its row. Leviathan (arXiv 2211.17192) needs the very q the draft was drawn from. Rows follow
kernels.tree: row 0 is the root's, row n + 1 is node n's.

Shapes: N nodes, M = N + 1 rows, G window, K drafts, V vocabulary.
"""

from collections.abc import Sequence
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
