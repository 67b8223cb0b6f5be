"""Recursive rejection sampling over the K drafts of one denoising pass (SpecInfer, arXiv 2305.09781).

The drafts of `specdiff2`, judged in drawn order by min(1, p/q) and what a rejection leaves of p. The marginals have
product form, so at every depth the drafts that share the accepted prefix are i.i.d. from q again (kernels/accept.py).
At `T_v = 0`, where p/q accepts the arg max alone, Match over the trie.
"""

from torch import Tensor

from kernels import sampling
from kernels.tree import prefix_trie
from stages.common.drafters import Drafter
from stages.evaluate.contract import Proposal, State
from stages.evaluate.drafting import DraftsParams as Params
from stages.evaluate.drafting import KDrafts, sample_drafts

__all__ = ["RULE", "Params", "build"]

RULE = "leviathan"  # for harness.greedy_or_match: coins of its own unless greedy


class Recursive(KDrafts):
    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        if sampling.is_greedy(state.sampling.temperature):
            return super().proposal(logits_GVd, state)
        q_GV = self.full_vocabulary(sampling.probabilities(logits_GVd, temperature=self.params.temperature))
        tree, paths = prefix_trie(sample_drafts(q_GV, self.params.drafts, state))
        return Proposal(tree, rule="recursive", paths=paths, q_GV=q_GV)


def build(params: Params, drafter: Drafter) -> Recursive:
    return Recursive(params, drafter, rule="match")
