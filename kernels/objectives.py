"""Training objectives of the drafter (METHOD.md section 4): losses to minimise, and their gradient weights.

With the verifier's own continuation x as target and C_m = prod_{i<=m} q_i(x_i), every objective is a sum over
a window whose gradient is sum_j W_j grad log q_j(x_j): `weights` gives W_j. streak is Eq. 6 of arXiv
2511.00606, dpace is arXiv 2605.18810.

Every loss is minus the sum over positions, divided by the number of windows that hold a valid position
(`distillspec` also by G); with no such window it is 0 with gradient 0.

Inputs: log_q_WG, log q_j(x_j) of each window, -inf where x_j is outside the draft vocabulary; valid_WG, false
past the end of the text (the end token itself is a target). From the first such position on C = 0: nothing
there can be accepted. Cross-entropy has no term at such a position. Values there are selected away, never
multiplied by 0, so a NaN behind `valid` is harmless; a NaN at a valid position reaches the loss.

Shapes: W windows, G window. Float32 at least, in log space.
"""

import torch
from torch import Tensor

NAMES = ("masked_ce", "first", "distillspec", "streak", "trie_streak", "ce_streak", "dpace")


def masked_ce(log_q_WG: Tensor, valid_WG: Tensor, position_weights_WG: Tensor | None = None) -> Tensor:
    """Maximises sum_j log q_j(x_j), for adaptation; position weights carry masked diffusion's 1/t."""
    log_q_WG, usable_WG = _usable(log_q_WG, valid_WG)
    if position_weights_WG is not None:
        log_q_WG = log_q_WG * torch.where(usable_WG, position_weights_WG, 0.0)
    return _loss(log_q_WG, valid_WG)


def first(log_q_WG: Tensor, valid_WG: Tensor) -> Tensor:
    """Maximises log q_1(x_1): AR-distillation (Fig. 2)."""
    log_q_WG, _ = _usable(log_q_WG, valid_WG)
    return _loss(log_q_WG[:, :1], valid_WG)


def distillspec(log_q_WG: Tensor, valid_WG: Tensor) -> Tensor:
    """Maximises mean_j q_j(x_j) over the G positions of the window, unusable ones counting 0 (App. A.5)."""
    log_q_WG, usable_WG = _usable(log_q_WG, valid_WG)
    return _loss(torch.where(usable_WG, log_q_WG.exp(), 0.0), valid_WG) / max(log_q_WG.shape[-1], 1)


def streak(log_q_WG: Tensor, valid_WG: Tensor) -> Tensor:
    """Maximises sum_m C_m (Eq. 6): the expected accepted length of one sampled draft under Match."""
    return _loss(_prefix(log_q_WG, valid_WG)[1], valid_WG)


def trie_streak(log_q_WG: Tensor, valid_WG: Tensor, *, drafts: int) -> Tensor:
    """Maximises sum_m [1 - (1 - C_m)^K]: the expected length of the trie walk over K sampled drafts."""
    assert drafts >= 1, drafts
    if drafts == 1:
        return streak(log_q_WG, valid_WG)
    log_c_WG, c_WG = _prefix(log_q_WG, valid_WG)
    # Two forms of one value: log1p/expm1 keep a small C, and the power has a finite gradient at C = 1.
    small_WG = c_WG < 0.5
    by_logs_WG = -torch.expm1(drafts * torch.log1p(-torch.where(small_WG, c_WG, 0.0)))
    miss_WG = -torch.expm1(torch.where(small_WG, -1.0, log_c_WG))
    return _loss(torch.where(small_WG, by_logs_WG, 1 - miss_WG**drafts), valid_WG)


def ce_streak(log_q_WG: Tensor, valid_WG: Tensor) -> Tensor:
    """Cross-entropy weighted by the detached C_{j-1}, as in the authors' code."""
    return _weighted(log_q_WG, valid_WG, weights("ce_streak", log_q_WG, valid_WG))


def dpace(log_q_WG: Tensor, valid_WG: Tensor, *, smoothing: float) -> Tensor:
    """Cross-entropy with detached streak weights of (1 - a) q + a; a = 0 has streak's gradient."""
    return _weighted(log_q_WG, valid_WG, weights("dpace", log_q_WG, valid_WG, smoothing=smoothing))


@torch.no_grad()
def weights(
    name: str,
    log_q_WG: Tensor,
    valid_WG: Tensor,
    *,
    drafts: int | None = None,
    smoothing: float | None = None,
) -> Tensor:
    """The detached weight [W, G] of grad log q_j, per window: a loss has minus this, over its divisor."""
    log_q_WG, usable_WG = _usable(log_q_WG, valid_WG)
    log_c_WG, c_WG = _prefix(log_q_WG, usable_WG)
    ones_WG = usable_WG.to(log_q_WG.dtype)
    match name:
        case "masked_ce":
            return ones_WG
        case "first":
            return torch.cat([ones_WG[:, :1], torch.zeros_like(ones_WG[:, 1:])], dim=-1)
        case "distillspec":
            return ones_WG * log_q_WG.exp() / log_q_WG.shape[-1]
        case "streak":
            return _sum_from(c_WG)
        case "trie_streak":
            assert drafts is not None, "trie_streak needs drafts"
            return _sum_from(drafts * (-torch.expm1(torch.where(c_WG > 0, log_c_WG, -1.0))) ** (drafts - 1) * c_WG)
        case "ce_streak":
            return ones_WG * torch.cat([torch.ones_like(c_WG[:, :1]), c_WG[:, :-1]], dim=-1)
        case "dpace":
            assert smoothing is not None, "dpace needs smoothing"
            smoothed_WG = torch.log((1 - smoothing) * log_q_WG.exp() + smoothing)
            return _sum_from(_prefix(smoothed_WG, usable_WG)[1])
    raise ValueError(f"unknown objective {name!r}: one of {', '.join(NAMES)}")


def _usable(log_q_WG: Tensor, valid_WG: Tensor) -> tuple[Tensor, Tensor]:
    """log q, 0 where no target is usable, and the mask of usable ones; NaN at a valid position stays."""
    log_q_WG = log_q_WG.to(torch.promote_types(log_q_WG.dtype, torch.float32))
    usable_WG = valid_WG & (log_q_WG != -torch.inf)
    return torch.where(usable_WG, log_q_WG, 0.0), usable_WG


def _prefix(log_q_WG: Tensor, valid_WG: Tensor) -> tuple[Tensor, Tensor]:
    """log C_m (finite where dead, so that exp and expm1 are) and C_m, 0 from the first unusable target on."""
    log_q_WG, usable_WG = _usable(log_q_WG, valid_WG)
    alive_WG = usable_WG.long().cumprod(dim=-1).bool()
    log_c_WG = torch.where(alive_WG, log_q_WG, 0.0).cumsum(dim=-1)
    return log_c_WG, torch.where(alive_WG, log_c_WG.exp(), 0.0)


def _sum_from(c_WG: Tensor) -> Tensor:
    """sum_{m>=j} c_m at every j."""
    return c_WG.flip(-1).cumsum(dim=-1).flip(-1)


def _weighted(log_q_WG: Tensor, valid_WG: Tensor, weights_WG: Tensor) -> Tensor:
    return _loss(weights_WG * _usable(log_q_WG, valid_WG)[0], valid_WG)


def _loss(terms_WX: Tensor, valid_WG: Tensor) -> Tensor:
    return -terms_WX.sum() / valid_WG.any(dim=-1).sum().clamp(min=1)
