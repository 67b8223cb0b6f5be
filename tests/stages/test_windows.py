"""Examples, splits and batches: no target in the prompt, and every draw one that a resumed run would make."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

from kernels import objectives
from stages.common import windows
from stages.common.contexts import Contexts, write_index, write_shard
from stages.common.tiny import VOCABULARY
from stages.common.windows import Example
from tests.stages.scripted import prompt_of, tiny_drafter

G = 4


def example(name="a", *, prompt=3, output=9, seed=0):
    return Example(id=name, ids=tuple(prompt_of(prompt + output, seed=seed)), prompt_length=prompt)


def batch_of(chosen, drafter=None, contexts=None, **changed):
    settings = {"windows": 5, "window": G, "full_mask_share": 0.5, "seed": 1, "step": 2} | changed
    return windows.collate(chosen, drafter or tiny_drafter(), contexts, **settings)


def row(name, prompt, output):
    return {"id": name, "prompt_ids": prompt_of(prompt), "output_ids": prompt_of(output, seed=1)}


def test_examples_are_cut_and_texts_without_a_window_dropped():
    rows = [row("fits", 3, 4), row("cut", 3, 20), row("one token", 3, 1), row("long prompt", 12, 5)]
    found = windows.examples(rows, max_tokens=10)
    assert [(e.id, len(e.ids), e.prompt_length) for e in found] == [("fits", 7, 3), ("cut", 10, 3)]
    assert list(found[0].anchors) == [4, 5, 6], "the first output token comes from the prefill"
    assert found[1].ids == (*rows[1]["prompt_ids"], *rows[1]["output_ids"][:7])


def test_no_usable_text_is_an_error():
    with pytest.raises(ValueError, match=r"none of 2 trajectories.*max_tokens"):
        windows.examples([row("a", 3, 1), row("b", 12, 5)], max_tokens=10)


def test_split_is_by_prompt_and_the_same_every_time():
    found = [example(f"text/{i}", seed=i) for i in range(40)]
    training, held = windows.split_by_prompt(found, share=0.2, seed=3)
    assert len(training) + len(held) == 40
    assert 3 <= len(held) <= 14
    assert {e.id for e in training} | {e.id for e in held} == {e.id for e in found}
    assert windows.split_by_prompt(found, share=0.2, seed=3) == (training, held)
    assert windows.split_by_prompt(found, share=0.2, seed=4)[1] != held
    less = windows.split_by_prompt(found, share=0.1, seed=3)[1]
    assert {e.id for e in less} < {e.id for e in held}, "a smaller share holds out fewer of the same"
    for some in (found[::2], found[25:], found[::-1]):
        side = {e.id for e in windows.split_by_prompt(some, share=0.2, seed=3)[1]}
        assert side == {e.id for e in held} & {e.id for e in some}, "a text's side does not depend on the others"


@pytest.mark.parametrize(("share", "counts"), [(0.0, "2 of 2 .* train on and 0"), (1.0, "0 of 2 .* train on and 2")])
def test_a_split_without_a_text_on_either_side_is_an_error(share, counts):
    with pytest.raises(ValueError, match=rf"params.yaml: validation.share: {share} leaves {counts}"):
        windows.split_by_prompt([example("a"), example("b")], share=share, seed=0)


def test_draft_vocabulary_is_the_most_frequent_output_words():
    def text(*output):
        return Example(id="a", ids=(9, 9, 9, 9, *output), prompt_length=4)

    found = [text(5, 5, 5, 7, 7), text(8, 6, 6, 7)]
    assert windows.draft_vocabulary(found, size=3, vocab_size=12, always=[2]).tolist() == [2, 5, 7]
    assert windows.draft_vocabulary(found, size=4, vocab_size=12, always=[2]).tolist() == [2, 5, 6, 7]
    assert windows.draft_vocabulary(found, size=99, vocab_size=12, always=[]).tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(("texts", "sequences"), [(5, 2), (6, 3), (4, 4), (3, 7), (1, 1)])
def test_every_text_comes_once_an_epoch(texts, sequences):
    found = [example(str(i)) for i in range(texts)]
    steps = list(islice(windows.order(found, sequences=sequences, seed=1), 3 * texts))
    assert all(len(step) == sequences for step in steps)
    drawn = [index for step in steps for index in step]
    epochs = [drawn[i : i + texts] for i in range(0, len(drawn) - texts + 1, texts)]
    assert all(sorted(epoch) == list(range(texts)) for epoch in epochs)
    assert texts < 3 or len({tuple(epoch) for epoch in epochs}) > 1, "the order changes"


def test_a_batch_is_a_function_of_seed_and_step():
    chosen = [example(), example(output=6, seed=1)]
    first, again, other, seeded = (batch_of(chosen, **more) for more in ({}, {}, {"step": 3}, {"seed": 2}))
    parts = [(made.ids_BR, made.targets_BWG, made.weights_BWG, *made.layout) for made in (first, again)]
    assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True))
    assert not torch.equal(first.weights_BWG, other.weights_BWG)
    assert not torch.equal(first.weights_BWG, seeded.weights_BWG)


def test_anchors_lie_in_the_output_and_are_as_different_as_they_can():
    chosen = [example(prompt=5, output=4), example(prompt=2, output=12, seed=1)]
    layout = batch_of(chosen, windows=7).layout
    anchors = layout.target_BWG[:, :, 0].tolist()
    for e, row_ in zip(chosen, anchors, strict=True):
        assert set(row_) <= set(e.anchors)
        counts = Counter(row_)
        assert max(counts.values()) - min(counts[a] for a in e.anchors) <= 1


def test_window_rows_hold_masks_or_the_revealed_token_and_targets_the_text():
    chosen, drafter = [example(), example(output=5, seed=1)], tiny_drafter(words=range(0, VOCABULARY, 2))
    batch = batch_of(chosen, drafter, windows=6, full_mask_share=0.2)
    text = max(len(e.ids) for e in chosen)
    rows = batch.ids_BR[:, text:].view(2, 6, G - 1)
    seen = Counter()
    for b, e in enumerate(chosen):
        assert batch.ids_BR[b, : len(e.ids)].tolist() == list(e.ids)
        for w in range(6):
            for j in range(G):
                place = int(batch.layout.target_BWG[b, w, 0]) + j
                valid = place < len(e.ids)
                assert bool(batch.layout.valid_BWG[b, w, j]) == valid
                weight = float(batch.weights_BWG[b, w, j])
                assert weight == 0 or weight >= 1
                if valid:
                    draft_id = e.ids[place] // 2 if e.ids[place] % 2 == 0 else -1
                    assert int(batch.targets_BWG[b, w, j]) == draft_id
                if j < G - 1:
                    shown = e.ids[place] if valid and weight == 0 else drafter.mask_id
                    assert int(rows[b, w, j]) == shown
                    seen[shown == drafter.mask_id] += 1
    assert min(seen.values()) > 3, "both kinds are there"


def test_full_mask_share_one_masks_everything_with_weight_one():
    batch = batch_of([example(output=30)], windows=20, full_mask_share=1.0)
    assert (batch.weights_BWG == 1).all()


def test_a_fed_batch_brings_the_pending_token_the_masks_and_the_cache_and_no_prefix_rows(tmp_path):
    chosen, drafter = [example(), example("b", output=5, seed=1)], tiny_drafter(prefix="verifier")
    kept = {e.id: torch.randn(2, 2, 2, len(e.ids) - 1, 8).half().float() for e in chosen}
    write_shard(tmp_path / "0.safetensors", kept)
    write_index(tmp_path, [0, 1], dict.fromkeys(kept, "0.safetensors"))
    batch = batch_of(chosen, drafter, Contexts(tmp_path, [0, 1]), windows=6, full_mask_share=0.2)
    assert batch.ids_BR.shape == (2, 6 * G)
    assert batch.cache is not None
    assert batch.cache.kv_L2BHTD.shape == (2, 2, 2, 2, 11, 8)
    own = batch_of(chosen, drafter, windows=6, full_mask_share=0.2)
    assert torch.equal(own.targets_BWG, batch.targets_BWG), "the same windows, whatever is read as prefix"
    assert torch.equal(own.weights_BWG, batch.weights_BWG)
    for b, e in enumerate(chosen):
        assert torch.equal(batch.cache.kv_L2BHTD[:, :, b, :, : len(e.ids) - 1], kept[e.id])
        for w, anchor in enumerate(batch.layout.target_BWG[b, :, 0].tolist()):
            rows = batch.ids_BR[b, w * G : (w + 1) * G].tolist()
            assert rows[0] == e.ids[anchor - 1]
            assert rows[1:] == own.ids_BR[b, 12 + w * (G - 1) : 12 + (w + 1) * (G - 1)].tolist()
    shorter = [replace(e, ids=e.ids[:6]) for e in chosen]
    cut = batch_of(shorter, drafter, Contexts(tmp_path, [1]), windows=2).cache
    assert cut is not None
    assert cut.kv_L2BHTD.shape == (1, 2, 2, 2, 5, 8), "a text that is cut needs less of its cache"


@torch.no_grad()
def test_log_q_is_the_log_probability_of_the_text():
    drafter = tiny_drafter(words=[w for w in range(VOCABULARY) if w % 4])
    e = example(output=7)
    batch = batch_of([e], drafter, full_mask_share=1.0, windows=6)
    log_q_WG = windows.log_q(drafter, batch)
    usable = 0
    for w in range(6):
        anchor = int(batch.layout.target_BWG[0, w, 0])
        wanted_GV = drafter.draft(e.ids[:anchor], G, drafter.new_cache(1)).log_softmax(-1)
        for j in range(G):
            place = anchor + j
            if place >= len(e.ids) or e.ids[place] % 4 == 0:
                assert log_q_WG[w, j] == -torch.inf
                continue
            usable += 1
            assert float(log_q_WG[w, j]) == pytest.approx(float(wanted_GV[j, drafter.t2d[e.ids[place]]]), abs=1e-5)
    assert usable > 5


@pytest.mark.parametrize("case", ["nothing masked", "no word can be drafted", "two output tokens"])
def test_batches_with_little_to_learn_give_zero_or_finite_loss_and_gradient(case):
    words = {"no word can be drafted": [1, 2]}.get(case, range(VOCABULARY))
    drafter = tiny_drafter(words=words).requires_grad_(False)
    for p in drafter.trained():
        p.requires_grad_(True)
    output = 2 if case == "two output tokens" else 9
    batch = batch_of([example(output=output)], drafter, full_mask_share=1.0, windows=2)
    if case == "nothing masked":
        batch = batch._replace(weights_BWG=torch.zeros_like(batch.weights_BWG))
    log_q_WG = windows.log_q(drafter, batch)
    valid_WG, weights_WG = batch.layout.valid_BWG.flatten(0, 1), batch.weights_BWG.flatten(0, 1)
    for loss in (objectives.masked_ce(log_q_WG, valid_WG, weights_WG), objectives.streak(log_q_WG, valid_WG)):
        drafter.zero_grad()
        loss.backward(retain_graph=True)
        norms = [p.grad.abs().max() for p in drafter.trained() if p.grad is not None]
        loss = loss.detach()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(norm) for norm in norms)
        if case == "two output tokens":
            assert max(norms) > 0
        else:
            assert float(loss) == 0
            assert not norms or max(norms) == 0
