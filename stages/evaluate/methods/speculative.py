"""Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

A causal student drafts a chain of G tokens, one pass each; every draw is from q given the drafts before it. Leviathan
with those very rows of q when `T_v > 0`; at `T_v = 0`, where both rules agree on what is kept, Match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from kernels import sampling, tree
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.causal import CausalMethod
from stages.evaluate.contract import DRAFT_STREAM, Proposal, State

RULE = "leviathan"
KIND = "causal"  # of its drafter


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # G: tokens drafted, and passes of the student
    temperature: NonNegative  # T_d


class Speculative(CausalMethod):
    """Drafts that were emitted stay cached, so a cycle costs G passes of one row, or of two after a whole chain."""

    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params
        self._drafted: list[int] = []  # what of the last chain the student has read, behind the committed tokens

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self._drafted = []
        super().start(prompt_ids, features_TC)

    def logits(self, state: State, window: int) -> Tensor:
        committed = self.read.length - len(self._drafted)
        pairs = zip(self._drafted, state.ids[committed:-1], strict=False)
        emitted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.read.roll_back(committed + emitted)
        self._drafted = []
        return super().logits(state, window)

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        window, first = self.window(state), len(state.ids)
        draft, q = list[Tensor](), list[Tensor]()
        while True:
            q.append(sampling.probabilities(logits_GVd, temperature=self.params.temperature))
            draft.append(self.words(sampling.sample_rows(q[-1], self._coin(state, first + len(draft)))))
            if len(draft) == window:
                break
            self._drafted.append(int(draft[-1]))
            logits_GVd = self.drafter.draft(self._drafted[-1:], 1, self.read)
        chain = tree.chain(torch.cat(draft))
        if sampling.is_greedy(state.sampling.temperature):
            return Proposal(chain)
        return Proposal(chain, rule="leviathan", q_GV=self.full_vocabulary(torch.cat(q)))

    def _coin(self, state: State, place: int) -> Tensor:
        """The uniform [1] that the draft at an absolute place is drawn with."""
        seed, key = state.sampling.seed, state.key
        return sampling.keyed_uniform(1, seed=seed, prompt_key=key, position=place, stream=DRAFT_STREAM)


def build(params: Params, drafter: Drafter) -> Speculative:
    return Speculative(params, drafter)
