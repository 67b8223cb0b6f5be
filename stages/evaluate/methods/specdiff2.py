"""SpecDiff-2 as the paper has it (arXiv 2511.00606, Alg. 1): K drafts from one pass, self-selection by S, Match on the chosen one."""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels import sampling, tree
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.drafting import WindowDrafting, sample_drafts
from stages.evaluate.engine import EMPTY, Proposal, State


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G
    drafts: Count  # K
    temperature: NonNegative  # T_d


class SpecDiff2:
    """All K drafts are verified in one pass, merged in a trie; `select` keeps one of them, `match` walks them all."""

    def __init__(self, params: Params, drafter: Drafter, *, rule: str) -> None:
        assert rule in ("select", "match")
        self.params = params
        self.rule = rule
        self.drafting = WindowDrafting(drafter, gamma=params.gamma)

    def start(self, prompt_ids: Sequence[int]) -> None:
        self.drafting.start(prompt_ids)

    def propose(self, state: State) -> Proposal:
        window = self.drafting.window(state)
        if window == 0:
            return Proposal(EMPTY)
        logits = self.drafting.logits(state, window)
        q_GVd = sampling.probabilities(logits, temperature=self.params.temperature)
        drafts_KG = self.drafting.words(sample_drafts(q_GVd, self.params.drafts, state))
        trie = tree.prefix_trie(drafts_KG)
        if self.rule == "select":
            return Proposal(trie.tree, rule="select", paths=trie.paths)
        return Proposal(trie.tree)


def build(params: Params, drafter: Drafter) -> SpecDiff2:
    return SpecDiff2(params, drafter, rule="select")
