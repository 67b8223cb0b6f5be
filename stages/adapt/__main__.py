"""Adapt: a depth-pruned copy of the verifier becomes a masked-diffusion drafter (the unaligned SpecDiff drafter).

    python -m stages.adapt <profile>

Reads   the verifier, data/<profile>/trajectories.parquet and contexts/
Writes  data/<profile>/drafters/adapt/, data/<profile>/curves/adapt.csv
Params  seed, <profile>.device, <profile>.adapt, <profile>.validation

Masked cross-entropy on many windows of each text (METHOD.md section 4; DiffuLLaMA, arXiv 2410.17891): keep the
weights and the left shift, add a mask embedding, open the attention inside the window.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import objectives
from stages.common import entry, lora, parallel, provenance, scratch, store, training, windows
from stages.common.drafters import DrafterCard, Prefix, prune
from stages.common.models import config_digest, end_ids_of, load_causal_lm, load_tokenizer
from stages.common.params import Count, load
from stages.common.training import Training
from stages.common.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Params:
    layers: tuple[int, ...]  # the verifier's layers that stay
    prefix: Prefix  # whose keys and values of the prefix it reads: its own, or the verifier's
    draft_vocab: Count  # most frequent words of the training texts that can be drafted
    training: Training


def main(run: entry.Run) -> None:
    params, v = load(Params, run.profile, "adapt"), load(Validation, run.profile, "validation")
    if parallel.launch(run, parallel.processes(params.training.parallel)):
        return
    with parallel.joined(run.device().name):
        adapt(run.profile, params, v, run.device(), seed=load(int, "seed"))


def adapt(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    t, folder = params.training, store.verifier_folder(profile)
    texts = training.read_texts(profile, t, v, prefix=params.prefix, layers=params.layers, seed=seed)
    causal_lm = load_causal_lm(folder, torch.float32)
    tokenizer = load_tokenizer(folder)
    vocab_size = min(tokenizer.size, causal_lm.config.vocab_size)
    d2t = windows.draft_vocabulary(
        texts.training, size=params.draft_vocab, vocab_size=vocab_size, always=end_ids_of(folder)
    )
    drafter = prune(causal_lm, layers=params.layers, d2t=d2t, vocab_size=vocab_size, prefix=params.prefix)
    parameters = sum(p.numel() for p in drafter.trained())
    lora.ready(drafter, t.lora, seed=seed)
    drafter = drafter.to(parallel.local_device(device.name))
    for p in drafter.trained():
        p.requires_grad_(True)

    digests = {**texts.digests, "verifier": store.sha256_folder(folder)}
    decides = [replace(params, training=training.alone(t)), training.state_form(t, device), v, seed]
    mark = scratch.fingerprint(decides, {**digests, "stage": "adapt"}, CODE)
    rows = training.train(
        drafter,
        texts,
        objectives.masked_ce,
        t,
        v,
        seed=seed,
        scratch=scratch.scratch_folder(mark),
        title="adapt",
        dtype=training.passes_in(device),
    )
    card = DrafterCard(
        kind="masked_window",
        block_size=t.window,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix=params.prefix,
        layers=params.layers,
        verifier_tokenizer=tokenizer.fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=vocab_size,
        draft_vocab_size=len(d2t),
        parameters=parameters,
        objective="masked_ce",
        provenance={"command": provenance.command(), "sha256": digests, "steps": t.steps, "seed": seed},
    )
    training.write(store.drafter_folder(profile, "adapt"), drafter, card, t)
    if parallel.first():
        store.write_text(store.curves_file(profile, "adapt"), training.curve_csv(rows))
        scratch.discard(mark)


CODE = [Path(__file__), *training.CODE]

if __name__ == "__main__":
    entry.run(main)
