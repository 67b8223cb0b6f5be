"""Ours.

The best deterministic tree of N nodes under the marginals, in order of the product of q along the path; Match.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import tree
from stages.common.drafters import Drafter
from stages.common.params import Count
from stages.evaluate.drafting import WindowMethod
from stages.evaluate.engine import Proposal, State

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G: the deepest a node can be
    nodes: Count  # N
    width: Count  # words tried at each depth


class SpecDiff2Tree(WindowMethod):
    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        logq_GVd = torch.log_softmax(logits_GVd, -1)
        best = tree.best_first(logq_GVd, nodes=self.params.nodes, width=self.params.width)
        return Proposal(best._replace(tokens_N=self.words(best.tokens_N)))


def build(params: Params, drafter: Drafter) -> SpecDiff2Tree:
    return SpecDiff2Tree(params, drafter)
