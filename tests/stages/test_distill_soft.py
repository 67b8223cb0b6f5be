"""Soft targets: the teacher is the verifier's law at the places of a window, and learning gets nearer to it."""

import json
from pathlib import Path

import pytest
import torch

from kernels.objectives import masked_ce
from stages.common import windows
from stages.common.contexts import Contexts, write_index, write_shard
from stages.common.features import FINAL, features_folder
from stages.common.features import write_index as write_states_index
from stages.common.tiny import VOCABULARY
from stages.common.training import Texts, Training
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.distill.soft import Teacher, soft_loss, states_of, train
from stages.features.__main__ import read
from tests.stages.scripted import (
    cached_rows,
    full_logits,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
    vanilla_text,
)

G = 4
SOME = [word for word in range(VOCABULARY) if word % 3]  # words of a drafter that lacks some


def texts(count=3, *, output=12):
    """Vanilla's greedy texts of the tiny Llama, of different lengths."""
    found = []
    for number in range(count):
        prompt = prompt_of(3 + number, seed=20 + number)
        ids = vanilla_text(tiny_verifier(), prompt, limit=output - number)
        found.append(Example(id=f"t/{number}", ids=(*prompt, *ids), prompt_length=len(prompt)))
    return found


def states(found):
    """As the stage `features` keeps them."""
    rows = [{"prompt_ids": list(e.ids), "output_ids": []} for e in found]
    return {e.id: read(tiny_verifier(), row, [FINAL]).half() for e, row in zip(found, rows, strict=True)}


def teacher_of(found, drafter, *, temperature=1.0):
    return Teacher(tiny_verifier(), states(found), drafter.d2t, temperature=temperature)


def batch_of(found, drafter, folder):
    """Fully masked windows, laid out for whatever the drafter reads as its prefix."""
    contexts = None
    if drafter.prefix == "verifier":
        kept = {e.id: cached_rows(tiny_verifier(), e.ids, drafter.layers) for e in found}
        write_shard(folder / "0.safetensors", kept)
        write_index(folder, drafter.layers, dict.fromkeys(kept, "0.safetensors"))
        contexts = Contexts(folder, drafter.layers)
    return windows.collate(found, drafter, contexts, windows=5, window=G, full_mask_share=1.0, seed=0, step=1)


@pytest.mark.parametrize("prefix", ["own", "verifier"])
def test_the_teachers_likeliest_word_is_the_greedy_texts_own(tmp_path, prefix):
    """A shift by one between states, places and words would miss nearly all of them."""
    found, drafter = texts(), tiny_drafter(layers=[1], prefix=prefix)
    batch = batch_of(found, drafter, tmp_path)
    best_BWG = teacher_of(found, drafter).windows(found, batch.layout.target_BWG).argmax(-1)
    valid_BWG = batch.layout.valid_BWG
    assert not bool(valid_BWG.all()), "some windows reach beyond the text"
    assert torch.equal(best_BWG[valid_BWG], batch.targets_BWG[valid_BWG])
    assert len(batch.targets_BWG[valid_BWG].unique()) > 5


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_teacher_is_normalised_over_all_words_and_cut_to_the_drafters(temperature):
    found, drafter = texts(), tiny_drafter(layers=[1], words=SOME)
    teacher = teacher_of(found, drafter, temperature=temperature)
    for e in found:
        places = torch.tensor([e.prompt_length + 1, len(e.ids) - 1, e.prompt_length + 3])
        log_p_PV = teacher.log_p(e.id, places)
        for log_p_V, place in zip(log_p_PV, places.tolist(), strict=True):
            wanted_V = (full_logits(e.ids[:place]) / temperature).log_softmax(-1)[SOME]
            torch.testing.assert_close(log_p_V, wanted_V, atol=0.02, rtol=0.01)  # the states are kept in float16
    assert log_p_PV.exp().sum(-1).max() < 1


def test_a_cold_teacher_is_masked_cross_entropy(tmp_path):
    """On a greedy text the law at temperature 0 is the text's own word; one that cannot be drafted has no term."""
    found, drafter = texts(), tiny_drafter(layers=[1], words=SOME)
    batch = batch_of(found, drafter, tmp_path)
    assert bool((batch.targets_BWG[batch.layout.valid_BWG] < 0).any())
    hard = masked_ce(windows.log_q(drafter, batch), batch.layout.valid_BWG.flatten(0, 1))
    cold = soft_loss(drafter, teacher_of(found, drafter, temperature=0.01), found, batch)
    assert float(cold) == pytest.approx(float(hard), rel=0.02)
    warm = soft_loss(drafter, teacher_of(found, drafter), found, batch)
    assert float(warm) != pytest.approx(float(hard), rel=0.1)


def test_learning_gets_nearer_to_the_teacher(tmp_path):
    found, drafter = texts(), tiny_drafter(layers=[1])
    for p in drafter.trained():
        p.requires_grad_(True)
    t = Training(
        steps=12,
        sequences=3,
        accumulation=1,
        windows=8,
        window=G,
        max_tokens=64,
        optimizer="muon",
        lr=0.02,
        lr_other=0.005,
        weight_decay=0.0,
        warmup=0.0,
        final_lr=0.1,
        clip=1.0,
        full_mask_share=1.0,
        evaluate_every=6,
        checkpoint_every=99,
    )
    v, kept = Validation(share=0.1, windows=3, tree_nodes=4), []
    rows = train(
        drafter,
        Texts(found, found),
        teacher_of(found, drafter),
        t,
        v,
        seed=0,
        scratch=tmp_path,
        keep=kept.append,
        title="soft",
    )
    losses = [float(row["loss"]) for row in rows if row["split"] == "train"]
    assert losses[-1] < 0.5 * losses[0]
    assert min(losses) > 0
    assert kept == [6, 12]
    assert [row["step"] for row in rows if row["split"] == "valid"] == [0, 6, 12]
    assert {row["tokens"] for row in rows if row["split"] == "train"} == {sum(len(e.ids) for e in found)}


def test_without_states_the_stage_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = r"write features: \[verifier\] in params\.yaml, with -1 among tiny\.features\.layers, and run dvc repro"
    with pytest.raises(ValueError, match=wanted):
        states_of("tiny")
    write_states_index(features_folder("tiny"), [0, 2], {})
    with pytest.raises(ValueError, match=r"layers \[0, 2\], not of \[-1\]; add them to <profile>\.features\.layers"):
        states_of("tiny")
    Path(features_folder("tiny") / "index.json").write_text(json.dumps({"layers": [0, FINAL], "files": {}}))
    assert states_of("tiny").folder == features_folder("tiny")
