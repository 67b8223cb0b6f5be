"""What the trainings of `medusa` and `hydra` share: heads on the frozen verifier's features, each for its own place.

    loss = sum_j decay^j mean CE(q_j, x_j)      over every place of the output whose x_j can be drafted

Every output token but the first is x_1 of a window, and its features come from one pass of the verifier
(stages/features), so training never runs it.

Letters: G heads, X places, J = G tokens before a draft token, W windows, D width, V_d draft words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.tree
from stages.baselines import fit
from stages.baselines.fit import Fitting
from stages.common import (
    entry,
    features,
    heads,
    medusa,
    models,
    optimizers,
    provenance,
    scratch,
    store,
    training,
    windows,
)
from stages.common.features import Features, features_folder
from stages.common.heads import HeadCard, save_head
from stages.common.medusa import READS, WindowHeads
from stages.common.models import config_digest, end_ids_of, load_verifier
from stages.common.params import Count, Share
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Row, Validation
from stages.common.windows import Example

Store = Mapping[str, Tensor] | Features  # float16 [T, D] by text id


@dataclass(frozen=True, kw_only=True)
class Params:
    heads: Count  # G
    draft_vocab: Count  # most frequent words of the training texts that can be drafted
    decay: Share  # lambda: head j's loss weighs lambda^j
    training: Fitting


class Places(NamedTuple):
    """What the heads are given at places of a text, and what they should say."""

    feature_XD: Tensor  # f_t, the state at the token before the pending one
    before_XJ: Tensor  # verifier's ids of x_0 .. x_{G-1}, x_0 the pending token; 0 past the end
    targets_XG: Tensor  # draft ids of x_1 .. x_G; -1 outside the draft vocabulary and past the end


def train_heads(
    profile: str, cls: type[WindowHeads], params: Params, v: Validation, device: entry.Device, *, seed: int
) -> None:
    """Train one kind of heads on a profile's trajectories; write its folder and its curve."""
    folder, states = store.verifier_folder(profile), features_folder(profile)
    held_in, held_out = fit.read_texts(profile, params.training, v, seed=seed)
    verifier = load_verifier(folder, dtype=torch.float32, device=device.name, packed=False)
    d2t = windows.draft_vocabulary(
        held_in, size=params.draft_vocab, vocab_size=verifier.vocab_size, always=end_ids_of(folder)
    )
    model = cls.build(verifier, reads=READS, d2t=d2t.to(device.name), heads=params.heads).to(device.name)
    model.initialise(seed=seed)

    digests = {
        "trajectories": store.sha256_file(store.trajectories_file(profile)),
        "features": store.sha256_folder(states),
        "verifier": store.sha256_folder(folder),
    }
    mark = scratch.fingerprint([params, v, seed], {**digests, "stage": cls.kind}, CODE)
    unfinished = scratch.scratch_folder(mark)
    rows = fit_heads(model, held_in, held_out, Features(states, READS), params, v, seed=seed, unfinished=unfinished)
    card = HeadCard(
        kind=cls.kind,
        target_layer_ids=model.reads,
        settings=model.settings(),
        verifier_tokenizer=load_tokenizer(folder).fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=model.vocab_size,
        draft_vocab_size=len(d2t),
        parameters=sum(p.numel() for p in model.trained()),
        objective=cls.kind,
        provenance={
            "command": provenance.command(),
            "sha256": digests,
            "steps": params.training.steps,
            "seed": seed,
        },
    )
    with store.replace_folder(store.drafter_folder(profile, cls.kind)) as out:
        save_head(out, model, card)
    store.write_text(store.curves_file(profile, cls.kind), training.curve_csv(rows))
    scratch.discard(mark)


def fit_heads(
    model: WindowHeads,
    held_in: Sequence[Example],
    held_out: Sequence[Example],
    states: Store,
    params: Params,
    v: Validation,
    *,
    seed: int,
    unfinished: Path,
) -> list[Row]:
    """Train in place; the curve's rows. Continues from what is in `unfinished`."""

    def loss(texts: Sequence[Example], number: int) -> Tensor:
        return heads_loss(model, [places(model, e, list(e.anchors), states) for e in texts], decay=params.decay)

    def measure() -> Row:
        return validate(model, held_out, states, v, seed=seed)

    return fit.fit(model, held_in, loss, measure, params.training, seed=seed, scratch=unfinished, title=model.kind)


def places(model: WindowHeads, e: Example, anchors: Sequence[int], states: Store) -> Places:
    """At each anchor, the place a of x_1: the pending token stands at a - 1, the last feature at a - 2."""
    rows_TD, at_X = states[e.id], torch.tensor(anchors)
    assert len(rows_TD) >= len(e.ids), (e.id, rows_TD.shape, len(e.ids))
    padded = F.pad(torch.tensor(e.ids), (0, model.heads))
    place_XG = at_X[:, None] + torch.arange(model.heads)
    targets_XG = torch.where(place_XG < len(e.ids), model.t2d.cpu()[padded[place_XG]], -1)
    feature_XD = rows_TD[at_X - 2].to(device=model.device, dtype=model.dtype)
    return Places(feature_XD, padded[place_XG - 1].to(model.device), targets_XG.to(model.device))


def heads_loss(model: WindowHeads, found: Sequence[Places], *, decay: float) -> Tensor:
    """sum_j decay^j times the mean of -log q_j(x_j) over the places where x_j can be drafted (0 if there are none)."""
    feature_XD, before_XJ, targets_XG = (torch.cat(parts) for parts in zip(*found, strict=True))
    total = feature_XD.new_zeros(())
    for j, targets_X in enumerate(targets_XG.unbind(1), 1):
        usable_X = targets_X >= 0
        scores_YV = model.scores(j, feature_XD[usable_X], before_XJ[usable_X])
        summed = F.cross_entropy(scores_YV, targets_X[usable_X], reduction="sum")
        total = total + decay**j * summed / usable_X.sum().clamp(min=1)
    return total


@torch.no_grad()
def validate(model: WindowHeads, held_out: Sequence[Example], states: Store, v: Validation, *, seed: int) -> Row:
    """Teacher-forced acceptance at `v.windows` random places of each held-out text, the same at every evaluation.

    loss: mean -log q_j(x_j) over heads and places where x_j can be drafted; empty if nothing can. streak: accepted
    length of the arg-max chain; accept_j: share of places where it is right to depth j; both as in
    stages/common/validation.py, and exact for heads that read the draft, since a chain goes on only while it is the
    text. accuracy_j: share of places where head j's own arg max is right, given the text before it.
    """
    hits, losses = [], []
    for number, e in enumerate(held_out):
        anchors = spread(e.anchors, v.windows, seed=seed * windows.SEED_STRIDE + number)
        feature_WD, before_WJ, targets_WG = places(model, e, anchors, states)
        for j, targets_W in enumerate(targets_WG.unbind(1), 1):
            logq_WV = torch.log_softmax(model.scores(j, feature_WD, before_WJ), -1)
            hits.append(logq_WV.argmax(-1) == targets_W)
            usable_W = targets_W >= 0
            losses.append(-logq_WV[usable_W].gather(1, targets_W[usable_W, None])[:, 0])
    hits_EGW = torch.stack(hits).unflatten(0, (len(held_out), model.heads)).float()
    right_G, chain_G = hits_EGW.mean((0, 2)), hits_EGW.cumprod(1).mean((0, 2))
    losses_X = torch.cat(losses)
    row: Row = {"loss": float(losses_X.mean()) if len(losses_X) else None, "streak": float(chain_G.sum())}
    row |= {f"accept_{j + 1}": float(value) for j, value in enumerate(chain_G)}
    return row | {f"accuracy_{j + 1}": float(value) for j, value in enumerate(right_G)}


def spread(anchors: range, count: int, *, seed: int) -> list[int]:
    """`count` anchors, as different as the text allows."""
    g = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(len(anchors), generator=g) for _ in range(-(-count // len(anchors)))]
    return (torch.cat(shuffled)[:count] + anchors.start).tolist()


CODE = [
    Path(module.__file__ or "") for module in (kernels.tree, features, fit, heads, medusa, models, optimizers, windows)
] + [Path(__file__)]  # what a resumed run must find unchanged
