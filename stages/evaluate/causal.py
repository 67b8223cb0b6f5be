"""What `speculative` and `dyspec` share: a causal student that follows one text, one token a pass.

The student is a drafter without mask rows: `draft(new, 1, cache)` scores the token behind `new` and keeps `new` in the
cache, each committed token exactly once. What the student read of its own drafts lies behind the committed rows, and is
rolled back unless it was emitted.

Letters: V_d draft vocabulary.
"""

from torch import Tensor

from kernels.cache import KVCache
from stages.common.drafters import Drafter
from stages.evaluate.contract import State
from stages.evaluate.drafting import WindowMethod


class CausalMethod(WindowMethod):
    """A method whose `proposal` is given the scores [1, V_d] behind the pending token, and goes on from there."""

    def __init__(self, drafter: Drafter, *, gamma: int) -> None:
        if drafter.prefix != "own":
            raise ValueError(
                f"params.yaml: a drafter with prefix {drafter.prefix!r} reads no token of its own drafts; name one "
                "with prefix own, such as student"
            )
        super().__init__(drafter, gamma=gamma)

    @property
    def read(self) -> KVCache:
        """What the student has read."""
        assert self.cache is not None
        return self.cache

    def logits(self, state: State, window: int) -> Tensor:
        """Scores [1, V_d] of the token behind the pending one, whatever the window: the others take passes more."""
        return super().logits(state, 1)
