"""Hydra (arXiv 2402.05109): heads that read the draft before them, trained by teacher forcing on the text.

Loss, places and measures are Medusa's; the tokens a head reads are the text's own, which is what a draft that is still
right consists of. The paper's Hydra++ adds a layer over the prefix and learns the verifier's law; neither is built:
the tokens are the targets, as Medusa's are.
"""

from stages.baselines.window_heads import Params, train_heads
from stages.common import entry
from stages.common.medusa import HydraHead
from stages.common.validation import Validation

__all__ = ["Params", "train"]


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    train_heads(profile, HydraHead, params, v, device, seed=seed)
