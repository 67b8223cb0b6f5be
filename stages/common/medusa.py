"""Medusa and Hydra: G heads on the verifier's last hidden state, each for one place of the window.

    places     ..  t      t + 1     t + 2  ..  t + 1 + G
    tokens     ..  x_-1   x_0       x_1    ..  x_G          x_0 is the pending token
    feature        f_t    not there yet

The last feature there is, f_t, is the state at the token before the pending one: `State.features` ends with it. It
speaks for x_0 = x_{t+1}, which the verifier emitted from it, so head j = 1 .. G speaks for x_{t+1+j}, the token j
places behind the pending one. That is the papers' own shift (their head j predicts t + j + 1 from f_t); here the
token in between is already known, and Hydra's heads read it.

    Medusa   arXiv 2401.10774, section 2.1: head j is W2_j (f + SiLU(W1_j f)); it sees no token, so q is a product of
             marginals. W1 starts at zero and W2 at the verifier's head: untrained, every head says what the verifier
             said at f_t.
    Hydra    arXiv 2402.05109: head j also reads the embeddings of x_0 .. x_{j-1}, so q_j depends on the draft before
             it: W2 (f + B_j SiLU(A_j [f; e(x_0); ..; e(x_{j-1})])), with f and the embeddings divided by their root
             mean square inside [..]. B starts at zero. W2, the projection, is shared by all heads here.

Letters: G heads, X places or nodes, J tokens before a draft token, V_d draft words, D the verifier's width.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.tree import Tree, best_first
from stages.common.features import FINAL
from stages.common.heads import Head
from stages.common.models import Verifier

READS = (FINAL,)


class WindowHeads(Head):
    """What both share: G heads, and trees of the words they find likely."""

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, heads: int) -> None:
        assert reads == READS, f"these heads read what the verifier's own reads, layer {FINAL}"
        super().__init__(verifier, reads=reads, d2t=d2t)
        self.heads = heads

    @classmethod
    def build(cls, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, **settings: Any) -> Self:
        return cls(verifier, reads=reads, d2t=d2t, **settings)

    def settings(self) -> dict[str, Any]:
        return {"heads": self.heads}

    @abstractmethod
    def initialise(self, *, seed: int) -> None:
        """The weights that training starts from; needs the verifier's head as it was loaded, not packed."""

    @abstractmethod
    def scores(self, j: int, feature_XD: Tensor, before_XJ: Tensor) -> Tensor:
        """Float32 scores [X, V_d] of x_j, from f_t and verifier ids of x_0 .. x_{j-1} (further columns: unread)."""

    @abstractmethod
    def tree(self, feature_D: Tensor, pending: int, *, depth: int, nodes: int, width: int, threshold: float) -> Tree:
        """At most `nodes` nodes of depth up to `depth`, of the verifier's ids, by the product of q along their path."""

    def _verifier_rows(self) -> Tensor:
        """The verifier's head [V_d, D] for the draft words."""
        return self.verifier.lm_head.get_parameter("weight").detach().float()[self.d2t]


class Projections(nn.Module):
    """A projection of its own for each head, in one weight [G, V_d, D]: the optimizer's "head"."""

    def __init__(self, heads: int, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, words, width))

    def forward(self, hidden_XD: Tensor, head: int) -> Tensor:
        return F.linear(hidden_XD, self.weight[head])


class MedusaHead(WindowHeads):
    kind: ClassVar[str] = "medusa"

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, heads: int) -> None:
        super().__init__(verifier, reads=reads, d2t=d2t, heads=heads)
        width = verifier.width
        self.residuals = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(heads))
        self.lm_head = Projections(heads, len(d2t), width)

    @torch.no_grad()
    def initialise(self, *, seed: int) -> None:
        for layer in self.residuals:
            nn.init.zeros_(layer.get_parameter("weight"))
        weight_GVD = self.lm_head.get_parameter("weight")
        weight_GVD.copy_(self._verifier_rows().expand_as(weight_GVD))

    def scores(self, j: int, feature_XD: Tensor, before_XJ: Tensor) -> Tensor:
        hidden_XD = feature_XD + F.silu(self.residuals[j - 1](feature_XD))
        return self.lm_head(hidden_XD, j - 1).float()

    def tree(self, feature_D: Tensor, pending: int, *, depth: int, nodes: int, width: int, threshold: float) -> Tree:
        """The best one under the marginals (kernels/tree.py)."""
        none_11 = torch.empty(1, 0, dtype=torch.long, device=self.device)
        scores_GV = torch.cat([self.scores(j, feature_D[None], none_11) for j in range(1, depth + 1)])
        best = best_first(torch.log_softmax(scores_GV, -1), nodes=nodes, width=width, threshold=threshold)
        return best._replace(tokens_N=self.d2t[best.tokens_N])


class HydraHead(WindowHeads):
    kind: ClassVar[str] = "hydra"

    def __init__(self, verifier: Verifier, *, reads: tuple[int, ...], d2t: Tensor, heads: int) -> None:
        super().__init__(verifier, reads=reads, d2t=d2t, heads=heads)
        width = verifier.width
        self.inner = nn.ModuleList(nn.Linear((1 + j) * width, width, bias=False) for j in range(1, heads + 1))
        self.outer = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(heads))
        self.lm_head = nn.Linear(width, len(d2t), bias=False)

    @torch.no_grad()
    def initialise(self, *, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            weight_DE = inner.get_parameter("weight")
            weight_DE.copy_(torch.randn(weight_DE.shape, generator=g) / math.sqrt(weight_DE.shape[1]))
            nn.init.zeros_(outer.get_parameter("weight"))
        self.lm_head.get_parameter("weight").copy_(self._verifier_rows())

    def scores(self, j: int, feature_XD: Tensor, before_XJ: Tensor) -> Tensor:
        words_XE = _unit(self.embed(before_XJ[:, :j]).to(feature_XD.dtype)).flatten(1)
        inner_XD = F.silu(self.inner[j - 1](torch.cat([_unit(feature_XD), words_XE], 1)))
        return self.lm_head(feature_XD + self.outer[j - 1](inner_XD)).float()

    @torch.no_grad()
    def tree(self, feature_D: Tensor, pending: int, *, depth: int, nodes: int, width: int, threshold: float) -> Tree:
        """Grown depth by depth, one pass of a head for all nodes that are expanded.

        The root is expanded, then of each depth the `width` nodes with the largest product of q; an expanded node gets
        its `width` likeliest words for children. Of all that were scored the `nodes` best stay, none below `threshold`:
        a product never exceeds its parent's, so what stays is a tree. What cannot stay is not expanded.
        """
        floor = math.log(threshold) if threshold > 0 else -math.inf
        words = min(width, len(self.d2t))
        words_N = torch.empty(0, dtype=torch.long, device=self.device)  # scored so far, a parent before its child
        parents_N, log_N = words_N, torch.empty(0, device=self.device)
        before_XJ = torch.tensor([[pending]], device=self.device)  # paths of the nodes to expand, and who they are
        index_X, log_X = torch.tensor([-1], device=self.device), torch.zeros(1, device=self.device)
        for j in range(1, depth + 1):
            logq_XV = torch.log_softmax(self.scores(j, feature_D.expand(len(index_X), -1), before_XJ), -1)
            if bool(torch.isnan(logq_XV).any()):
                raise ValueError("hydra: NaN in the drafter's log-probabilities; check its weights and dtype")
            top = logq_XV.topk(words)
            log_C, words_C = (log_X[:, None] + top.values).flatten(), self.d2t[top.indices.flatten()]
            row_C = torch.arange(len(index_X), device=self.device).repeat_interleave(words)
            first = len(words_N)
            words_N, log_N = torch.cat([words_N, words_C]), torch.cat([log_N, log_C])
            parents_N = torch.cat([parents_N, index_X[row_C]])
            least = float(log_N.topk(nodes).values[-1]) if len(log_N) >= nodes else -math.inf
            log_X, chosen_X = log_C.topk(min(width, len(log_C)))
            chosen_X = chosen_X[(log_X >= floor) & (log_X > least)]
            if len(chosen_X) == 0:
                break
            log_X, index_X = log_C[chosen_X], chosen_X + first
            before_XJ = torch.cat([before_XJ[row_C[chosen_X]], words_C[chosen_X, None]], 1)
        return _best(words_N, parents_N, log_N, nodes=nodes, floor=floor)


def _best(words_N: Tensor, parents_N: Tensor, log_N: Tensor, *, nodes: int, floor: float) -> Tree:
    """The `nodes` largest of at least `floor`, largest first; ties to the earlier one, a parent before its child."""
    order = log_N.argsort(descending=True, stable=True)[:nodes]
    order = order[(log_N[order] >= floor) & (log_N[order] > -torch.inf)].tolist()
    place = {-1: -1} | {node: new for new, node in enumerate(order)}
    return Tree(words_N[order], [place[parent] for parent in parents_N[order].tolist()])


def _unit(x_XD: Tensor) -> Tensor:
    """Divided by the root mean square of its last dimension: features and embeddings differ in scale by model."""
    return F.rms_norm(x_XD, x_XD.shape[-1:])
