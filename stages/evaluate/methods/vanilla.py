"""The verifier alone: one token a pass. The yardstick of every ratio."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.common.drafters import Drafter
from stages.evaluate.contract import EMPTY, Proposal, State

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: None


class Vanilla:
    reads = ()

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        pass

    def propose(self, state: State) -> Proposal:
        return Proposal(EMPTY)


def build(params: Params, drafter: Drafter | None) -> Vanilla:
    return Vanilla()
