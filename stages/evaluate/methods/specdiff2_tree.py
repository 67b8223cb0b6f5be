"""Ours.

The best deterministic tree of up to N nodes under the marginals, in order of the product of q along the path; Match.
A node is worth a row of the verifier's pass only if the product, the drafter's chance for it, pays for the row: where
the drafter is unsure the tree is small.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import tree
from stages.common.drafters import Drafter
from stages.common.params import Count, Share
from stages.evaluate.drafting import WindowMethod
from stages.evaluate.engine import Proposal, State

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G: the deepest a node can be
    nodes: Count  # N, at most
    width: Count  # words tried at each depth
    threshold: Share  # smallest product of q along a node's path


class SpecDiff2Tree(WindowMethod):
    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        logq_GVd = torch.log_softmax(logits_GVd, -1)
        p = self.params
        best = tree.best_first(logq_GVd, nodes=p.nodes, width=p.width, threshold=p.threshold)
        return Proposal(best._replace(tokens_N=self.words(best.tokens_N)))


def build(params: Params, drafter: Drafter) -> SpecDiff2Tree:
    return SpecDiff2Tree(params, drafter)
