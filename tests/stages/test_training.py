"""The training loop: it learns what decoding then accepts, and a killed run ends where an undisturbed one does."""

import csv
import io
import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels import objectives
from kernels.tree import best_first, children
from stages.common import training, windows
from stages.common.contexts import Contexts, write_index, write_shard
from stages.common.optimizers import Muon, optimizers, rate
from stages.common.tiny import VOCABULARY
from stages.common.training import Texts, Training, curve_csv, train, validate
from stages.common.validation import Validation, tree_length
from stages.common.windows import Example
from stages.evaluate.methods import specdiff2_tree
from tests.stages.scripted import cached_rows, engine_of, prompt_of, tiny_drafter, tiny_verifier, vanilla_text

G = 4
BASE = Training(
    steps=8,
    sequences=2,
    accumulation=1,
    windows=3,
    window=G,
    max_tokens=64,
    optimizer="muon",
    lr=0.02,
    lr_other=0.005,
    weight_decay=0.01,
    warmup=0.1,
    final_lr=0.1,
    clip=1.0,
    full_mask_share=0.5,
    evaluate_every=4,
    checkpoint_every=3,
)
V = Validation(share=0.1, windows=3, tree_nodes=6)


def settings(**changed):
    return Training(**{**vars(BASE), **changed})


def student(**more):
    drafter = tiny_drafter(**more)
    for p in drafter.trained():
        p.requires_grad_(True)
    return drafter


def texts(count, *, output=20, temperature=1.3):
    """Vanilla's own texts of the tiny Llama."""
    verifier, found = tiny_verifier(), []
    for i in range(count):
        prompt = prompt_of(3 + i, seed=10 + i)
        ids = vanilla_text(verifier, prompt, prompt_id=f"text/{i}", temperature=temperature, limit=output)
        found.append(Example(id=f"text/{i}", ids=(*prompt, *ids), prompt_length=len(prompt)))
    return found


HALF_WAY = 30


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """(drafter, itself half-way, texts, curve, settings): trained on three texts until it knows them."""
    t = settings(
        steps=4 * HALF_WAY, sequences=3, windows=10, full_mask_share=1.0, checkpoint_every=999, evaluate_every=HALF_WAY
    )
    found, drafter, kept = texts(3, output=31), student(), {}
    rows = train(
        drafter,
        Texts(found, found),
        objectives.masked_ce,
        t,
        V,
        seed=0,
        scratch=tmp_path_factory.mktemp("scratch"),
        keep=lambda step: kept.setdefault(step, deepcopy(drafter)),
    )
    return drafter.eval(), kept[HALF_WAY].eval(), found, rows, t


def real_acceptance(drafter, found, *, window=G):
    """Cycles of the real decode loop over the texts, drafting the arg-max chain."""
    chain = specdiff2_tree.Params(drafter="", gamma=window, nodes=window, width=1, threshold=0.0)
    method = specdiff2_tree.build(chain, drafter)
    cycles = []
    for e in found:
        engine = engine_of(tiny_verifier(), temperature=1.3, limit=len(e.ids) - e.prompt_length)
        text = engine.decode(e.ids[: e.prompt_length], method, prompt_id=e.id)
        assert (*e.ids[: e.prompt_length], *text.output_ids) == e.ids, "the text it was trained on"
        cycles += text.cycles
    return cycles


def test_overfit_gate_whole_windows_are_accepted_by_the_real_loop(memorised):
    """A shift by one anywhere between window rows, labels and positions leaves acceptance near 0."""
    drafter, _, found, rows, _ = memorised
    cycles = real_acceptance(drafter, found)
    assert all(cycle.accepted == cycle.proposed for cycle in cycles)
    assert max(cycle.proposed for cycle in cycles) == G
    first, *_, last = (row for row in rows if row["split"] == "valid")
    assert float(first["streak"]) < 1 < 2.5 < float(last["streak"])


@torch.no_grad()
def streaks_by_place(drafter, e):
    """Place of a window's first token -> leading right words of its arg-max chain, all from one training pass."""
    batch = windows.collate([e], drafter, None, windows=len(e.anchors), window=G, full_mask_share=1.0, seed=0, step=0)
    best_WG = drafter.logits(windows.hidden(drafter, batch))[0].argmax(-1)
    right_WG = batch.layout.valid_BWG[0] & (best_WG == batch.targets_BWG[0])
    places = batch.layout.target_BWG[0, :, 0].tolist()
    return dict(zip(places, right_WG.long().cumprod(-1).sum(-1).tolist(), strict=True))


def test_the_real_loop_accepts_at_every_place_what_training_rows_promise(memorised):
    """Half-trained, so that acceptance is neither 0 nor whole."""
    _, drafter, found, _, t = memorised
    promised, seen = [], set()
    for e in found:
        streaks = streaks_by_place(drafter, e)
        promised += streaks.values()
        place = e.prompt_length + 1
        for cycle in real_acceptance(drafter, [e]):
            assert cycle.accepted == min(streaks.get(place, 0), cycle.proposed), (e.id, place)
            seen.add(cycle.accepted)
            place += cycle.accepted + 1
    assert len(seen) > 2
    every_place = replace(V, windows=len(found[0].anchors))
    estimate = float(validate(drafter, Texts([], found), t, every_place, seed=0)["streak"])
    assert estimate == pytest.approx(sum(promised) / len(promised), abs=1e-5)


def test_real_acceptance_is_within_a_tenth_of_the_estimate(memorised):
    drafter, _, found, _, t = memorised
    every_place = replace(V, windows=len(found[0].anchors))
    estimate = float(validate(drafter, Texts([], found), t, every_place, seed=0)["streak"])
    cycles = real_acceptance(drafter, found)
    assert sum(cycle.accepted for cycle in cycles) / len(cycles) == pytest.approx(estimate, rel=0.1)


def validation_by_hand(drafter, found, v):
    """(streak, sampled streak, depth in the tree, share right to depth j) of the windows, by decoding passes."""
    batch = windows.collate(found, drafter, None, windows=v.windows, window=G, full_mask_share=1.0, seed=0, step=0)
    streaks, sampled, in_tree, depths = [], [], [], torch.zeros(G)
    for e, anchors in zip(found, batch.layout.target_BWG[:, :, 0].tolist(), strict=True):
        for anchor in anchors:
            logq_GV = drafter.draft(e.ids[:anchor], G, drafter.new_cache(1)).log_softmax(-1)
            streak, reach, total, alive = 0, 0.0, 0.0, True
            for j, token in enumerate(e.ids[anchor : anchor + G]):
                word = int(drafter.t2d[token])
                if word < 0:
                    break
                reach += float(logq_GV[j, word])
                total += math.exp(reach)
                alive = alive and int(logq_GV[j].argmax()) == word
                streak += alive
                depths[j] += alive
            words = drafter.t2d[list(e.ids[anchor : anchor + G])].tolist()
            child_of = children(best_first(logq_GV, nodes=v.tree_nodes, width=v.tree_nodes))
            row, depth = 0, 0
            while depth < len(words) and words[depth] in child_of[row]:
                row, depth = child_of[row][words[depth]] + 1, depth + 1
            streaks.append(streak)
            sampled.append(total)
            in_tree.append(depth)
    count = len(streaks)
    return sum(streaks) / count, sum(sampled) / count, sum(in_tree) / count, (depths / count).tolist()


@torch.no_grad()
def test_validation_is_acceptance_by_hand(memorised):
    _, drafter, found, _, t = memorised
    v = replace(V, windows=9)
    row = validate(drafter, Texts([], found), t, v, seed=0)
    streak, sampled, in_tree, depths = validation_by_hand(drafter, found, v)
    assert row["streak"] == pytest.approx(streak)
    assert row["sampled_streak"] == pytest.approx(sampled, abs=1e-4)
    assert [row[f"accept_{j + 1}"] for j in range(G)] == pytest.approx(depths)
    assert row["tree"] == pytest.approx(in_tree)
    assert float(row["trie16"]) >= float(row["sampled_streak"])


@torch.no_grad()
def test_validation_stops_at_words_that_cannot_be_drafted():
    found, v = texts(2), replace(V, windows=8)
    drafter = tiny_drafter(words=[w for w in range(VOCABULARY) if w % 5])
    row = validate(drafter, Texts([], found), settings(), v, seed=0)
    streak, sampled, in_tree, _ = validation_by_hand(drafter, found, v)
    assert row["streak"] == pytest.approx(streak)
    assert row["tree"] == pytest.approx(in_tree)
    assert row["sampled_streak"] == pytest.approx(sampled, abs=1e-4)
    assert all(math.isfinite(float(value)) for value in row.values())


@torch.no_grad()
def test_nothing_held_out_can_be_drafted():
    found, t = texts(2), settings()
    used = {token for e in found for token in e.ids}
    row = validate(tiny_drafter(words=set(range(VOCABULARY)) - used), Texts([], found), t, V, seed=0)
    assert row["loss"] is None
    assert row["streak"] == row["sampled_streak"] == row["tree"] == 0


def test_the_tree_spends_nodes_beyond_a_word_it_cannot_hold():
    """Decoding does not know where the text leaves the draft vocabulary: a node there is lost for other branches."""
    logq_GV = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
    assert tree_length(logq_GV, [1, -1], nodes=1) == 0
    assert tree_length(logq_GV, [1, -1], nodes=2) == 0, "the second node is (0, 0), of probability .54"
    assert tree_length(logq_GV, [1, -1], nodes=3) == 1
    assert tree_length(logq_GV, [0, 0], nodes=2) == 2


def contexts_of(found, folder, layers):
    """Contexts of vanilla's texts, as the trajectories store them."""
    kept = {e.id: cached_rows(tiny_verifier(), e.ids, layers) for e in found}
    write_shard(folder / "0.safetensors", kept)
    write_index(folder, layers, dict.fromkeys(kept, "0.safetensors"))
    return Contexts(folder, layers)


def test_overfit_gate_of_a_fed_drafter(tmp_path):
    """Whole windows are accepted by the real loop: training and decoding read the same of the verifier."""
    (e,) = found = texts(1, output=25)
    drafter = student(layers=[1], prefix="verifier")
    t = settings(steps=60, sequences=1, windows=24, full_mask_share=1.0, checkpoint_every=999, evaluate_every=60)
    contexts = contexts_of(found, tmp_path, [1])
    rows = train(drafter, Texts(found, found, contexts), objectives.masked_ce, t, V, seed=0, scratch=tmp_path)
    drafter.eval()
    cycles = real_acceptance(drafter, found)
    assert all(cycle.accepted == cycle.proposed for cycle in cycles)
    assert max(cycle.proposed for cycle in cycles) == G
    assert len(cycles) == -(-(len(e.ids) - e.prompt_length - 1) // (G + 1))
    assert float(rows[-1]["streak"] or 0) > 2.5


class Killed(Exception):
    pass


def run(folder, *, kill_after=None, **changed):
    """(weights, curve) of a run in `folder`; killed in the middle of step `kill_after` + 1."""
    t, found, drafter, losses = settings(**changed), texts(5, output=8), student(layers=[1]), []

    def objective(log_q_WG, valid_WG, weights_WG):
        if kill_after is not None and len(losses) == kill_after * t.accumulation:
            raise Killed
        losses.append(1)
        return objectives.masked_ce(log_q_WG, valid_WG, weights_WG)

    folder.mkdir(exist_ok=True)
    rows = train(drafter, Texts(found[:4], found[4:]), objective, t, V, seed=7, scratch=folder)
    return [p.detach().clone() for p in drafter.trained()], rows, len(losses) // t.accumulation


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("sequences", [1, 3], ids=["inside an epoch", "across an epoch's edge"])
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path, optimizer, sequences):
    """Saved every third step and killed in the middle of the fifth and, resumed, of the eighth."""
    changed = {"optimizer": optimizer, "sequences": sequences, "accumulation": 2 if sequences == 1 else 1}
    weights, rows, steps = run(tmp_path / "straight", **changed)
    assert steps == 8
    for kill_after in (4, 4):  # the second one counts from the saved step 3
        with pytest.raises(Killed):
            run(tmp_path / "killed", kill_after=kill_after, **changed)
    assert (tmp_path / "killed" / "state.pt").exists()
    again, resumed, steps = run(tmp_path / "killed", **changed)
    assert steps == 2, "six steps were saved"
    assert resumed == rows
    assert all(torch.equal(a, b) for a, b in zip(again, weights, strict=True))


def test_training_moves_every_weight_and_not_the_embedding(tmp_path):
    drafter = student(layers=[1])
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    found = texts(3, output=8)
    train(drafter, Texts(found[:2], found[2:]), objectives.masked_ce, settings(), V, seed=0, scratch=tmp_path)
    same = {name for name, p in drafter.named_parameters() if torch.equal(p, before[name])}
    assert same == {"body.embed_tokens.weight"}


def test_accumulation_is_one_bigger_batch(tmp_path):
    """With windows drawn alike the mean of micro-batches is the batch: here every text has one window to draw."""
    found = [Example(id=e.id, ids=e.ids[: e.prompt_length + 2], prompt_length=e.prompt_length) for e in texts(4)]
    losses = []
    for number, (sequences, accumulation) in enumerate(((4, 1), (2, 2), (1, 4))):
        t = settings(sequences=sequences, accumulation=accumulation, windows=1, full_mask_share=1.0, steps=3)
        (tmp_path / str(number)).mkdir()
        rows = train(student(), Texts(found, found), objectives.masked_ce, t, V, seed=0, scratch=tmp_path / str(number))
        losses.append([row["loss"] for row in rows if row["split"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_the_curve_counts_steps_tokens_and_windows(tmp_path):
    found, kept = texts(3, output=8), []
    t = settings(steps=6, accumulation=2)
    rows = train(
        student(), Texts(found[:2], found[2:]), objectives.masked_ce, t, V, seed=0, scratch=tmp_path, keep=kept.append
    )
    assert [row["step"] for row in rows if row["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["split"] == "valid"] == [0, 4, 6]
    assert kept == [4, 6]
    train_rows = [row for row in rows if row["split"] == "train"]
    assert {row["tokens"] for row in train_rows} == {2 * sum(len(e.ids) for e in found[:2])}
    assert {row["windows"] for row in train_rows} == {2 * 2 * 3}
    table = list(csv.DictReader(io.StringIO(curve_csv(rows))))
    assert len(table) == len(rows)
    assert table[1]["streak"] == ""
    assert float(table[1]["loss"]) == pytest.approx(float(train_rows[0]["loss"]), rel=1e-5)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    found = texts(3, output=8)
    with pytest.raises(RuntimeError, match="non-finite"):
        train(
            student(),
            Texts(found[:2], found[2:]),
            lambda log_q_WG, valid_WG, weights_WG: objectives.masked_ce(log_q_WG, valid_WG) * torch.nan,
            settings(),
            V,
            seed=0,
            scratch=tmp_path,
        )


@pytest.mark.parametrize("shape", [(1, 12, 12), (2, 8, 20), (1, 30, 6), (3, 10, 16)])
def test_muons_update_is_nearly_orthogonal_and_keeps_the_directions(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = Muon.orthogonal(x)
    assert found.shape == x.shape
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.18
    assert float(values.max()) < 1.87
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ found @ vh.mT
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(inner, torch.diag_embed(diagonal), rtol=0, atol=1e-3)
    assert bool((diagonal > 0.18).all()), "it descends along every direction of the gradient"


def test_muons_step_is_the_nesterov_momentum_made_orthogonal():
    p = torch.nn.Parameter(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)))
    optim = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.5)
    momentum, wanted = torch.zeros(8, 2), p.detach().clone()
    for turn in range(3):
        g = torch.randn(8, 2, generator=torch.Generator().manual_seed(5 + turn))
        p.grad = g.clone()
        optim.step()
        momentum = 0.9 * momentum + 0.1 * g
        (update,) = Muon.orthogonal((0.9 * momentum + 0.1 * g)[None])
        wanted = wanted * (1 - 0.1 * 0.5) - 0.1 * 2 * update  # sqrt(8 / 2) = 2
        torch.testing.assert_close(p.detach(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_trained_weight_has_exactly_one_optimizer(optimizer):
    drafter, t = student(kind="qwen2"), settings(optimizer=optimizer)
    groups = [(type(optim).__name__, group) for optim in optimizers(drafter, t) for group in optim.param_groups]
    owned = [id(p) for _, group in groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in drafter.trained())
    matrices = [p for name, group in groups if group["lr"] == t.lr for p in group["params"]]
    assert all(p.ndim == 2 and p is not drafter.lm_head.weight for p in matrices)
    assert len(matrices) == 2 * 7
    assert {name for name, _ in groups} == ({"Muon", "AdamW"} if optimizer == "muon" else {"AdamW"})


def test_schedule_warms_up_linearly_and_falls_by_a_cosine():
    t = settings(steps=21, warmup=0.2, final_lr=0.1)
    found = [rate(step, t) for step in range(21)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.55), "half way"
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(found[4:]))
    assert rate(0, settings(steps=1, warmup=0.0)) == 1.0
    assert [rate(s, settings(steps=2, warmup=1.0)) for s in (0, 1)] == [0.5, 1.0]


def test_code_that_a_resumed_run_depends_on_is_named():
    names = {path.name for path in training.CODE}
    assert names >= {"training.py", "optimizers.py", "validation.py", "windows.py", "contexts.py", "drafters.py"}
    assert names >= {"models.py", "cache.py", "objectives.py", "tree.py", "window.py"}
    assert all(path.is_file() for path in training.CODE)
