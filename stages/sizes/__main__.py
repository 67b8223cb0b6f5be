"""Sizes: the drafter of `adapt` with other layers of the verifier kept, for speed-up against drafter size.

    python -m stages.sizes <profile> <size>

Reads   the verifier, data/<profile>/trajectories.parquet and contexts/
Writes  data/<profile>/drafters_of_size/<size>/, data/<profile>/curves/size_<size>.csv
Params  seed, <profile>.device, <profile>.adapt, <profile>.sizes.<size>, <profile>.validation

Everything but the layers is as in `adapt`: words, prefix, windows, steps, order of texts. Seconds of training are not
equal: a smaller drafter takes fewer.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import objectives
from stages.common import entry, lora, parallel, provenance, scratch, store, studies, training, windows
from stages.common.drafters import DrafterCard, Prefix, prune
from stages.common.models import config_digest, end_ids_of, load_causal_lm, load_tokenizer
from stages.common.params import Count, ParamError, keys_at, load
from stages.common.training import Training
from stages.common.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Adapt:
    """`<profile>.adapt`, as stage `adapt` reads it."""

    layers: tuple[int, ...]
    prefix: Prefix
    draft_vocab: Count
    training: Training


@dataclass(frozen=True, kw_only=True)
class Size:
    """`<profile>.sizes.<name>`."""

    layers: tuple[int, ...]  # the verifier's that stay: some of trajectories.keep_layers where the prefix is its own


def main(run: entry.Run) -> None:
    recipe, size = load(Adapt, run.profile, "adapt"), load(Size, run.profile, "sizes", run.size)
    v = load(Validation, run.profile, "validation")
    if parallel.launch(run, parallel.processes(recipe.training.parallel)):
        return
    with parallel.joined(run.device().name):
        grow(run.profile, run.size, size, recipe, v, run.device(), seed=load(int, "seed"))


def grow(profile: str, name: str, size: Size, recipe: Adapt, v: Validation, device: entry.Device, *, seed: int) -> None:
    """Train and write one drafter."""
    t, folder = recipe.training, store.verifier_folder(profile)
    if not size.layers:
        raise ParamError(f"params.yaml: {profile}.sizes.{name}.layers: empty; name a layer of the verifier at least")
    try:
        texts = training.read_texts(profile, t, v, prefix=recipe.prefix, layers=size.layers, seed=seed)
        causal_lm = load_causal_lm(folder, torch.float32)
        tokenizer = load_tokenizer(folder)
        vocab_size = min(tokenizer.size, causal_lm.config.vocab_size)
        d2t = windows.draft_vocabulary(
            texts.training, size=recipe.draft_vocab, vocab_size=vocab_size, always=end_ids_of(folder)
        )
        drafter = prune(causal_lm, layers=size.layers, d2t=d2t, vocab_size=vocab_size, prefix=recipe.prefix)
    except ValueError as error:  # what looks at layers takes them for adapt's
        raise ValueError(str(error).replace("adapt.layers", f"{profile}.sizes.{name}.layers")) from None
    parameters = sum(p.numel() for p in drafter.trained())
    lora.ready(drafter, t.lora, seed=seed)
    drafter = drafter.to(parallel.local_device(device.name))
    for p in drafter.trained():
        p.requires_grad_(True)

    digests = {**texts.digests, "verifier": store.sha256_folder(folder)}
    decides = [size, replace(recipe, training=training.alone(t)), training.state_form(t, device), v, seed]
    mark = scratch.fingerprint(decides, {**digests, "stage": f"size {name}"}, CODE)
    rows = training.train(
        drafter,
        texts,
        objectives.masked_ce,
        t,
        v,
        seed=seed,
        scratch=scratch.scratch_folder(mark),
        title=f"size {name}",
        dtype=training.passes_in(device),
    )
    card = DrafterCard(
        kind="masked_window",
        block_size=t.window,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix=recipe.prefix,
        layers=size.layers,
        verifier_tokenizer=tokenizer.fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=vocab_size,
        draft_vocab_size=len(d2t),
        parameters=parameters,
        objective="masked_ce",
        provenance={"command": provenance.command(), "sha256": digests, "steps": t.steps, "seed": seed},
    )
    training.write(studies.size_folder(profile, name), drafter, card, t)
    if parallel.first():
        store.write_text(store.curves_file(profile, f"size_{name}"), training.curve_csv(rows))
        scratch.discard(mark)


CODE = [Path(__file__), *training.CODE]

if __name__ == "__main__":
    entry.run(main, size=lambda profile: keys_at("sizes"))
