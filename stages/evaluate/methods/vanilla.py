"""The verifier alone: one token a pass. The yardstick of every ratio."""

from collections.abc import Sequence
from dataclasses import dataclass

from stages.common.drafters import Drafter
from stages.evaluate.engine import EMPTY, Proposal, State

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: None


class Vanilla:
    def start(self, prompt_ids: Sequence[int]) -> None:
        pass

    def propose(self, state: State) -> Proposal:
        return Proposal(EMPTY)


def build(params: Params, drafter: Drafter | None) -> Vanilla:
    return Vanilla()
