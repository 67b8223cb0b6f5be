"""Medusa (arXiv 2401.10774): parallel heads on the frozen verifier's features, trained as Medusa-1 of section 2.2."""

from stages.baselines.window_heads import Params, train_heads
from stages.common import entry
from stages.common.medusa import MedusaHead
from stages.common.validation import Validation

__all__ = ["Params", "train"]


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    train_heads(profile, MedusaHead, params, v, device, seed=seed)
