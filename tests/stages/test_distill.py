"""Distill: every objective there is, with its settings, has the gradient that METHOD.md gives it."""

import pytest
import torch

from kernels import objectives
from stages.distill.__main__ import OBJECTIVES, Dpace, Plain, TrieStreak, loss_of

SETTINGS = {Plain: Plain(), TrieStreak: TrieStreak(drafts=4), Dpace: Dpace(smoothing=0.5)}
WINDOWS, G = 5, 3


def test_every_objective_can_be_trained():
    assert set(OBJECTIVES) == set(objectives.NAMES)


@pytest.mark.parametrize("name", objectives.NAMES)
def test_the_loss_has_the_weights_of_its_objective(name):
    g = torch.Generator().manual_seed(1)
    log_q_WG = torch.log(0.2 + 0.7 * torch.rand(WINDOWS, G, generator=g)).requires_grad_()
    valid_WG = torch.ones(WINDOWS, G, dtype=torch.bool)
    section, _ = OBJECTIVES[name]
    settings = SETTINGS[section]
    loss_of(name, settings)(log_q_WG, valid_WG, torch.ones(WINDOWS, G)).backward()
    expected = objectives.weights(name, log_q_WG.detach(), valid_WG, **vars(settings))
    assert log_q_WG.grad is not None
    torch.testing.assert_close(-log_q_WG.grad * WINDOWS, expected)


def test_dpace_without_smoothing_is_streak():
    log_q_WG = torch.log(torch.rand(WINDOWS, G, generator=torch.Generator().manual_seed(2)))
    valid_WG = torch.ones(WINDOWS, G, dtype=torch.bool)
    gradients = []
    for name, settings in (("dpace", Dpace(smoothing=0.0)), ("streak", Plain())):
        x = log_q_WG.clone().requires_grad_()
        loss_of(name, settings)(x, valid_WG, torch.ones(WINDOWS, G)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
