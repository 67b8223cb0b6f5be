"""Proposals as trees: a chain, K drafts merged in a trie, or the best-first tree of N nodes.

The root is the pending token and is not a node. Convention: `parents` is a list of int, -1 is the root, and a
parent's index is lower than its child's. Row tables over a tree have N + 1 rows: row 0 is the root's, row n +
1 is node n's, so the row that judges node n is `parents[n] + 1`. Siblings carry distinct tokens (METHOD.md
section 3: merge, or two equal chains with coins of their own give .84 for .60).

Shapes: N nodes, G window, K drafts, V vocabulary.
"""

import heapq
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    tokens_N: Tensor  # LongTensor
    parents: list[int]


class Trie(NamedTuple):
    tree: Tree
    paths: list[list[int]]  # K lists of node indices, from depth 1 down


def chain(tokens_G: Tensor) -> Tree:
    """One draft as a tree with one child per node."""
    return Tree(tokens_G, list(range(-1, len(tokens_G) - 1)))


def prefix_trie(drafts_KG: Tensor) -> Trie:
    """K drafts with equal prefixes merged, nodes in first-seen order."""
    tokens: list[int] = []
    parents: list[int] = []
    node_at: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for draft in drafts_KG.tolist():
        path: list[int] = []
        parent = -1
        for token in draft:
            node = node_at.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            path.append(node)
            parent = node
        paths.append(path)
    return Trie(Tree(_long(tokens, drafts_KG.device), parents), paths)


def best_first(logq_GV: Tensor, *, nodes: int, width: int, threshold: float = 0.0) -> Tree:
    """The best tree of at most `nodes` nodes: those with the largest product of q along their path, in order.

    Candidates are the `width` likeliest ids of each depth; ties go to the lower rank; q = 0 is never
    proposed, nor is a node whose product is below `threshold`. With sorted candidates a node's best unseen
    rivals are its next sibling and its first child, so the heap stays small.
    """
    assert nodes >= 0, nodes
    floor = math.log(threshold) if threshold > 0 else -math.inf
    top = logq_GV.float().topk(min(width, logq_GV.shape[-1]), dim=-1)
    logq: list[list[float]] = top.values.tolist()
    ids: list[list[int]] = top.indices.tolist()
    if any(value != value for row in logq for value in row):
        raise ValueError("best_first: NaN in the drafter's log-probabilities; check its weights and dtype")
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int, float]] = []
    pushed = 0

    def push(depth: int, rank: int, parent: int, log_parent: float) -> None:
        nonlocal pushed
        if depth < len(logq) and rank < len(logq[depth]) and logq[depth][rank] > -torch.inf:
            heapq.heappush(heap, (-(log_parent + logq[depth][rank]), rank, pushed, depth, parent, log_parent))
            pushed += 1

    push(0, 0, -1, 0.0)
    while heap and len(tokens) < nodes:
        cost, rank, _, depth, parent, log_parent = heapq.heappop(heap)
        if -cost < floor:
            break
        node = len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        push(depth, rank + 1, parent, log_parent)
        push(depth + 1, 0, node, -cost)
    return Tree(_long(tokens, logq_GV.device), parents)


def depths(parents: list[int]) -> list[int]:
    """Depth of each node; the root's children have depth 1."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def ancestors_NN(tree: Tree) -> Tensor:
    """Bool [N, N] on the tokens' device: row n marks the nodes on the path to n, itself included."""
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    rows = [node for node, path in enumerate(paths) for _ in path]
    columns = [ancestor for path in paths for ancestor in path]
    result = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    result[rows, columns] = True
    return result.to(tree.tokens_N.device)


def children(tree: Tree) -> list[dict[int, int]]:
    """For each row (0 the root, n + 1 node n): token -> child node."""
    result: list[dict[int, int]] = [{} for _ in range(len(tree.parents) + 1)]
    for node, (token, parent) in enumerate(zip(tree.tokens_N.tolist(), tree.parents, strict=True)):
        assert -1 <= parent < node, f"parent {parent} of node {node} must come before it"
        assert token not in result[parent + 1], f"two children of node {parent} carry token {token}: merge them"
        result[parent + 1][token] = node
    return result


def validate(tree: Tree) -> None:
    """Assert the invariants: parents before children, distinct siblings, int64 tokens that are ids."""
    assert tree.tokens_N.dtype == torch.int64, tree.tokens_N.dtype
    assert tree.tokens_N.ndim == 1, tree.tokens_N.shape
    assert all(token >= 0 for token in tree.tokens_N.tolist()), "negative token id"
    children(tree)


def _long(tokens: list[int], device: torch.device) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=device)
