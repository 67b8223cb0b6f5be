"""One draft denoised in several passes (the paper's Fig. 9); Match, whatever T_v.

After each pass the most confident undecided places are revealed, and the window is drafted again with their words in
place of masks (kernels/window.py: row j holds x_j where it is revealed). The last pass decides the rest. With one step
this is `specdiff2_train`'s draft. Which places are revealed, and so the law of a draft, depends on all passes: no q is
its law, and only Match is lossless (METHOD.md section 3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import sampling
from kernels.tree import chain
from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.contract import Proposal, State
from stages.evaluate.drafting import WindowMethod, sample_drafts

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G
    steps: Count  # passes of the drafter, at most G
    temperature: NonNegative  # T_d

    def __post_init__(self) -> None:
        if self.steps > self.gamma:
            raise ValueError(f"steps: {self.steps} for a window of {self.gamma}; each step decides a token at least")


class Denoised(WindowMethod):
    def __init__(self, params: Params, drafter: Drafter) -> None:
        super().__init__(drafter, gamma=params.gamma)
        self.params = params

    def proposal(self, logits_GVd: Tensor, state: State) -> Proposal:
        window = len(logits_GVd)
        steps = min(self.params.steps, window)
        draft_G = torch.full((window,), self.drafter.mask_id, device=logits_GVd.device)
        masked_G = torch.ones(window, dtype=torch.bool, device=logits_GVd.device)
        for step in range(1, steps + 1):
            q_GVd = sampling.probabilities(logits_GVd, temperature=self.params.temperature)
            (words_G,) = sample_drafts(q_GVd, 1, state)  # a place keeps its coin from pass to pass
            sure_G = self.confidence(logits_GVd, words_G).masked_fill(~masked_G, -torch.inf)
            new = int(masked_G.sum()) - window * (steps - step) // steps
            chosen = sure_G.topk(new).indices
            draft_G[chosen] = self.words(words_G[chosen])
            masked_G[chosen] = False
            if step < steps:
                again_XVd = self.again(draft_G[:-1], state)
                logits_GVd = torch.cat([logits_GVd[: window - len(again_XVd)], again_XVd])
        return Proposal(chain(draft_G))

    @staticmethod
    def confidence(logits_GVd: Tensor, words_G: Tensor) -> Tensor:
        """log q, at temperature 1, of the word drawn at each place: T_d may leave no difference between places."""
        return torch.log_softmax(logits_GVd, -1).gather(1, words_G[:, None])[:, 0]

    def again(self, rows_S: Tensor, state: State) -> Tensor:
        """Scores [G - 1, V_d] of x_2 .. x_G from a pass whose S = G - 1 window rows hold words and masks.

        x_1 is not drafted again: the row that speaks for it is causal and sees no window row. A prefix of its own is
        cached by now; the verifier's lacks the pending token, which is a row of every pass. Where the prefix is
        bidirectional that row sees what is revealed: scores [G, V_d] of x_1 .. x_G.
        """
        if self.drafter.prefix == "bidirectional":
            rows = self.rows(state.ids)
            return self.drafter.logits(self.drafter.window(rows, rows_S, None)[0, len(rows) - 1 :])
        cache = state.lend(self.drafter.layers) if self.cache is None else self.cache
        new = self.rows(state.ids)[cache.length :]
        return self.drafter.logits(self.drafter.window(new, rows_S, cache)[0, len(new) :])


def build(params: Params, drafter: Drafter) -> Denoised:
    return Denoised(params, drafter)
