"""Foreign drafters at work: training rows are decoding rows under both masks, and every text is vanilla's."""

import pytest
import torch

from kernels.window import bidirectional_mask, bidirectional_windows
from stages.common import validation, windows
from stages.common.models import Verifier
from stages.common.translate import match
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.evaluate.methods import specdiff2_steps
from tests.stages.published import ROWS, foreign_drafter, published, tokens_trained
from tests.stages.scripted import causal_lm, engine_of, prompt_of, tiny_drafter, tiny_verifier, vanilla_text
from tests.stages.test_methods import method_of, state_of

G = 4
METHODS = ("specdiff2", "specdiff2_train", "specdiff2_test", "specdiff2_trie", "specdiff2_tree")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return {kind: published(tmp_path_factory.mktemp(kind), kind) for kind in ("qwen2", "llama")}


@pytest.fixture(scope="module")
def crossed(places):
    """A verifier of a padded vocabulary, a drafter with another tokenizer; prompts hold tokens read in pieces."""
    spoken, own = tokens_trained("sums", size=300), tokens_trained("code", size=ROWS, specials=("<s>", "</s>", "<m>"))
    words = match(spoken, own, vocab_size=300, rows=ROWS, mask=2, end_ids=(1,))
    verifier = Verifier(causal_lm("llama", vocab=310, seed=4), vocab_size=300, end_ids=()).eval()
    drafters = {p: foreign_drafter(places["qwen2"], prefix=p, words=words) for p in ("own", "bidirectional")}
    assert len(words.pieces) > 5
    return verifier, drafters, words


def crossed_prompt(words, length, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 300, (length,), generator=g).tolist()
    ids[length // 2] = next(iter(words.pieces))
    return ids


# The mask ---------------------------------------------------------------------------------------------------


def test_bidirectional_windows_by_hand():
    found = bidirectional_windows(torch.tensor([[3], [1]]), torch.tensor([6, 2]), window=3)
    assert found.positions_BR.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 1, 2]]
    assert found.source_BWG.tolist() == [[[2, 3, 4]], [[0, 3, 4]]]
    assert found.target_BWG.tolist() == [[[3, 4, 5]], [[1, 2, 3]]]
    assert found.valid_BWG.tolist() == [[[True, True, True]], [[True, False, False]]]
    assert found.sees_BRC[0].all()
    assert (found.sees_BRC[1] == torch.tensor([True, False, False, True, True])).all(), "padding is seen by none"
    rows = [0, 3, 4]
    assert torch.equal(found.sees_BRC[1][rows][:, rows], bidirectional_mask(rows=3))


def batch_of(chosen, drafter, *, share=1.0, windows_=3, step=1):
    return windows.collate(chosen, drafter, None, windows=windows_, window=G, full_mask_share=share, seed=1, step=step)


def texts_of(*lengths, prompt=3):
    return [Example(id=f"{n}", ids=tuple(prompt_of(n, seed=n)), prompt_length=prompt) for n in lengths]


@torch.inference_mode()
@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "pruned"])
def test_training_rows_score_as_decoding_rows(places, kind, prefix):
    """Texts of several lengths in one batch, windows at several places of each."""
    drafter = tiny_drafter(prefix=prefix) if kind == "pruned" else foreign_drafter(places[kind], prefix=prefix)
    chosen = texts_of(17, 9, 12)
    batch = batch_of(chosen, drafter)
    found_XGV = drafter.logits(windows.hidden(drafter, batch)).flatten(0, 1)
    ids_X = [example.ids for example in chosen for _ in range(3)]
    anchors_X = batch.layout.target_BWG.flatten(0, 1)[:, 0].tolist()
    assert len(found_XGV) == 9
    assert len(set(anchors_X)) > 3
    for scores_GV, ids, anchor in zip(found_XGV, ids_X, anchors_X, strict=True):
        cache = drafter.new_cache(1) if prefix == "own" else None
        torch.testing.assert_close(scores_GV, drafter.draft(ids[:anchor], G, cache), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_nothing_of_its_own_span_or_behind_it_leaks_into_a_bidirectional_window(places):
    drafter, (text,) = foreign_drafter(places["qwen2"], prefix="bidirectional"), texts_of(14)
    batch = batch_of([text], drafter)
    before = windows.hidden(drafter, batch)[:, 0]
    anchors = batch.layout.target_BWG[:, 0, 0].tolist()
    assert batch.ids_BR.shape[1] == max(anchors) + G - 1, "rows end with the window"
    for place in range(14):
        ids = (*text.ids[:place], text.ids[place] % 200 + 9, *text.ids[place + 1 :])
        after = windows.hidden(drafter, batch_of([Example(id="14", ids=ids, prompt_length=3)], drafter))[:, 0]
        for w, anchor in enumerate(anchors):
            assert torch.allclose(after[w], before[w], rtol=0, atol=1e-6) == (place >= anchor), (place, anchor)


@torch.inference_mode()
def test_the_last_real_tokens_row_sees_what_is_revealed_only_where_the_mask_is_bidirectional(places):
    ids, rows = prompt_of(7), torch.full((G - 1,), 259)
    for prefix in ("own", "bidirectional"):
        drafter = foreign_drafter(places["qwen2"], prefix=prefix)
        found = []
        for word in (drafter.mask_id, 65):
            rows[1] = word
            found.append(drafter.window(ids, rows, drafter.new_cache(1) if prefix == "own" else None)[0, 6])
        assert torch.equal(*found) == (prefix == "own")


def test_validation_measures_as_many_windows_of_a_text_whatever_the_mask(places):
    v = Validation(share=0.5, windows=3, tree_nodes=4)
    for prefix in ("own", "bidirectional"):
        drafter = foreign_drafter(places["llama"], prefix=prefix)
        row = validation.validate(drafter, texts_of(15, 11), None, v, window=G, sequences=2, seed=3)
        assert {"loss", "streak", "tree", f"accept_{G}"} <= set(row)


# Texts in other tokens --------------------------------------------------------------------------------------


def test_a_text_is_trained_on_in_the_drafters_rows(crossed):
    _, drafters, words = crossed
    piece = next(iter(words.pieces))
    count = len(words.pieces[piece])
    rows = [{"id": "a", "prompt_ids": [9, piece, 8], "output_ids": [10, piece, 11, 12]}]
    (found,) = windows.examples(rows, max_tokens=50, read=drafters["own"].read)
    assert found.prompt_length == 2 + count
    assert len(found.ids) == 5 + 2 * count
    assert list(found.places) == [3 + count, 3 + 2 * count, 4 + 2 * count], "where a token of the verifier begins"
    batch = batch_of([found], drafters["own"], windows_=3)
    assert set(batch.layout.target_BWG[0, :, 0].tolist()) == set(found.places)
    at = batch.layout.target_BWG[0, :, 0].tolist().index(3 + count)
    targets = batch.targets_BWG[0, at].tolist()
    assert targets[:count] == [-1] * min(count, G), "a piece is no word of the verifier"
    plain = [{"id": "a", "prompt_ids": [9, 8], "output_ids": [10, 11]}]
    assert windows.examples(plain, max_tokens=50, read=drafters["own"].read) == windows.examples(plain, max_tokens=50)
    with pytest.raises(ValueError, match="none of 1 trajectories"):
        windows.examples(
            [{"id": "a", "prompt_ids": [piece] * 9, "output_ids": [10]}], max_tokens=5, read=drafters["own"].read
        )


@torch.inference_mode()
def test_the_cache_is_exact_while_a_text_in_other_tokens_grows(crossed):
    _, drafters, words = crossed
    method, ids = method_of("specdiff2_train", drafters["own"]), crossed_prompt(words, 30, seed=1)
    method.start(ids[:9], torch.empty(0, 0))
    for end in (10, 13, 14, 19, 30):
        found = method.logits(state_of(ids[:end]), G)
        rows = drafters["own"].read(ids[:end])
        torch.testing.assert_close(
            found, drafters["own"].draft(rows, G, drafters["own"].new_cache(1)), rtol=0, atol=1e-5
        )
        assert method.cache.length == len(rows)
    assert method.cache.length > 30


# Methods ----------------------------------------------------------------------------------------------------


def check(verifier, drafter, name, prompt, *, temperature, limit=14, **shape):
    method = method_of(name, drafter, **shape)
    text = engine_of(verifier, temperature=temperature, limit=limit).decode(prompt, method, prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=limit)
    assert max(cycle.proposed for cycle in text.cycles) > 0
    return text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_every_text_of_a_foreign_drafter_is_vanillas(places, kind, prefix, temperature):
    verifier, drafter = tiny_verifier(vocab=270), foreign_drafter(places[kind], prefix=prefix)
    for number, name in enumerate(METHODS):
        check(verifier, drafter, name, prompt_of(3 + 4 * number, seed=number), temperature=temperature)
    check(verifier, drafter, "specdiff", prompt_of(5), temperature=0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
def test_every_text_in_other_tokens_is_vanillas(crossed, prefix, temperature):
    verifier, drafters, words = crossed
    for number, name in enumerate(METHODS):
        check(verifier, drafters[prefix], name, crossed_prompt(words, 4 + 3 * number, number), temperature=temperature)


def test_rules_that_need_q_are_refused_over_another_tokenizer(crossed, places):
    verifier, drafters, words = crossed
    check(verifier, drafters["own"], "specdiff", crossed_prompt(words, 6), temperature=0.0)
    with pytest.raises(ValueError, match="another tokenizer than the verifier; only Match is exact"):
        check(verifier, drafters["own"], "specdiff", crossed_prompt(words, 6), temperature=0.7)
    method = method_of("specdiff", foreign_drafter(places["qwen2"]))  # over the same: q is 0 beyond its words
    text = engine_of(tiny_verifier(), temperature=0.7).decode(prompt_of(5), method, prompt_id="p")
    assert len(text.output_ids) == 16


@pytest.mark.parametrize("length", [26, 28, 30, 31])
@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
def test_near_the_drafters_limit_the_window_shrinks(places, prefix, length):
    verifier, drafter = tiny_verifier(context=40), foreign_drafter(places["llama"], prefix=prefix)
    drafter.context_limit = 32
    text = engine_of(verifier, limit=20).decode(prompt_of(length), method_of("specdiff2_tree", drafter), prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt_of(length), limit=20)
    assert text.cycles[-1].proposed == 0, "plain steps behind it"


def test_rows_not_tokens_count_against_the_drafters_limit(crossed):
    _, drafters, words = crossed
    method, ids = method_of("specdiff2_tree", drafters["own"], gamma=8), crossed_prompt(words, 12)
    rows = len(drafters["own"].read(ids))
    before, drafters["own"].context_limit = drafters["own"].context_limit, rows + 2
    assert method.window(state_of(ids)) == 3
    drafters["own"].context_limit = before


# Several steps ----------------------------------------------------------------------------------------------


def steps_method(drafter, steps, temperature=0.0):
    return specdiff2_steps.build(
        specdiff2_steps.Params(drafter="", gamma=G, steps=steps, temperature=temperature), drafter
    )


@torch.inference_mode()
@pytest.mark.parametrize("steps", [2, 4])
def test_bidirectional_steps_are_fresh_passes_over_the_whole_text(places, steps):
    """x_1, too, is drafted again while it is undecided: its row sees what was revealed."""
    drafter, changed = foreign_drafter(places["qwen2"], prefix="bidirectional"), 0
    for seed in range(4):
        ids, draft, masked = prompt_of(6, seed=seed), [drafter.mask_id] * G, set(range(G))
        for step in range(1, steps + 1):
            q_GVd = drafter.logits(drafter.window(ids, torch.tensor(draft[:-1]), None)[0, 5:]).softmax(-1)
            for j in sorted(masked, key=lambda j: -float(q_GVd[j].max()))[: len(masked) - G * (steps - step) // steps]:
                draft[j] = int(drafter.d2t[q_GVd[j].argmax()])
                masked.remove(j)
        found = steps_method(drafter, steps).propose(state_of(ids)).tree.tokens_N.tolist()
        assert found == draft
        changed += found != steps_method(drafter, 1).propose(state_of(ids)).tree.tokens_N.tolist()
    assert changed


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prefix", ["own", "bidirectional"])
def test_every_text_of_several_steps_is_vanillas(places, crossed, prefix, temperature):
    verifier, drafters, words = crossed
    pairs = [(tiny_verifier(), foreign_drafter(places["llama"], prefix=prefix), prompt_of(5))]
    for verifier_, drafter, prompt in [*pairs, (verifier, drafters[prefix], crossed_prompt(words, 7))]:
        wanted = vanilla_text(verifier_, prompt, temperature=temperature, limit=12)
        text = engine_of(verifier_, temperature=temperature, limit=12).decode(
            prompt, steps_method(drafter, 3, temperature=1.0), prompt_id="p"
        )
        assert text.output_ids == wanted
