"""Prompt lookup (Saxena 2023): the text's last words occurred before, so what followed them may follow again.

The free baseline that everybody has: no model, no training. Of the last `longest` down to `shortest` tokens the longest
run that occurs earlier, in prompt or answer, is looked up; what came after its latest occurrence is the draft; Match.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import tree
from stages.common.params import Count
from stages.evaluate.contract import EMPTY, Proposal, State


@dataclass(frozen=True, kw_only=True)
class LookupParams:
    drafter: None
    gamma: Count  # most tokens of a draft
    longest: Count  # tokens looked up, at most
    shortest: Count  # and at least

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is above longest {self.longest}; swap them")


class PromptLookup:
    """Remembers, for every run of tokens read, the place behind its latest occurrence."""

    reads = ()

    def __init__(self, params: LookupParams) -> None:
        self.params = params
        self._behind: dict[tuple[int, ...], int] = {}
        self._read = 0  # places whose runs before them are remembered

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self._behind.clear()
        self._read = 0
        self._remember(prompt_ids)

    def propose(self, state: State) -> Proposal:
        self._remember(state.ids)
        place = self._lookup(state.ids)
        draft = [] if place is None else state.ids[place : place + min(self.params.gamma, state.max_depth)]
        return Proposal(tree.chain(torch.tensor(draft, dtype=torch.long)) if draft else EMPTY)

    def _remember(self, ids: Sequence[int]) -> None:
        p = self.params
        for place in range(self._read, len(ids)):
            for count in range(p.shortest, min(p.longest, place) + 1):
                self._behind[tuple(ids[place - count : place])] = place
        self._read = len(ids)

    def _lookup(self, ids: Sequence[int]) -> int | None:
        p = self.params
        for count in range(min(p.longest, len(ids)), p.shortest - 1, -1):
            place = self._behind.get(tuple(ids[-count:]))
            if place is not None:
                return place
        return None
