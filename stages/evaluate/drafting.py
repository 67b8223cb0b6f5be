"""What the drafting methods share: a window drafter that follows one text, keyed draws from q, and the best tree.

What the drafter reads as its prefix is exact. A drafter with a prefix of its own caches committed tokens, each computed
once and without mask rows beside it (METHOD.md section 4), so a cycle costs the new tokens and the window; one that
reads the verifier's cache pays for the pending token and the window alone; a bidirectional one reads the whole text.

A foreign drafter reads the text in rows of its own (stages/common/translate.py), translated token by token as it grows;
what it proposes are words of the verifier.

Letters: G window, K drafts, N nodes, V vocabulary (V_d draft vocabulary).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sampling
from kernels.tree import best_first, prefix_trie
from stages.common.drafters import Drafter, ForeignDrafter
from stages.common.params import Count, NonNegative, Share
from stages.evaluate.contract import DRAFT_STREAM, EMPTY, Method, Proposal, Rule, State


class WindowMethod(ABC):
    """A method that turns one drafting pass into a proposal. `gamma`: the longest window it asks for."""

    reads = ()

    def __init__(self, drafter: Drafter, *, gamma: int) -> None:
        self.drafter = drafter
        self.gamma = gamma
        self.cache = drafter.new_cache(64) if drafter.prefix == "own" else None
        self._rows, self._read = list[int](), 0  # rows of the text, and how many of its tokens they are

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        """Read the prompt ahead of the clock, as far as the drafter's context goes."""
        self._rows, self._read = [], 0
        rows = self.rows(prompt_ids)
        if self.cache is not None:
            self.cache.roll_back(0)
            if len(rows) <= self.drafter.context_limit:
                self.drafter.extend(rows, self.cache)

    def rows(self, ids: Sequence[int]) -> Sequence[int]:
        """The text as the drafter reads it, from its tokens so far."""
        if not isinstance(self.drafter, ForeignDrafter):
            return ids
        self._rows += self.drafter.read(ids[self._read :])
        self._read = len(ids)
        return self._rows

    def propose(self, state: State) -> Proposal:
        window = self.window(state)
        return self.proposal(self.logits(state, window), state) if window else Proposal(EMPTY)

    @abstractmethod
    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        """What to verify, from the scores of the next G tokens over the draft vocabulary."""

    def window(self, state: State) -> int:
        """How many tokens a draft may have now: 0 when the text is at its limit or beyond the drafter's context."""
        room = self.drafter.context_limit - len(self.rows(state.ids)) + 1
        return max(0, min(self.gamma, state.max_depth, room))

    def logits(self, state: State, window: int) -> Tensor:
        """Scores [window, V_d] of the next tokens, from one pass over the tokens it has not read and the masks."""
        if state.drafted is not None:
            return state.drafted
        if self.drafter.prefix == "verifier":
            return self.drafter.draft(state.ids[-1:], window, state.lend(self.drafter.layers))
        rows = self.rows(state.ids)
        return self.drafter.draft(rows if self.cache is None else rows[self.cache.length :], window, self.cache)

    def words(self, draft_ids: Tensor) -> Tensor:
        """The verifier's ids of draft words."""
        return self.drafter.d2t[draft_ids]

    def full_vocabulary(self, q_GVd: Tensor) -> Tensor:
        """q over the verifier's vocabulary: 0 for every word that cannot be drafted.

        ValueError for a drafter with another tokenizer than the verifier's: rules that weigh p against q are for one.
        """
        if self.drafter.tokenizer == "own":
            raise ValueError(
                "params.yaml: evaluate: this method weighs p against q, token by token, and its drafter has another "
                "tokenizer than the verifier; only Match is exact then: use a specdiff2 method, or temperature: 0.0"
            )
        q_GV = q_GVd.new_zeros(q_GVd.shape[0], self.drafter.vocab_size)
        q_GV[:, self.drafter.d2t] = q_GVd
        return q_GV


class Ask(NamedTuple):
    """A drafting pass that a batch may make for its texts together."""

    drafter: Drafter
    window: int


def asked(method: Method, state: State) -> Ask | None:
    """What a method over the verifier's cache, or the one within it, is about to ask its drafter for."""
    window_method = getattr(method, "tree", method)
    if not isinstance(window_method, WindowMethod) or window_method.drafter.prefix != "verifier":
        return None
    window = window_method.window(state)
    return Ask(window_method.drafter, window) if window else None


def sample_drafts(q_GV: Tensor, drafts: int, state: State) -> Tensor:
    """K drafts [K, G] drawn from the marginals, independently of the verifier's coins; keyed by place."""
    first = len(state.ids)
    uniforms_GK = torch.stack(
        [
            sampling.keyed_uniform(
                drafts,
                seed=state.sampling.seed,
                prompt_key=state.key,
                position=first + j,
                stream=DRAFT_STREAM,
            )
            for j in range(q_GV.shape[0])
        ]
    ).to(q_GV.device)
    rows_GKV = q_GV[:, None].expand(-1, drafts, -1)
    return sampling.sample_rows(rows_GKV, uniforms_GK).T.contiguous()


@dataclass(frozen=True, kw_only=True)
class DraftsParams:
    drafter: str
    gamma: Count  # window G
    drafts: Count  # K
    temperature: NonNegative  # T_d


class KDrafts(WindowMethod):
    """All K drafts are verified in one pass, merged in a trie; `select` keeps one of them, `match` walks them all."""

    def __init__(self, params: DraftsParams, drafter: Drafter, *, rule: Rule) -> None:
        assert rule in ("select", "match")
        super().__init__(drafter, gamma=params.gamma)
        self.params = params
        self.rule: Rule = rule

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        q_GVd = sampling.probabilities(logits_GVd, temperature=self.params.temperature)
        drafts_KG = self.words(sample_drafts(q_GVd, self.params.drafts, state))
        trie = prefix_trie(drafts_KG)
        return Proposal(trie.tree, rule=self.rule, paths=trie.paths if self.rule == "select" else None)


@dataclass(frozen=True, kw_only=True)
class TreeParams:
    drafter: str
    gamma: Count  # window G: the deepest a node can be
    nodes: Count  # N, at most
    width: Count  # words tried at each depth
    threshold: Share  # smallest product of q along a node's path


class BestTree(WindowMethod):
    """The best deterministic tree of up to N nodes under the marginals, in order of the product of q along the path.

    A node is worth a row of the verifier's pass only if the product, the drafter's chance for it, pays for the row:
    where the drafter is unsure the tree is small.
    """

    def __init__(self, params: TreeParams, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        p = self.params
        best = best_first(torch.log_softmax(logits_GVd, -1), nodes=p.nodes, width=p.width, threshold=p.threshold)
        return Proposal(best._replace(tokens_N=self.words(best.tokens_N)))
