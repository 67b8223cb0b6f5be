"""Several proposals as one tree: what lets proposers of different kinds share a verification."""

from collections.abc import Sequence

import torch

from kernels.tree import Tree


def union(trees: Sequence[Tree]) -> Tree:
    """Every path of every tree, equal prefixes merged, on the first tree's device.

    The first tree's nodes keep their order and indices; what the others add follows, parents first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    node_at: dict[tuple[int, int], int] = {}
    for tree in trees:
        moved: list[int] = []  # node of this tree -> node of the union
        for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
            above = moved[parent] if parent >= 0 else -1
            node = node_at.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
            moved.append(node)
    return Tree(torch.tensor(tokens, dtype=torch.int64, device=trees[0].tokens_N.device), parents)
