"""What the engine and a method say to each other, and what a decoded text is.

A method is shown a `State` and answers with a `Proposal`; the engine verifies it and accounts for the turn in a
`Cycle`.

Letters: N nodes, V vocabulary, G window, K drafts, T tokens, C columns of features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.cache import LentCache
from kernels.tree import Tree

Rule = Literal["match", "select", "leviathan", "recursive", "k_seq"]  # the last three need q


class Proposal(NamedTuple):
    """A tree to verify. `q_GV` is what a chain was drawn from (rule `leviathan`), or each of K drafts.

    `paths` are the K drafts in the tree (`select`); for `recursive` and `k_seq` in drawn order, equal ones each time.
    """

    tree: Tree
    rule: Rule = "match"
    paths: list[list[int]] | None = None
    q_GV: Tensor | None = None


ACCEPT_STREAM, FINAL_STREAM, DRAFT_STREAM = 0, 1, 2  # uses of a place's uniforms, independent of one another
EMPTY = Tree(torch.empty(0, dtype=torch.long), [])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What one token is drawn with: the deployed settings and the seed of the position-keyed coins."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


class State(NamedTuple):
    """What a method may look at: the text so far, whose last token is pending, and how deep a draft can count."""

    ids: Sequence[int]
    max_depth: int
    key: int  # of the prompt, for the drafter's own position-keyed draws
    sampling: Sampling
    lend: Callable[[Sequence[int]], LentCache]  # the verifier's cache of some layers: every token but the pending one
    features: Callable[[], Tensor]  # [T, C] of the layers the method reads: likewise every token but the pending one
    drafted: Tensor | None = None  # scores [window, V_d] of a pass that was made for many texts at once (batch.py)


class Method(Protocol):
    """How a text is drafted. One object serves many prompts, one at a time.

    `reads`: layers of the verifier whose hidden states it wants in `State.features` (features.py); usually none.
    """

    reads: Sequence[int]

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        """Forget the last prompt; read this one and its features, ahead of the clock of the cycles."""
        ...

    def propose(self, state: State) -> Proposal: ...


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One turn of the loop."""

    tokens: list[int]  # emitted: accepted draft tokens, then the verifier's own; cut at a stop
    accepted: int  # L, before the cut
    proposed: int  # depth of the judged path
    nodes: int
    draft_s: float
    verify_s: float
    other_s: float
    stop: Literal["", "stop", "length"]


@dataclass
class Text:
    """A decoded text and its account. The first token comes from the prefill and is in no cycle."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    prefill_s: float = 0.0
    finish_reason: str = ""

    @property
    def decode_s(self) -> float:
        return sum(c.draft_s + c.verify_s + c.other_s for c in self.cycles)

    def seconds(self, part: Literal["draft_s", "verify_s", "other_s"]) -> float:
        return sum(getattr(cycle, part) for cycle in self.cycles)
