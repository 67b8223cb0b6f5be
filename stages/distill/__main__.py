"""Distill: align the adapted drafter with what the verifier accepts.

    python -m stages.distill <profile> <objective>

Reads   data/<profile>/drafters/adapt/, the verifier's embedding, data/<profile>/trajectories.parquet and contexts/
Writes  data/<profile>/drafters/<objective>/, checkpoints/<objective>/step_<n>/, curves/<objective>.csv
Params  seed, <profile>.device, <profile>.distill.training, <profile>.distill.<objective>, <profile>.validation

`streak` is Eq. 6 of arXiv 2511.00606; `trie_streak` counts what a walk over the trie of K drafts accepts. The others
are rivals and controls from one start, over one order of texts (kernels/objectives.py; METHOD.md section 4). Windows
are fully masked, as one-step decoding meets them.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import objectives
from stages.common import entry, provenance, scratch, store, training
from stages.common.drafters import load_drafter, save_drafter
from stages.common.models import config_digest, load_causal_lm, load_tokenizer
from stages.common.params import Count, Share, keys_at, load
from stages.common.training import Objective, Training
from stages.common.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Plain:
    """An objective without settings of its own."""


@dataclass(frozen=True, kw_only=True)
class TrieStreak:
    drafts: Count  # K


@dataclass(frozen=True, kw_only=True)
class Dpace:
    smoothing: Share  # a; 0 has streak's gradient


Settings = Plain | TrieStreak | Dpace
OBJECTIVES: dict[str, tuple[type[Settings], Callable[..., Tensor]]] = {
    "masked_ce": (Plain, objectives.masked_ce),  # adapt's own, continued: the control at equal steps
    "first": (Plain, objectives.first),
    "distillspec": (Plain, objectives.distillspec),
    "streak": (Plain, objectives.streak),
    "trie_streak": (TrieStreak, objectives.trie_streak),
    "ce_streak": (Plain, objectives.ce_streak),
    "dpace": (Dpace, objectives.dpace),
}


def main(run: entry.Run) -> None:
    if run.objective not in OBJECTIVES:
        raise ValueError(f"params.yaml: objectives: {run.objective!r} is none of {', '.join(OBJECTIVES)}")
    section, _ = OBJECTIVES[run.objective]
    settings = load(section, run.profile, "distill", run.objective)
    params = load(Training, run.profile, "distill", "training")
    v = load(Validation, run.profile, "validation")
    distill(run.profile, run.objective, settings, params, v, run.device(), seed=load(int, "seed"))


def distill(
    profile: str,
    objective: str,
    settings: Settings,
    t: Training,
    v: Validation,
    device: entry.Device,
    *,
    seed: int,
) -> None:
    if t.full_mask_share != 1:
        raise ValueError("params.yaml: distill.training.full_mask_share must be 1: acceptance is of whole windows")
    folder, start = store.verifier_folder(profile), store.drafter_folder(profile, "adapt")
    drafter, card = load_drafter(
        start,
        embedding=load_causal_lm(folder, torch.float32).get_input_embeddings(),
        tokenizer=load_tokenizer(folder).fingerprint(),
        config=config_digest(folder),
        dtype=torch.float32,
        device=device.name,
        packed=False,
    )
    if t.window > card.block_size:
        raise ValueError(
            f"params.yaml: distill.training.window is {t.window}, but {start} was adapted to {card.block_size}"
        )
    for p in drafter.trained():
        p.requires_grad_(True)
    texts = training.read_texts(profile, t, v, prefix=card.prefix, layers=card.layers, seed=seed)

    digests = {**texts.digests, "verifier": store.sha256_folder(folder), "start": store.sha256_folder(start)}
    mark = scratch.fingerprint([settings, t, v, seed], {**digests, "stage": objective}, CODE)
    state = scratch.scratch_folder(mark)
    card = replace(
        card,
        block_size=t.window,
        objective=objective,
        provenance={
            "command": provenance.command(),
            "sha256": digests,
            "steps": t.steps,
            "seed": seed,
            **asdict(settings),
        },
    )

    def keep(step: int) -> None:
        with store.replace_folder(state / "checkpoints" / f"step_{step}") as out:
            save_drafter(out, drafter, replace(card, provenance={**card.provenance, "steps": step}))

    rows = training.train(
        drafter, texts, loss_of(objective, settings), t, v, seed=seed, scratch=state, keep=keep, title=objective
    )
    with store.replace_folder(store.drafter_folder(profile, objective)) as out:
        save_drafter(out, drafter, card)
    with store.replace_folder(store.checkpoints_folder(profile, objective)) as out:
        shutil.copytree(state / "checkpoints", out, dirs_exist_ok=True)
    store.write_text(store.curves_file(profile, objective), training.curve_csv(rows))
    scratch.discard(mark)


def loss_of(objective: str, settings: Settings) -> Objective:
    """The loss of (log q, valid); the mask weights are 1 throughout, windows being fully masked."""
    _, function = OBJECTIVES[objective]
    chosen = partial(function, **asdict(settings))

    def loss(log_q_WG: Tensor, valid_WG: Tensor, _weights_WG: Tensor) -> Tensor:
        return chosen(log_q_WG, valid_WG)

    return loss


CODE = [Path(__file__), *training.CODE]

if __name__ == "__main__":
    entry.run(main, objective=lambda profile: keys_at("objectives"))
