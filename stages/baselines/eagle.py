"""EAGLE (arXiv 2401.15077): the head learns the verifier's next state, and through its frozen head the next word.

    loss = feature_weight smooth-L1(state, f) + token_weight (-log q(x)), means over rows (and the state's numbers)

at the rows whose word a draft could be: from the second output token on. The states it is given are shifted by uniform
noise, so that it bears its own errors later. x is the verifier's word in the trajectory, a hard target; the paper takes
the verifier's whole distribution. Full vocabulary. EAGLE-2 (arXiv 2406.16858) drafts with the same weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.baselines import one_layer
from stages.baselines.fit import Fitting, Loss
from stages.baselines.one_layer import fit_and_save, material
from stages.common import entry
from stages.common.eagle import EagleHead
from stages.common.eagle_rows import collate, inside, unroll
from stages.common.features import FINAL, Features
from stages.common.params import Count, NonNegative
from stages.common.validation import Validation
from stages.common.windows import SEED_STRIDE, Example

CODE = [Path(__file__), *one_layer.CODE]  # what a resumed run must find unchanged


@dataclass(frozen=True, kw_only=True)
class Params:
    layer: Count  # of the verifier: the head's decoder layer starts from it
    noise: NonNegative  # largest shift of a feature's numbers in training
    feature_weight: NonNegative  # of the smooth-L1 loss
    token_weight: NonNegative  # of the cross-entropy
    window: Count  # longest chain of the curve's streak
    training: Fitting


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    m = material(profile, params.training, v, device, reads=(FINAL,), seed=seed)
    head = EagleHead(m.verifier, reads=(FINAL,), d2t=torch.arange(m.verifier.vocab_size), layer=params.layer).to(
        device.name
    )
    loss = objective(head, m.features, params, seed=seed)
    fit_and_save(profile, "eagle", head, loss, m, params, v, window=params.window, code=CODE, seed=seed)


def objective(head: EagleHead, found: Features, params: Params, *, seed: int) -> Loss:
    """The loss of a micro-batch; the noise of each is drawn from (seed, its number)."""

    def loss(texts: Sequence[Example], number: int) -> Tensor:
        rows = collate(texts, found, head)
        noise = torch.rand(
            rows.features_BTC.shape, generator=torch.Generator().manual_seed(seed * SEED_STRIDE + number)
        )
        given_BND = (rows.features_BTC + params.noise * (2 * noise - 1).to(head.device))[:, :-1]
        (states_BND,) = unroll(head, rows, head.fuse(given_BND), steps=1)
        learnt_BN = inside(rows, step=0)
        states_XD = states_BND[learnt_BN]
        feature = F.smooth_l1_loss(states_XD, rows.features_BTC[:, 1:][learnt_BN])
        token = F.cross_entropy(head.logits(states_XD), rows.targets_BN[learnt_BN])
        return params.feature_weight * feature + params.token_weight * token

    return loss
