"""Training with soft targets: the verifier's whole law at every place of a window, from the states kept of it.

    log p of place t  =  log_softmax(head(state at token t - 1) / temperature)        columns: the draft words

The states stand behind the last norm and come from the verifier's pass over its own text (stages/features), so training
runs the verifier's head and nothing else of it. The law is normalised over all of the verifier's words and then cut to
the draft vocabulary; kernels/soft.py says what becomes of the rest.

The loop is that of stages/common/training.py, whose objectives see log q of the text's own words alone: the same order
of texts, windows, optimizers, validation and saved state.

Letters: B texts, P places, W windows, G window, V_d draft words.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.soft import soft
from stages.common import training, windows
from stages.common.drafters import Drafter
from stages.common.features import FINAL, INDEX, Features, features_folder
from stages.common.models import Verifier
from stages.common.training import Texts, Training
from stages.common.validation import Row, Validation
from stages.common.windows import Example


def states_of(profile: str) -> Features:
    """The verifier's states behind its last norm. Raises ValueError that says what to set where they are not kept."""
    folder = features_folder(profile)
    if not (folder / INDEX).exists():
        raise ValueError(
            f"{folder}: soft targets are made from the verifier's hidden states, which are not kept; write "
            f"features: [verifier] in params.yaml, with {FINAL} among {profile}.features.layers, and run dvc repro"
        )
    return Features(folder, [FINAL])


class Teacher:
    """log p of draft words at places of a text.

    d2t: the verifier's ids of the draft words. temperature: of p; above 0.
    """

    def __init__(
        self, verifier: Verifier, states: Features | Mapping[str, Tensor], d2t: Tensor, *, temperature: float
    ) -> None:
        self.verifier, self.states, self.d2t, self.temperature = verifier, states, d2t, temperature

    @torch.no_grad()
    def log_p(self, text_id: str, places_P: Tensor) -> Tensor:
        """[P, V_d] float32; it sums to what the draft words cover of p. places: from 1 on."""
        state_PD = self.states[text_id][places_P - 1].to(device=self.verifier.device, dtype=self.verifier.dtype)
        scores_PV = self.verifier.logits(state_PD) / self.temperature
        return scores_PV.log_softmax(-1)[:, self.d2t]

    def windows(self, texts: Sequence[Example], target_BWG: Tensor) -> Tensor:
        """[B, W, G, V_d] of windows over `texts`; of the last token's place where one is beyond the end."""
        found = []
        for text, target_WG in zip(texts, target_BWG, strict=True):
            # Windows overlap: a place is asked for once.
            places_P, at_WG = target_WG.clamp(max=len(text.ids) - 1).unique(return_inverse=True)
            found.append(self.log_p(text.id, places_P)[at_WG])
        return torch.stack(found)


def soft_loss(drafter: Drafter, teacher: Teacher, texts: Sequence[Example], batch: windows.Batch) -> Tensor:
    """The loss of one micro-batch of fully masked windows."""
    log_q_BWGV = drafter.logits(windows.hidden(drafter, batch)).log_softmax(-1)
    log_p_BWGV = teacher.windows(texts, batch.layout.target_BWG).to(log_q_BWGV.device)
    valid_BWG = batch.layout.valid_BWG.to(log_q_BWGV.device)
    return soft(log_q_BWGV.flatten(0, 1), log_p_BWGV.flatten(0, 1), valid_BWG.flatten(0, 1))


def train(
    drafter: Drafter,
    texts: Texts,
    teacher: Teacher,
    t: Training,
    v: Validation,
    *,
    seed: int,
    scratch: Path,
    keep: Callable[[int], None],
    title: str,
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """As training.train: in place, the curve's rows, from the state in `scratch` where there is one."""
    loss = partial(soft_loss, drafter, teacher)
    return training.train_on(
        drafter, texts, loss, t, v, seed=seed, scratch=scratch, keep=keep, title=title, dtype=dtype
    )
