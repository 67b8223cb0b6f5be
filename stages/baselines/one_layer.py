"""What the trainings of `eagle` and `eagle3` share: what they read, the fit, and the folder they leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kernels.cache
import kernels.window
from stages.baselines import fit
from stages.baselines.fit import Fitting, Loss
from stages.common import (
    eagle,
    eagle_rows,
    entry,
    features,
    heads,
    models,
    optimizers,
    provenance,
    scratch,
    store,
    training,
    windows,
)
from stages.common.eagle import OneLayer
from stages.common.eagle_rows import measure
from stages.common.features import Features, features_folder
from stages.common.heads import HeadCard, save_head
from stages.common.models import Verifier, config_digest, load_verifier
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Validation
from stages.common.windows import Example

CODE = [
    Path(module.__file__ or "")
    for module in (
        *(kernels.cache, kernels.window),
        *(eagle, eagle_rows, features, fit, heads, models, optimizers, windows),
    )
] + [Path(__file__)]  # what a resumed run must find unchanged


class Material(NamedTuple):
    """What a head is trained with. `digests`: of the files it comes from."""

    verifier: Verifier
    training: Sequence[Example]
    held_out: Sequence[Example]
    features: Features
    digests: dict[str, str]


def material(
    profile: str, f: Fitting, v: Validation, device: entry.Device, *, reads: tuple[int, ...], seed: int
) -> Material:
    """The verifier in float32, the texts, and its states at their tokens."""
    folder = store.verifier_folder(profile)
    return Material(
        load_verifier(folder, dtype=torch.float32, device=device.name, packed=False),
        *fit.read_texts(profile, f, v, seed=seed),
        Features(features_folder(profile), reads),
        {
            "trajectories": store.sha256_file(store.trajectories_file(profile)),
            "features": store.sha256_folder(features_folder(profile)),
            "verifier": store.sha256_folder(folder),
        },
    )


def fit_and_save(
    profile: str,
    name: str,
    head: OneLayer,
    loss: Loss,
    m: Material,
    params: Any,
    v: Validation,
    *,
    window: int,
    code: Sequence[Path],
    seed: int,
) -> None:
    """Train the head from its beginning, or from where a killed run left it; write its folder and its curve."""
    f: Fitting = params.training
    head.begin(m.training[0].ids)
    mark = scratch.fingerprint([params, v, seed], {**m.digests, "stage": name}, code)
    rows = fit.fit(
        head,
        m.training,
        loss,
        lambda: measure(head, m.held_out, m.features, places=v.windows, window=window, sequences=f.sequences),
        f,
        seed=seed,
        scratch=scratch.scratch_folder(mark),
        title=name,
    )
    folder = store.verifier_folder(profile)
    card = HeadCard(
        kind=head.kind,
        target_layer_ids=head.reads,
        settings=head.settings(),
        verifier_tokenizer=load_tokenizer(folder).fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=head.vocab_size,
        draft_vocab_size=len(head.d2t),
        parameters=sum(p.numel() for p in head.trained()),
        objective=name,
        provenance={"command": provenance.command(), "sha256": m.digests, "steps": f.steps, "seed": seed},
    )
    with store.replace_folder(store.drafter_folder(profile, name)) as out:
        save_head(out, head, card)
    store.write_text(store.curves_file(profile, name), training.curve_csv(rows))
    scratch.discard(mark)
