"""EAGLE (arXiv 2401.15077): a tree of fixed shape, drafted from the verifier's states and then from the head's own.

`shape` says how many children each node has, level by level: shape[0] is the root's, shape[d][i] the i-th node's of
depth d, counted parent by parent and from the likeliest sibling down; nodes that are left out have none. A node's
children are its likeliest words. [[4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2]] is the tree of 25 nodes that the authors'
code has for its models. Match.
"""

from dataclasses import dataclass

from kernels.tree import Tree
from stages.common.eagle import OneLayer
from stages.common.params import Count, Natural
from stages.evaluate.growing import GrowingMethod, Scored

RULE = "match"
KIND = "eagle"  # of its drafter


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    shape: tuple[tuple[Natural, ...], ...]
    nodes: Count  # N, which the shape must not exceed

    def __post_init__(self) -> None:
        above = 1
        for depth, counts in enumerate(self.shape):
            if not 1 <= len(counts) <= above or not sum(counts):
                raise ValueError(f"shape[{depth}] counts the children of 1 to {above} nodes, at least one child in all")
            above = sum(counts)
        if not 1 <= (total := sum(map(sum, self.shape))) <= self.nodes:
            raise ValueError(f"shape has {total} nodes; write 1 to {self.nodes}, or change nodes")


class Eagle(GrowingMethod):
    def __init__(self, params: Params, head: OneLayer) -> None:
        super().__init__(head, gamma=len(params.shape))
        self.params = params

    def parents(self, scored: Scored, level: list[int], depth: int) -> dict[int, int]:
        counts = self.params.shape[depth - 1]
        return {node: count for node, count in zip(level, counts, strict=False) if count}

    def choose(self, scored: Scored) -> Tree:
        return scored.tree(range(len(scored.words)))


def build(params: Params, drafter: OneLayer) -> Eagle:
    return Eagle(params, drafter)
