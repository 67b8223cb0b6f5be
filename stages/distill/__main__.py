"""Distill: align the adapted drafter with what the verifier accepts.

    python -m stages.distill <profile> <objective>

Reads   data/<profile>/drafters/adapt/, the verifier's embedding, data/<profile>/trajectories.parquet and contexts/;
        for soft targets data/<profile>/features/verifier/, too
Writes  data/<profile>/drafters/<objective>/, checkpoints/<objective>/step_<n>/, curves/<objective>.csv
Params  seed, <profile>.device, <profile>.distill.training, <profile>.distill.<objective>, <profile>.validation

`streak` is Eq. 6 of arXiv 2511.00606; `trie_streak` counts what a walk over the trie of K drafts accepts. The others
are rivals and controls from one start, over one order of texts (kernels/objectives.py; METHOD.md section 4); `soft`
draws every place to the verifier's whole law (kernels/soft.py). <objective> is a section's name, which may be that of a
variant (sections.py). Windows are fully masked, as one-step decoding meets them. With `lora` in the section, an adapter
that `adapt` left is trained on, or a new one is; without, an adapter is merged and every weight trained (lora.ready).
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels.soft
from stages.common import entry, features, lora, parallel, provenance, scratch, store, training
from stages.common.drafters import Drafter, DrafterCard, load_drafter, read_card
from stages.common.models import Verifier, config_digest, load_causal_lm, load_tokenizer
from stages.common.params import keys_at, load
from stages.common.training import Objective, Training
from stages.common.validation import Validation
from stages.distill import sections, soft
from stages.distill.sections import HARD, SOFT, Plain, Soft, read_section
from stages.distill.stopwatch import Stopwatch


def main(run: entry.Run) -> None:
    objective, section = read_section(run.profile, run.objective)
    listed = {False: "objectives", True: "soft_objectives"}  # what is in the second waits for the hidden states
    if run.objective not in keys_at(listed[objective == SOFT]):
        raise ValueError(
            f"params.yaml: {listed[objective != SOFT]}: {run.objective!r} belongs to {listed[objective == SOFT]}; "
            "name it there"
        )
    params = load(Training, run.profile, "distill", "training")
    v = load(Validation, run.profile, "validation")
    if parallel.launch(run, parallel.processes(params.parallel)):
        return
    with parallel.joined(run.device().name):
        distill(run.profile, run.objective, objective, section, params, v, run.device(), seed=load(int, "seed"))


def distill(
    profile: str,
    name: str,
    objective: str,
    section: Plain,
    t: Training,
    v: Validation,
    device: entry.Device,
    *,
    seed: int,
) -> None:
    """Train the section `name` of this objective. seed: the pipeline's, by which texts are held out."""
    if t.full_mask_share != 1:
        raise ValueError("params.yaml: distill.training.full_mask_share must be 1: acceptance is of whole windows")
    if t.steps < 1:
        raise ValueError("params.yaml: distill.training.steps: 0 aligns nothing; name `adapt` as the drafter instead")
    states = soft.states_of(profile) if objective == SOFT else None
    folder, start = store.verifier_folder(profile), store.drafter_folder(profile, "adapt")
    own = read_card(start).embedding == "own"
    causal_lm = None if own and states is None else load_causal_lm(folder, torch.float32)
    drafter, card = load_drafter(
        start,
        embedding=None if causal_lm is None else causal_lm.get_input_embeddings(),
        tokenizer=load_tokenizer(folder).fingerprint(),
        config=config_digest(folder),
        dtype=torch.float32,
        device=str(parallel.local_device(device.name)),
        packed=False,
    )
    if t.window > card.block_size:
        raise ValueError(
            f"params.yaml: distill.training.window is {t.window}, but {start} was adapted to {card.block_size}"
        )
    teacher = None if states is None else teacher_of(causal_lm, states, drafter, section, device)
    del causal_lm  # hard targets need no more of it than the embedding
    draws = seed if section.seed is None else section.seed
    lora.ready(drafter, t.lora, seed=draws)
    for p in drafter.trained():
        p.requires_grad_(True)
    read = drafter.read if own else None
    texts = training.read_texts(profile, t, v, prefix=card.prefix, layers=card.layers, seed=seed, read=read)
    if states is not None and any(e.starts is not None for e in (*texts.training, *texts.held_out)):
        raise ValueError(
            f"params.yaml: soft_objectives: {name}: this drafter reads texts in other tokens than the verifier, whose "
            "laws are of its own; choose among the other objectives"
        )

    digests = {**texts.digests, "verifier": store.sha256_folder(folder), "start": store.sha256_folder(start)}
    if own:
        digests["base"] = card.provenance["sha256"]["base"]
    if states is not None:
        digests["features"] = store.sha256_folder(states.folder)
    decides = [section, training.alone(t), training.state_form(t, device), v, seed]
    mark = scratch.fingerprint(decides, {**digests, "stage": name}, CODE)
    state = scratch.scratch_folder(mark)
    card = card_of(card, name, section, digests, t, seed=draws)

    def keep(step: int) -> None:
        made = replace(card, provenance={**card.provenance, "steps": step})
        training.write(state / "checkpoints" / f"step_{step}", drafter, made, t)

    watch = Stopwatch(drafter, state, accumulation=t.accumulation)
    dtype = training.passes_in(device)
    if teacher is not None:
        rows = soft.train(drafter, texts, teacher, t, v, seed=draws, scratch=state, keep=keep, title=name, dtype=dtype)
    else:
        loss = loss_of(objective, section)
        rows = training.train(drafter, texts, loss, t, v, seed=draws, scratch=state, keep=keep, title=name, dtype=dtype)
    watch.close()
    training.write(store.drafter_folder(profile, name), drafter, card, t)
    if not parallel.first():
        return
    with store.replace_folder(store.checkpoints_folder(profile, name)) as out:
        shutil.copytree(state / "checkpoints", out, dirs_exist_ok=True)
    store.write_text(store.curves_file(profile, name), training.curve_csv(watch.timed(rows)))
    scratch.discard(mark)


def card_of(
    start: DrafterCard, name: str, section: Plain, digests: dict[str, str], t: Training, *, seed: int
) -> DrafterCard:
    """drafter.json of what `start` became. It says nothing of clocks: the same training has the same bytes."""
    made: dict[str, Any] = {"command": provenance.command(), "sha256": digests, "steps": t.steps, "seed": seed}
    return replace(start, block_size=t.window, objective=name, provenance=made | section.said())


def loss_of(objective: str, section: Plain) -> Objective:
    """The loss of (log q, valid); the mask weights are 1 throughout, windows being fully masked."""
    _, function = HARD[objective]
    chosen = partial(function, **section.settings())

    def loss(log_q_WG: Tensor, valid_WG: Tensor, _weights_WG: Tensor) -> Tensor:
        return chosen(log_q_WG, valid_WG)

    return loss


def teacher_of(
    causal_lm: Any, states: features.Features, drafter: Drafter, section: Plain, device: entry.Device
) -> soft.Teacher:
    """The verifier's head over its kept states."""
    assert isinstance(section, Soft), section
    verifier = Verifier(causal_lm, vocab_size=drafter.vocab_size, end_ids=()).to(parallel.local_device(device.name))
    return soft.Teacher(verifier, states, drafter.d2t, temperature=section.temperature)


def listed_names(_profile: str) -> list[str]:
    """What params.yaml asks for."""
    return [*keys_at("objectives"), *keys_at("soft_objectives")]


CODE = [Path(module.__file__ or "") for module in (kernels.soft, features, sections, soft)] + [
    Path(__file__),
    *training.CODE,
]  # what a resumed run must find unchanged

if __name__ == "__main__":
    entry.run(main, objective=listed_names)
