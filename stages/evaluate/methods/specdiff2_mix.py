"""Ours: two proposers, one verification. The trees of `specdiff2_tree` and `prompt_lookup` joined in one; Match.

Match is lossless for any tree fixed before the coins, whoever made it, so proposers add up: from the same state the
walk goes at least as far as it would in either tree. What the drafter's tree holds of the branch costs nothing; each
other token of it is a row of the verifier's pass, so it is added only where a run of at least `shortest` tokens is
found again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.union import union
from stages.common.drafters import Drafter
from stages.common.params import Count, Share
from stages.evaluate.contract import Proposal, State
from stages.evaluate.drafting import BestTree, TreeParams
from stages.evaluate.lookup import LookupParams, PromptLookup

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G: the deepest a node of the drafter's tree can be
    nodes: Count  # N, at most, of that tree
    width: Count  # words tried at each depth
    threshold: Share  # smallest product of q along a node's path
    lookup: Count  # most tokens of the lookup branch
    longest: Count  # tokens looked up, at most
    shortest: Count  # and at least

    def __post_init__(self) -> None:
        self.of_lookup()  # refuses what cannot be

    def of_tree(self) -> TreeParams:
        return TreeParams(
            drafter=self.drafter, gamma=self.gamma, nodes=self.nodes, width=self.width, threshold=self.threshold
        )

    def of_lookup(self) -> LookupParams:
        return LookupParams(drafter=None, gamma=self.lookup, longest=self.longest, shortest=self.shortest)


class SpecDiff2Mix:
    def __init__(self, params: Params, drafter: Drafter) -> None:
        self.tree = BestTree(params.of_tree(), drafter)
        self.lookup = PromptLookup(params.of_lookup())
        self.reads = self.tree.reads

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self.tree.start(prompt_ids, features_TC)
        self.lookup.start(prompt_ids, features_TC)

    def propose(self, state: State) -> Proposal:
        return Proposal(union([part.propose(state).tree for part in (self.tree, self.lookup)]))


def build(params: Params, drafter: Drafter) -> SpecDiff2Mix:
    return SpecDiff2Mix(params, drafter)
