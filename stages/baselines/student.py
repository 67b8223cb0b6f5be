"""Student: a depth-pruned copy of the verifier that stays causal, the draft model of `speculative` and `dyspec`.

    python -m stages.baselines <profile> student

Cross-entropy of every output token but the first of the verifier's own texts: distillation from sequences (Kim and
Rush 2016, arXiv 1606.07947), the plainest way to train the draft model of speculative sampling (arXiv 2211.17192,
2302.01318). One causal pass over each text, since the drafter of the diffusion methods without its masks is a causal
model; its mask embedding is never read, and keeps its first value.

Letters: B texts, T tokens, X output tokens of all texts one behind another, V_d draft vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.cache
import kernels.window
from kernels.window import causal_mask
from stages.baselines import fit
from stages.baselines.fit import Fitting
from stages.common import drafters, entry, models, optimizers, provenance, scratch, store, training, validation, windows
from stages.common.drafters import Drafter, DrafterCard, prune, save_drafter
from stages.common.models import config_digest, end_ids_of, load_causal_lm
from stages.common.params import Count
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Row, Validation
from stages.common.windows import Example

NAME = "student"


@dataclass(frozen=True, kw_only=True)
class Params:
    layers: tuple[int, ...]  # the verifier's layers that stay
    draft_vocab: Count  # most frequent words of the training texts that can be drafted
    window: Count  # longest chain that the curve's column `streak` counts
    training: Fitting


class Outputs(NamedTuple):
    """What the student says before each output token, the second to the last of every text."""

    scores_XV: Tensor
    targets_X: Tensor  # draft ids; -1 outside the draft vocabulary


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    """Write the student's folder and curve."""
    f, folder = params.training, store.verifier_folder(profile)
    texts, held_out = fit.read_texts(profile, f, v, seed=seed)
    tokenizer = load_tokenizer(folder)
    drafter = untrained(folder, params, texts, words=tokenizer.size).to(device.name)
    digests = {
        "trajectories": store.sha256_file(store.trajectories_file(profile)),
        "verifier": store.sha256_folder(folder),
    }
    mark = scratch.fingerprint([params, v, seed], {**digests, "stage": NAME}, CODE)
    rows = fit.fit(
        drafter,
        texts,
        lambda chosen, number: loss(drafter, chosen),
        lambda: measure(drafter, held_out, window=params.window, sequences=f.sequences),
        f,
        seed=seed,
        scratch=scratch.scratch_folder(mark),
        title=NAME,
    )
    card = DrafterCard(
        kind="causal",
        block_size=1,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix="own",
        layers=params.layers,
        verifier_tokenizer=tokenizer.fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=drafter.vocab_size,
        draft_vocab_size=len(drafter.d2t),
        parameters=sum(p.numel() for p in drafter.trained() if p.requires_grad),
        objective="token_ce",
        provenance={"command": provenance.command(), "sha256": digests, "steps": f.steps, "seed": seed},
    )
    with store.replace_folder(store.drafter_folder(profile, NAME)) as out:
        save_drafter(out, drafter, card)
    store.write_text(store.curves_file(profile, NAME), training.curve_csv(rows))
    scratch.discard(mark)


def untrained(folder: Path, params: Params, texts: Sequence[Example], *, words: int) -> Drafter:
    """The layers that stay, with the rows of the verifier's head for the words of these texts."""
    causal_lm = load_causal_lm(folder, torch.float32)
    vocab_size = min(words, causal_lm.config.vocab_size)
    d2t = windows.draft_vocabulary(texts, size=params.draft_vocab, vocab_size=vocab_size, always=end_ids_of(folder))
    return learning(prune(causal_lm, layers=params.layers, d2t=d2t, vocab_size=vocab_size, prefix="own"))


def learning(drafter: Drafter) -> Drafter:
    """The same drafter with every weight free to move that a causal pass reads."""
    for p in drafter.trained():
        p.requires_grad_(p is not drafter.mask_embedding)
    return drafter


def outputs(drafter: Drafter, texts: Sequence[Example]) -> Outputs:
    """One causal pass over the texts, padded on the right: no real row looks at the padding behind it."""
    device, longest = drafter.device, max(len(e.ids) for e in texts)
    ids_BT = torch.stack([F.pad(torch.tensor(e.ids), (0, longest - len(e.ids))) for e in texts]).to(device)
    positions_BT = torch.arange(longest, device=device).expand(len(texts), longest)
    hidden_BTD = drafter(ids_BT, positions_BT, causal_mask(cached=0, new=longest, device=device))
    text_X = torch.tensor([b for b, e in enumerate(texts) for _ in e.anchors], device=device)
    place_X = torch.tensor([place for e in texts for place in e.anchors], device=device)
    return Outputs(drafter.logits(hidden_BTD[text_X, place_X - 1]), drafter.t2d[ids_BT[text_X, place_X]])


def loss(drafter: Drafter, texts: Sequence[Example]) -> Tensor:
    """Mean of -log q over the output tokens that can be drafted; the others have no term. 0 if there is none."""
    scores_XV, targets_X = outputs(drafter, texts)
    total = F.cross_entropy(scores_XV, targets_X, ignore_index=-1, reduction="sum")
    return total / max(1, int((targets_X >= 0).sum()))


@torch.no_grad()
def measure(drafter: Drafter, held_out: Sequence[Example], *, window: int, sequences: int) -> Row:
    """The curve's columns on held-out texts, `sequences` of them in a pass.

    loss: mean -log q of what can be drafted; empty if nothing can. accuracy: share of all output tokens that are the
    arg max. streak: accepted length at T_v = 0 of the arg-max chain of `window` tokens from a random output place of a
    random text, in expectation: the mean over every place of a text, then over texts. Teacher forcing is exact here:
    a chain is only extended while it is right, so what it has read is the text. Chains whose text ends within the
    window count what was there to accept.
    """
    losses, right, streaks = list[Tensor](), list[Tensor](), list[Tensor]()
    for start in range(0, len(held_out), sequences):
        chosen = held_out[start : start + sequences]
        scores_XV, targets_X = outputs(drafter, chosen)
        found_X = F.cross_entropy(scores_XV, targets_X, ignore_index=-1, reduction="none")
        losses.append(found_X[targets_X >= 0])
        right.append(scores_XV.argmax(-1) == targets_X)
        streaks += [runs(right_T, window).mean() for right_T in right[-1].split([len(e.anchors) for e in chosen])]
    losses_X = torch.cat(losses)
    return {
        "loss": float(losses_X.mean()) if len(losses_X) else None,
        "accuracy": float(torch.cat(right).float().mean()),
        "streak": float(torch.stack(streaks).mean()),
    }


def runs(right_T: Tensor, window: int) -> Tensor:
    """How many of the `window` tokens from each place on are right before one is not: float [T]."""
    return F.pad(right_T.long(), (0, window - 1)).unfold(0, window, 1).cumprod(-1).sum(-1).float()


CODE = [
    Path(module.__file__ or "")
    for module in (
        *(kernels.cache, kernels.window),
        *(drafters, models, optimizers, validation, windows, fit),
    )
] + [Path(__file__)]  # what a resumed run must find unchanged
