"""SpecDiff (arXiv 2408.05636): the unaligned diffusion drafter, one sampled draft.

Leviathan with the exact law the draft was drawn from when `T_v > 0`; at `T_v = 0`, where both rules agree on what is
kept, Match.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels import sampling, tree
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.contract import Proposal, State
from stages.evaluate.drafting import WindowMethod, sample_drafts

RULE = "leviathan"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G
    temperature: NonNegative  # T_d


class SpecDiff(WindowMethod):
    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        q_GVd = sampling.probabilities(logits_GVd, temperature=self.params.temperature)
        if sampling.is_greedy(state.sampling.temperature):
            (draft_G,) = sample_drafts(q_GVd, 1, state)
            return Proposal(tree.chain(self.words(draft_G)))
        q_GV = self.full_vocabulary(q_GVd)
        (draft_G,) = sample_drafts(q_GV, 1, state)
        return Proposal(tree.chain(draft_G), rule="leviathan", q_GV=q_GV)


def build(params: Params, drafter: Drafter) -> SpecDiff:
    return SpecDiff(params, drafter)
