"""What `medusa` and `hydra` share: a tree from heads that stand on the verifier's last hidden state."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.common.medusa import WindowHeads
from stages.common.params import Count, Share
from stages.evaluate.contract import EMPTY, Proposal, State


@dataclass(frozen=True, kw_only=True)
class HeadsParams:
    drafter: str
    gamma: Count  # the deepest a node can be; no deeper than there are heads
    nodes: Count  # N, at most
    width: Count  # words tried at each depth
    threshold: Share  # smallest product of q along a node's path


class HeadsMethod:
    """A tree of what the heads say behind the last feature there is, the state at the token before the pending one.

    The heads have no places, so their context is the verifier's, which `State.max_depth` keeps.
    """

    def __init__(self, params: HeadsParams, drafter: WindowHeads) -> None:
        self.params = params
        self.drafter = drafter
        self.reads: Sequence[int] = drafter.reads

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        pass

    def propose(self, state: State) -> Proposal:
        p = self.params
        depth = min(p.gamma, self.drafter.heads, state.max_depth)
        if depth < 1:
            return Proposal(EMPTY)
        rows_TD = state.features()
        assert len(rows_TD) == len(state.ids) - 1, "a feature of every token but the pending one"
        return Proposal(
            self.drafter.tree(
                rows_TD[-1], state.ids[-1], depth=depth, nodes=p.nodes, width=p.width, threshold=p.threshold
            )
        )
