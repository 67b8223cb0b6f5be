"""EAGLE-3 (arXiv 2503.01840): no feature to imitate, but training meets what drafting meets.

    loss = sum_s decay^s mean(-log q_s(x)) / sum_s decay^s,   s = 0 .. test_steps - 1

q_0 comes from the verifier's fused states; q_s from chains that have fed on the head's own states for s steps
(training-time test, eagle_rows.unroll), with the gradient through all of them. Means over the rows that a draft could
hold; a word outside the draft vocabulary has no term. Hard targets, as in `eagle`.
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
from stages.common import entry, store, windows
from stages.common.eagle import Eagle3Head
from stages.common.eagle_rows import collate, inside, unroll
from stages.common.features import Features
from stages.common.models import end_ids_of
from stages.common.params import Count, Share
from stages.common.validation import Validation
from stages.common.windows import Example

CODE = [Path(__file__), *one_layer.CODE]  # what a resumed run must find unchanged


@dataclass(frozen=True, kw_only=True)
class Params:
    reads: tuple[int, ...]  # layers of the verifier: low, middle, high
    layer: Count  # of the verifier: the head's decoder layer starts from it
    draft_vocab: Count  # most frequent words of the training texts that can be drafted
    test_steps: Count  # chains of how many words are simulated
    decay: Share  # weight of a step relative to the one before
    window: Count  # longest chain of the curve's streak
    training: Fitting


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    m = material(profile, params.training, v, device, reads=params.reads, seed=seed)
    d2t = windows.draft_vocabulary(
        m.training,
        size=params.draft_vocab,
        vocab_size=m.verifier.vocab_size,
        always=end_ids_of(store.verifier_folder(profile)),
    )
    head = Eagle3Head(m.verifier, reads=params.reads, d2t=d2t, layer=params.layer).to(device.name)
    loss = objective(head, m.features, params)
    fit_and_save(
        profile,
        "eagle3",
        head,
        loss,
        m,
        params,
        v,
        window=params.window,
        code=[Path(__file__), *one_layer.CODE],
        seed=seed,
    )


def objective(head: Eagle3Head, found: Features, params: Params) -> Loss:
    """The loss of a micro-batch. A step for which no text is long enough counts 0."""
    weights = [params.decay**step for step in range(params.test_steps)]

    def loss(texts: Sequence[Example], number: int) -> Tensor:
        rows = collate(texts, found, head)
        total = torch.zeros((), device=head.device)
        fused_BND = head.fuse(rows.features_BTC[:, :-1])
        for step, states_BND in enumerate(unroll(head, rows, fused_BND, steps=params.test_steps)):
            learnt_BN = inside(rows, step=step)
            summed = F.cross_entropy(head.logits(states_BND[learnt_BN]), rows.targets_BN[learnt_BN], reduction="sum")
            total = total + weights[step] * summed / learnt_BN.sum().clamp(min=1)
        return total / sum(weights)

    return loss
