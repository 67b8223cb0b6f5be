"""What the EAGLE methods share: a head that follows one text, and a tree grown level by level from its own states.

Of every committed token but the pending one the verifier's state is known, and the token behind it as well: rows of
such pairs are cached once, each when it is new. The last of them speaks for the first draft words. From there a node's
row joins the state its parent's row came to with the node's own word, sees the committed rows and the rows of its
ancestors, and is forgotten when the tree is done: the next cycle has the verifier's states instead.

Letters: F nodes of a level whose children are wanted, D width, V_d draft words, N nodes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.tree import Tree
from kernels.window import causal_mask
from stages.common.eagle import OneLayer
from stages.common.params import Count, Share
from stages.evaluate.contract import EMPTY, Proposal, State


@dataclass
class Scored:
    """Every node that was given a chance; a parent's number is lower than its child's."""

    words: list[int] = field(default_factory=list)  # the verifier's ids
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # log of the product of q along the path

    def branch(self, parents: Sequence[int], logq_FVd: Tensor, counts: Sequence[int], d2t: Tensor) -> list[int]:
        """The counts[i] likeliest words behind node parents[i], ties to the lower rank; never one of q = 0."""
        top = logq_FVd.topk(min(max(counts), logq_FVd.shape[1]), dim=-1)
        first = len(self.words)
        for parent, count, logqs, words in zip(
            parents, counts, top.values.tolist(), d2t[top.indices].tolist(), strict=True
        ):
            above = 0.0 if parent < 0 else self.chances[parent]
            for logq, word in zip(logqs[:count], words, strict=False):
                if logq > -torch.inf:
                    self.words.append(word)
                    self.parents.append(parent)
                    self.chances.append(above + logq)
        return list(range(first, len(self.words)))

    def best(self, nodes: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest of these nodes, ties to the lower number, in the order of their numbers."""
        return sorted(sorted(nodes, key=lambda node: -self.chances[node])[:count])

    def tree(self, nodes: Sequence[int]) -> Tree:
        """These nodes, in ascending order and each with its parent, as a tree."""
        place = {node: number for number, node in enumerate(nodes)} | {-1: -1}
        return Tree(
            torch.tensor([self.words[node] for node in nodes], dtype=torch.long),
            [place[self.parents[node]] for node in nodes],
        )


class GrowingMethod(ABC):
    """A method that grows a tree of up to `gamma` levels; how wide, its subclass says."""

    def __init__(self, head: OneLayer, *, gamma: int) -> None:
        self.head, self.gamma = head, gamma
        self.reads = head.reads
        self.cache = head.new_cache(64)  # row t: the state at token t, joined with token t + 1

    @abstractmethod
    def parents(self, scored: Scored, level: list[int], depth: int) -> dict[int, int]:
        """Which of a level's nodes get children, in ascending order, and how many; `depth`: the children's."""

    @abstractmethod
    def choose(self, scored: Scored) -> Tree:
        """What to verify of all that was scored."""

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self.cache.roll_back(0)
        if 2 <= len(prompt_ids) <= self.head.context_limit:
            self.read(prompt_ids, features_TC[:-1])

    def propose(self, state: State) -> Proposal:
        depth, features_TC = self.depth(state), state.features()
        assert len(features_TC) == len(state.ids) - 1, (len(features_TC), len(state.ids))
        return Proposal(self.choose(self.grow(self.read(state.ids, features_TC), depth))) if depth else Proposal(EMPTY)

    def depth(self, state: State) -> int:
        """How deep a tree may be now: its deepest words but the last stand on rows of the head."""
        room = self.head.context_limit - len(state.ids) + 2
        return max(0, min(self.gamma, state.max_depth, room))

    def read(self, ids: Sequence[int], features_TC: Tensor) -> Tensor:
        """State [1, D] behind the last of `ids`, which has no feature; caches the rows that are new since last time."""
        start, device = self.cache.length, self.head.device
        new = len(features_TC) - start
        words_1N = torch.tensor([list(ids[start + 1 :])], device=device)
        positions_1N = torch.arange(start, start + new, device=device)[None]
        sees = causal_mask(cached=start, new=new, device=device)
        states_1ND = self.head(words_1N, self.head.fuse(features_TC[start:])[None], positions_1N, sees, self.cache)
        self.cache.keep(list(range(new)))
        return states_1ND[0, -1:]

    def grow(self, states_FD: Tensor, depth: int) -> Scored:
        """Score `depth` levels, one pass of the head for each but the first. The cache ends as it was."""
        scored, committed = Scored(), self.cache.length
        wanted = self.parents(scored, [-1], 1)
        rows: dict[int, list[int]] = {-1: []}  # of a node with a row: its path's columns in the cache
        for level_depth in range(1, depth + 1):
            nodes = list(wanted)
            logq_FVd = torch.log_softmax(self.head.logits(states_FD), -1)
            level = scored.branch(nodes, logq_FVd, list(wanted.values()), self.head.d2t)
            wanted = self.parents(scored, level, level_depth + 1) if level_depth < depth else {}
            if not wanted:
                break
            above = [nodes.index(scored.parents[node]) for node in wanted]
            states_FD = self._pass(list(wanted), scored, states_FD[above], rows, committed + level_depth - 1)
        self.cache.roll_back(committed)
        return scored

    def _pass(
        self, nodes: list[int], scored: Scored, states_FD: Tensor, rows: dict[int, list[int]], position: int
    ) -> Tensor:
        """States [F, D] behind these nodes, given those behind their parents."""
        count, cached, device = len(nodes), self.cache.length, self.head.device
        committed = cached - (len(rows) - 1)
        for number, node in enumerate(nodes):
            rows[node] = [*rows[scored.parents[node]], cached + number]
        sees = torch.zeros(count, cached + count, dtype=torch.bool)
        sees[:, :committed] = True
        for number, node in enumerate(nodes):
            sees[number, rows[node]] = True
        words_1F = torch.tensor([[scored.words[node] for node in nodes]], device=device)
        positions_1F = torch.full((1, count), position, device=device)
        states_1FD = self.head(words_1F, states_FD[None], positions_1F, sees.to(device), self.cache)
        self.cache.keep(list(range(count)))
        return states_1FD[0]


@dataclass(frozen=True, kw_only=True)
class DynamicParams:
    drafter: str
    gamma: Count  # deepest level
    top_k: Count  # nodes of a level that get children, and children of each
    nodes: Count  # N kept of all that were scored, at most
    threshold: Share  # smallest product of q along a kept node's path


class DynamicTree(GrowingMethod):
    """EAGLE-2 (arXiv 2406.16858, sections 4.1 and 4.2): expand, then rerank, by the product of q along the path.

    Expansion: of each level the `top_k` likeliest nodes get their `top_k` likeliest words as children. Reranking: the N
    likeliest of all nodes scored. A child is never likelier than its parent and comes after it, so they form a tree.
    A node whose children cannot be among those N is not expanded: the tree is the same, for fewer rows of the head. The
    paper has no threshold (0); above 0 a tree is small where the head is unsure, as our own trees are.
    """

    def __init__(self, params: DynamicParams, head: OneLayer) -> None:
        super().__init__(head, gamma=params.gamma)
        self.params = params
        self.floor = math.log(params.threshold) if params.threshold > 0 else -math.inf

    def parents(self, scored: Scored, level: list[int], depth: int) -> dict[int, int]:
        if depth == 1:
            return dict.fromkeys(level, self.params.top_k)
        hopeful = set(self._best(scored, self.params.nodes - 1))
        chosen = scored.best([node for node in level if node in hopeful], self.params.top_k)
        return dict.fromkeys(chosen, self.params.top_k)

    def choose(self, scored: Scored) -> Tree:
        return scored.tree(self._best(scored, self.params.nodes))

    def _best(self, scored: Scored, count: int) -> list[int]:
        paying = [node for node, chance in enumerate(scored.chances) if chance >= self.floor]
        return scored.best(paying, count)
