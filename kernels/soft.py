"""The soft-target objective: every place of a window is drawn to the verifier's whole law there, not to one word of it.

    loss = sum_j m_j KL(p~_j || q_j) = sum_j sum_d p_j(d) [log p~_j(d) - log q_j(d)],    p~_j = p_j / m_j

p_j is the verifier's law behind the text's own words before place j, d runs over the words that can be drafted, and
m_j = sum_d p_j(d) is the mass they cover: what p_j holds beside them is dropped, not shared out. The gradient is that
of -sum_d p_j(d) log q_j(d), the mean over x_j ~ p_j of masked_ce's term at that place, which is none either where x_j
cannot be drafted (kernels/objectives.py). So the weight m_j is what hard targets have on average, and a place whose
likely words cannot be drafted does not pull q towards the unlikely ones that can. The entropy of p~ moves no weight; it
makes 0 the least value, taken at q = p~. With all of p_j on one word the loss is masked_ce.

A word is one that cannot be drafted where log q is -inf. The sum is divided by the number of windows that hold a valid
place; with no such window the loss is 0 with gradient 0. Values behind `valid` are selected away, never multiplied by
0, so a NaN there is harmless; a NaN at a valid place reaches the loss.

Shapes: W windows, G window, V words. Float32 at least, in log space.
"""

import torch
from torch import Tensor


def soft(log_q_WGV: Tensor, log_p_WGV: Tensor, valid_WG: Tensor) -> Tensor:
    """The loss to minimise.

    log_q: the drafter's, normalised over the words it can draft. log_p: the verifier's, normalised over all its words,
    so that the columns given may sum to less than 1; no gradient goes there. valid: false past the end of the text.
    """
    log_q_WGV, log_p_WGV = _wide(log_q_WGV), _wide(log_p_WGV.detach())
    usable_WGV = valid_WG[..., None] & (log_q_WGV != -torch.inf) & (log_p_WGV != -torch.inf)
    covered_WG1 = torch.where(usable_WGV, log_p_WGV, -torch.inf).logsumexp(-1, keepdim=True)
    log_m_WG1 = torch.where(covered_WG1 == -torch.inf, 0.0, covered_WG1)
    log_q_WGV, log_p_WGV = (torch.where(usable_WGV, x, 0.0) for x in (log_q_WGV, log_p_WGV))
    p_WGV = torch.where(usable_WGV, log_p_WGV.exp(), 0.0)
    terms_WGV = p_WGV * (log_p_WGV - log_m_WG1 - log_q_WGV)
    return torch.where(usable_WGV, terms_WGV, 0.0).sum() / valid_WG.any(dim=-1).sum().clamp(min=1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
