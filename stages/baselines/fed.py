"""specdiff2_fed's drafter (stages/common/fed.py): masked cross-entropy first, then trie_streak from there.

Many windows of each text in one pass, as adapt lays them out; the context in front of them is made in the pass from the
verifier's states, so that gradients reach the fuse and the layers' key and value projections (METHOD.md section 4;
DFlash, arXiv 2602.06036). In the second phase every window is fully masked, as in decoding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kernels import objectives
from stages.baselines import fit
from stages.baselines.fit import Fitting
from stages.common import entry, features, fed, heads, provenance, scratch, store, training, windows
from stages.common.contexts import Contexts
from stages.common.drafters import Drafter
from stages.common.features import Features
from stages.common.fed import FedDrafter
from stages.common.heads import HeadCard, save_head
from stages.common.models import config_digest, load_verifier
from stages.common.params import Count, Natural, NonNegative, Share
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Row, Validation, validate
from stages.common.windows import Example

CODE = [Path(module.__file__ or "") for module in (features, fed, fit, heads)] + [Path(__file__), *training.CODE]


@dataclass(frozen=True, kw_only=True)
class Streak:
    """The second phase; all else is as in the first."""

    steps: Natural  # 0: none
    drafts: Count  # K
    lr: NonNegative
    lr_other: NonNegative


@dataclass(frozen=True, kw_only=True)
class Params:
    layers: Count  # of the drafter
    start_layers: tuple[int, ...]  # the verifier's layers they start from, one each; []: random weights
    reads: tuple[int, ...]  # the verifier's layers whose states are its context (features.layers)
    draft_vocab: Count  # most frequent words of the training texts that can be drafted
    windows: Count  # of each text
    window: Count  # G
    full_mask_share: Share  # of the first phase
    training: Fitting
    streak: Streak


class FedContexts:
    """What a drafter caches of each text, in the form of `Contexts`: made anew at every look, with gradients."""

    def __init__(self, head: FedDrafter, states: Features | Mapping[str, Tensor]) -> None:
        self.head, self.states = head, states

    def __getitem__(self, text_id: str) -> Tensor:
        """[L, 2, H, T, E]."""
        states_1TC = self.states[text_id][None].to(self.head.device)
        places_1T = torch.arange(states_1TC.shape[1], device=self.head.device)[None]
        return self.head.context(states_1TC, places_1T)[:, :, 0]


def train(profile: str, params: Params, v: Validation, device: entry.Device, *, seed: int) -> None:
    folder, states_folder = store.verifier_folder(profile), features.features_folder(profile)
    texts, held_out = fit.read_texts(profile, params.training, v, seed=seed)
    verifier = load_verifier(folder, dtype=torch.float32, device=device.name, packed=False)
    d2t = windows.draft_vocabulary(
        texts, size=params.draft_vocab, vocab_size=verifier.vocab_size, always=sorted(verifier.end_ids)
    )
    head = FedDrafter.build(
        verifier, reads=params.reads, d2t=d2t, layers=params.layers, start_layers=params.start_layers
    )
    head.initialise(seed=seed)
    head.to(device.name)

    digests = {
        "trajectories": store.sha256_file(store.trajectories_file(profile)),
        "features": store.sha256_folder(states_folder),
        "verifier": store.sha256_folder(folder),
    }
    mark = scratch.fingerprint([params, v, seed], {**digests, "stage": "baselines/fed"}, CODE)
    states = Features(states_folder, params.reads)
    rows = learn(head, texts, held_out, states, params, v, seed=seed, scratch=scratch.scratch_folder(mark))
    steps = params.training.steps + params.streak.steps
    card = HeadCard(
        kind=FedDrafter.kind,
        target_layer_ids=params.reads,
        settings=head.settings(),
        verifier_tokenizer=load_tokenizer(folder).fingerprint(),
        verifier_config=config_digest(folder),
        vocab_size=verifier.vocab_size,
        draft_vocab_size=len(d2t),
        parameters=sum(p.numel() for p in head.trained()),
        objective="masked_ce, then trie_streak" if params.streak.steps else "masked_ce",
        provenance={"command": provenance.command(), "sha256": digests, "steps": steps, "seed": seed},
    )
    with store.replace_folder(store.drafter_folder(profile, "fed")) as out:
        save_head(out, head, card)
    store.write_text(store.curves_file(profile, "fed"), training.curve_csv(rows))
    scratch.discard(mark)


def learn(
    head: FedDrafter,
    texts: Sequence[Example],
    held_out: Sequence[Example],
    states: Features | Mapping[str, Tensor],
    params: Params,
    v: Validation,
    *,
    seed: int,
    scratch: Path,
) -> list[Row]:
    """Both phases, in place; the curve of one run, its steps and seconds counted through. Continues from `scratch`."""
    f, streak, contexts = params.training, params.streak, cast(Contexts, FedContexts(head, states))
    drafter = cast(Drafter, head)  # windows and validation ask for no more than both have

    def loss(
        part: Sequence[Example], number: int, *, objective: Callable[..., Tensor], full_mask_share: float, before: int
    ) -> Tensor:
        batch = windows.collate(
            part,
            drafter,
            contexts,
            windows=params.windows,
            window=params.window,
            full_mask_share=full_mask_share,
            seed=seed,
            step=before + number,
        )
        return objective(windows.log_q(drafter, batch), batch)

    def measure() -> Row:
        return validate(drafter, held_out, contexts, v, window=params.window, sequences=f.sequences, seed=seed)

    adapting = partial(loss, objective=_masked_ce, full_mask_share=params.full_mask_share, before=0)
    aligning = partial(
        loss,
        objective=partial(_trie_streak, drafts=streak.drafts),
        full_mask_share=1.0,
        before=f.steps * f.accumulation,
    )
    rows = _first_phase(head, texts, adapting, measure, f, seed=seed, scratch=scratch)
    if streak.steps:
        g = replace(f, steps=streak.steps, lr=streak.lr, lr_other=streak.lr_other)
        folder = scratch / "trie_streak"
        folder.mkdir(exist_ok=True)
        seconds = max(cast(float, row["seconds"]) for row in rows if row["split"] == "train")
        more = fit.fit(head, texts, aligning, measure, g, seed=seed, scratch=folder, title="fed: trie_streak")
        rows += [_later(row, steps=f.steps, seconds=seconds) for row in more[1:]]  # but for the measurement at step 0
    return rows


def _masked_ce(log_q_WG: Tensor, batch: windows.Batch) -> Tensor:
    return objectives.masked_ce(log_q_WG, batch.layout.valid_BWG.flatten(0, 1), batch.weights_BWG.flatten(0, 1))


def _trie_streak(log_q_WG: Tensor, batch: windows.Batch, *, drafts: int) -> Tensor:
    return objectives.trie_streak(log_q_WG, batch.layout.valid_BWG.flatten(0, 1), drafts=drafts)


def _first_phase(
    head: FedDrafter,
    texts: Sequence[Example],
    loss: fit.Loss,
    measure: fit.Measure,
    f: Fitting,
    *,
    seed: int,
    scratch: Path,
) -> list[Row]:
    """masked_ce; what it ended with is kept, so that a run killed in the second phase does not repeat it."""
    ended = scratch / "masked_ce.pt"
    if ended.exists():
        state: dict[str, Any] = torch.load(ended, weights_only=True)
        head.load_state_dict(state["weights"])
        return state["rows"]
    folder = scratch / "masked_ce"
    folder.mkdir(exist_ok=True)
    rows = fit.fit(head, texts, loss, measure, f, seed=seed, scratch=folder, title="fed: masked_ce")
    rows = [row | {"objective": "masked_ce"} for row in rows]
    with store.replacing(ended) as partly:
        torch.save({"weights": head.state_dict(), "rows": rows}, partly)
    return rows


def _later(row: Row, *, steps: int, seconds: float) -> Row:
    """A row of the second phase, counted on from the end of the first."""
    moved = row | {"step": cast(int, row["step"]) + steps, "objective": "trie_streak"}
    return moved | {"seconds": cast(float, row["seconds"]) + seconds} if "seconds" in row else moved
