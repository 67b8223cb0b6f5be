"""Ours: a small masked block drafter fed with the verifier's hidden states (stages/common/fed.py; arXiv 2602.06036).

One pass a cycle: the states of newly committed tokens become context, then the pending token and G - 1 masks are run
behind it. The best-first tree under the marginals, as in `specdiff2_tree`; Match.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import tree
from stages.common.fed import FedDrafter
from stages.common.params import Count, Share
from stages.evaluate.contract import EMPTY, Proposal, State

RULE = "match"
KIND = "fed"  # of its drafter


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G: the deepest a node can be
    nodes: Count  # N, at most
    width: Count  # words tried at each depth
    threshold: Share  # smallest product of q along a node's path


class SpecDiff2Fed:
    def __init__(self, params: Params, drafter: FedDrafter) -> None:
        self.params = params
        self.drafter = drafter
        self.reads = drafter.reads
        self.cache = drafter.new_cache(64)

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self.cache.roll_back(0)
        if len(prompt_ids) <= self.drafter.context_limit:
            self.drafter.extend(features_TC, self.cache)

    def propose(self, state: State) -> Proposal:
        p, drafter = self.params, self.drafter
        window = min(p.gamma, state.max_depth, drafter.context_limit - len(state.ids) + 1)
        if window < 1:
            return Proposal(EMPTY)
        drafter.extend(state.features()[self.cache.length :], self.cache)
        logq_GVd = torch.log_softmax(drafter.draft(state.ids[-1], window, self.cache), -1)
        best = tree.best_first(logq_GVd, nodes=p.nodes, width=p.width, threshold=p.threshold)
        return Proposal(best._replace(tokens_N=drafter.d2t[best.tokens_N]))


def build(params: Params, drafter: FedDrafter) -> SpecDiff2Fed:
    return SpecDiff2Fed(params, drafter)
