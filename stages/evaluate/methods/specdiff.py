"""SpecDiff (arXiv 2408.05636): the unaligned diffusion drafter, one sampled draft.

Leviathan with the exact law the draft was drawn from when `T_v > 0`; at `T_v = 0`, where both rules agree on what is
kept, Match.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels import sampling, tree
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.drafting import WindowDrafting, sample_drafts
from stages.evaluate.engine import EMPTY, Proposal, State

RULE = "leviathan"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G
    temperature: NonNegative  # T_d


class SpecDiff:
    def __init__(self, params: Params, drafter: Drafter) -> None:
        self.params = params
        self.drafting = WindowDrafting(drafter, gamma=params.gamma)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self.drafting.start(prompt_ids)

    def propose(self, state: State) -> Proposal:
        window = self.drafting.window(state)
        if window == 0:
            return Proposal(EMPTY)
        logits = self.drafting.logits(state, window)
        q_GVd = sampling.probabilities(logits, temperature=self.params.temperature)
        if sampling.is_greedy(state.sampling.temperature):
            (draft_G,) = sample_drafts(q_GVd, 1, state)
            return Proposal(tree.chain(self.drafting.words(draft_G)))
        q_GV = self.drafting.full_vocabulary(q_GVd)
        (draft_G,) = sample_drafts(q_GV, 1, state)
        return Proposal(tree.chain(draft_G), rule="leviathan", q_GV=q_GV)


def build(params: Params, drafter: Drafter) -> SpecDiff:
    return SpecDiff(params, drafter)
