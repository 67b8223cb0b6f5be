"""Adapt: a depth-pruned copy of the verifier becomes a masked-diffusion drafter (the unaligned SpecDiff drafter).

Or a published diffusion model becomes one, with as many steps of training as wanted: `start: drafter` (starts.py).

    python -m stages.adapt <profile>

Reads   the verifier, data/<profile>/models/drafter/ if it starts there, data/<profile>/trajectories.parquet, contexts/
Writes  data/<profile>/drafters/adapt/, data/<profile>/curves/adapt.csv
Params  seed, <profile>.device, <profile>.adapt, <profile>.validation

Masked cross-entropy on many windows of each text (METHOD.md section 4; DiffuLLaMA, arXiv 2410.17891): keep the
weights and the left shift, add a mask embedding, open the attention inside the window.
"""

from dataclasses import replace
from pathlib import Path

from kernels import objectives
from stages.common import entry, lora, parallel, provenance, scratch, starts, store, training
from stages.common.drafters import DrafterCard
from stages.common.params import load
from stages.common.starts import Adapt as Params
from stages.common.validation import Validation


def main(run: entry.Run) -> None:
    params, v = load(Params, run.profile, "adapt"), load(Validation, run.profile, "validation")
    if parallel.launch(run, parallel.processes(params.training.parallel)):
        return
    with parallel.joined(run.device().name):
        adapt(run.profile, params, v, run.device(), seed=load(int, "seed"))


def adapt(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    t = params.training
    drafter, texts, digests, facts = starts.start(
        profile,
        params.start,
        v,
        t,
        device,
        layers=params.layers,
        prefix=params.prefix,
        draft_vocab=params.draft_vocab,
        seed=seed,
    )
    parameters = sum(p.numel() for p in drafter.trained())
    if t.steps:
        lora.ready(drafter, t.lora, seed=seed)
    drafter = drafter.to(parallel.local_device(device.name))
    for p in drafter.trained():
        p.requires_grad_(t.steps > 0)

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
        block_size=t.window,
        parameters=parameters,
        provenance={"command": provenance.command(), "sha256": digests, "steps": t.steps, "seed": seed},
        **facts,
    )
    training.write(store.drafter_folder(profile, "adapt"), drafter, card, t)
    if parallel.first():
        store.write_text(store.curves_file(profile, "adapt"), training.curve_csv(rows))
        scratch.discard(mark)


CODE = [Path(__file__), Path(starts.__file__), *training.CODE]

if __name__ == "__main__":
    entry.run(main)
