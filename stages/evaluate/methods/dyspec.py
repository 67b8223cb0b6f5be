"""DySpec (arXiv 2410.11744): a token tree that grows where the student's probabilities say it will be accepted.

The best tree of N nodes has those with the largest product of q along their path; Match. The paper's greedy algorithm
(Alg. 1) takes the best node still open, runs the student on it and opens its children: N passes of one row. A node is
among the N best only if its parent is one of the N - 1 best. So here one pass runs every node of one depth that is
among the N - 1 best scored so far, and scores the `width` likeliest children of each: G passes at most, the first one
with the pending token. The tree is the very one that Alg. 1 grows over these children, at the price of rows whose node
is overtaken later. (The paper's own cure, Alg. 2, also goes depth by depth, but takes what lies above a threshold, so
that the number of nodes varies.)

Two further differences: the paper draws siblings without replacement and verifies by recursive rejection, which needs
q; here siblings are the likeliest words and Match verifies, which is lossless for any tree fixed before the coins. And
a tree may stop at a threshold, small where the student is unsure, as our own trees do.

Letters: N nodes, M rows of a pass, V_d draft vocabulary, T rows seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tree import Tree
from stages.common.drafters import Drafter
from stages.common.params import Count, Share
from stages.evaluate.causal import CausalMethod
from stages.evaluate.contract import Proposal, State

RULE = "match"
KIND = "causal"  # of its drafter


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # the deepest a node can be, and passes of the student at most
    nodes: Count  # N, at most
    width: Count  # words tried behind each node
    threshold: Share  # smallest product of q along a node's path; 0: none


class Scored:
    """Every node scored so far, in that order: parents before children. Values are sums of log q along the path."""

    def __init__(self, *, width: int, threshold: float = 0.0) -> None:
        self.width = width
        self.floor = math.log(threshold) if threshold > 0 else -math.inf
        self.words: list[int] = []  # draft ids
        self.parents: list[int] = []
        self.values: list[float] = []

    def add(self, parents: Sequence[int], logq_MVd: Tensor) -> None:
        """The likeliest words behind each of these nodes (-1: the pending token). q = 0 is never proposed."""
        if bool(torch.isnan(logq_MVd).any()):
            raise ValueError("dyspec: NaN in the student's log-probabilities; check its weights and dtype")
        top = logq_MVd.topk(min(self.width, logq_MVd.shape[-1]), dim=-1)
        for parent, logq, words in zip(parents, top.values.tolist(), top.indices.tolist(), strict=True):
            above = self.values[parent] if parent >= 0 else 0.0
            for value, word in zip(logq, words, strict=True):
                if value > -torch.inf and above + value >= self.floor:
                    self.words.append(word)
                    self.parents.append(parent)
                    self.values.append(above + value)

    def best(self, count: int) -> list[int]:
        """The `count` nodes of the largest values, in order of scoring. Ties go to the earlier, so to the parent."""
        ranked = sorted(range(len(self.values)), key=lambda node: -self.values[node])
        return sorted(ranked[:count])

    def tree(self, count: int, d2t: Tensor) -> Tree:
        """The best nodes: the parent of each is among them, since values fall along a path."""
        kept = self.best(count)
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        words_N = torch.tensor([self.words[node] for node in kept], dtype=torch.long, device=d2t.device)
        return Tree(d2t[words_N], [place[self.parents[node]] for node in kept])


class DySpec(CausalMethod):
    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    @torch.inference_mode()
    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        p, committed = self.params, self.read.length
        scored, first = Scored(width=p.width, threshold=p.threshold), 0
        row_of: dict[int, int] = {}  # where the cache holds a node
        scored.add([-1], logits_GVd.log_softmax(-1))
        for depth in range(1, self.window(state)):
            layer = [node for node in scored.best(p.nodes - 1) if node >= first]
            if not layer:
                break
            first = len(scored.values)
            scored.add(layer, self._run(layer, scored, row_of, depth=depth, committed=committed))
        self.read.roll_back(committed)
        return Proposal(scored.tree(p.nodes, self.drafter.d2t))

    def _run(
        self, layer: Sequence[int], scored: Scored, row_of: dict[int, int], *, depth: int, committed: int
    ) -> Tensor:
        """log q [M, V_d] behind nodes of one depth: a row sees the committed rows, those of its path, and itself."""
        device, cached, rows = self.drafter.device, self.read.length, len(layer)
        sees_MT = torch.zeros(rows, cached + rows, dtype=torch.bool)
        sees_MT[:, :committed] = True
        for row, node in enumerate(layer):
            row_of[node] = cached + row
            while node >= 0:
                sees_MT[row, row_of[node]] = True
                node = scored.parents[node]
        ids_1M = self.words(torch.tensor([[scored.words[node] for node in layer]], device=device))
        positions_1M = torch.full((1, rows), committed + depth - 1, device=device)
        hidden_1MD = self.drafter(ids_1M, positions_1M, sees_MT.to(device), self.read)
        self.read.keep(list(range(rows)))
        return self.drafter.logits(hidden_1MD[0]).log_softmax(-1)


def build(params: Params, drafter: Drafter) -> DySpec:
    return DySpec(params, drafter)
