"""Ours.

The best deterministic tree of N nodes under the marginals, in order of the product of q along the path; Match.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import tree
from stages.common.drafters import Drafter
from stages.common.params import Count
from stages.evaluate.drafting import WindowDrafting
from stages.evaluate.engine import EMPTY, Proposal, State

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G: the deepest a node can be
    nodes: Count  # N
    width: Count  # words tried at each depth


class SpecDiff2Tree:
    def __init__(self, params: Params, drafter: Drafter) -> None:
        self.params = params
        self.drafting = WindowDrafting(drafter, gamma=params.gamma)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self.drafting.start(prompt_ids)

    def propose(self, state: State) -> Proposal:
        window = self.drafting.window(state)
        if window == 0:
            return Proposal(EMPTY)
        logq_GVd = torch.log_softmax(self.drafting.logits(state, window), -1)
        best = tree.best_first(logq_GVd, nodes=self.params.nodes, width=self.params.width)
        return Proposal(best._replace(tokens_N=self.drafting.words(best.tokens_N)))


def build(params: Params, drafter: Drafter) -> SpecDiff2Tree:
    return SpecDiff2Tree(params, drafter)
