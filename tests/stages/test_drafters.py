"""The drafter: cache or none, training rows or decoding rows, saved or not, it gives the same scores."""

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cache import FixedCache
from kernels.window import context_windows, training_windows
from stages.common import tiny
from stages.common.drafters import Drafter, DrafterCard, load_drafter, read_card, save_drafter
from stages.common.models import load_causal_lm
from stages.common.tiny import VOCABULARY
from stages.common.tokenizers import load_tokenizer
from tests.stages.scripted import (
    KINDS,
    cached,
    cached_rows,
    causal_lm,
    full_logits,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
)

G = 4
WORDS = [word for word in range(VOCABULARY) if word % 3]
CONFIG = "digest of the verifier's configuration"


@torch.inference_mode()
def scores(drafter, ids, window=G):
    """[G, V_d] behind `ids`, without a cache."""
    return drafter.draft(ids, window, drafter.new_cache(1))


def test_rotary_frequencies_stay_exact_in_bfloat16():
    exact = tiny_drafter().body.rotary_emb.inv_freq
    drafter = copy.deepcopy(tiny_drafter()).to(torch.bfloat16)  # its embedding is shared with other tests
    assert drafter.dtype == torch.bfloat16
    assert torch.equal(drafter.body.rotary_emb.inv_freq, exact)
    assert not torch.equal(exact.bfloat16().float(), exact)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_scores_do_not_depend_on_the_cache(kind, tied):
    """Windows drafted and rejected on the way leave nothing behind, whatever was accepted."""
    drafter, ids = tiny_drafter(kind, tied, words=WORDS), prompt_of(24)
    cache = drafter.new_cache(1)
    drafter.extend(ids[:5], cache)
    length = 5
    for count, window in ((1, G), (1, 1), (5, G), (3, 8), (9, 2)):
        found = drafter.draft(ids[length : length + count], window, cache)
        length += count
        assert cache.length == length, "committed tokens, and no mask rows"
        torch.testing.assert_close(found, scores(drafter, ids[:length], window), rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_unadapted_drafter_is_the_verifier_at_the_first_place(kind, tied):
    for length in (1, 13):
        ids = prompt_of(length)
        found = scores(tiny_drafter(kind, tied), ids)[0].softmax(-1)
        torch.testing.assert_close(found, full_logits(ids, kind, tied).softmax(-1), rtol=0, atol=1e-5)
    few = scores(tiny_drafter(kind, tied, words=WORDS), ids)[0]
    torch.testing.assert_close(few, full_logits(ids, kind, tied)[WORDS], rtol=0, atol=1e-5)


def training_scores(drafter, ids, anchors, *, window=G, revealed=None):
    """[W, G, V_d] of fully masked windows (or with the window rows `revealed` [W, G - 1]) beside one text."""
    anchors_BW, span = torch.tensor([anchors]), window - 1
    layout = training_windows(anchors_BW, torch.tensor([len(ids)]), text=len(ids), window=window)
    rows = torch.full((len(anchors), span), drafter.mask_id) if revealed is None else revealed
    hidden = drafter(torch.cat([torch.tensor([ids]), rows.reshape(1, -1)], 1), layout.positions_BR, layout.sees_BRC)
    return drafter.logits(hidden[0, layout.source_BWG[0]])


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_training_rows_score_as_decoding_rows(kind, tied, window):
    drafter, ids, anchors = tiny_drafter(kind, tied, words=WORDS), prompt_of(12), [1, 4, 5, 5, 11]
    found = training_scores(drafter, ids, anchors, window=window)
    for scores_GV, anchor in zip(found, anchors, strict=True):
        torch.testing.assert_close(scores_GV, scores(drafter, ids[:anchor], window), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_no_window_sees_clean_tokens_of_its_own_span_or_behind_it():
    drafter, ids, anchors = tiny_drafter(), prompt_of(14), [3, 4, 6, 9]
    before = training_scores(drafter, ids, anchors)
    for place in range(14):
        changed = [*ids[:place], ids[place] % 200 + 9, *ids[place + 1 :]]
        assert changed[place] != ids[place]
        after = training_scores(drafter, changed, anchors)
        for w, anchor in enumerate(anchors):
            same = torch.allclose(after[w], before[w], rtol=0, atol=1e-6)
            assert same == (place >= anchor), (place, anchor)


@torch.inference_mode()
def test_no_window_sees_a_token_revealed_in_another():
    drafter, ids, anchors = tiny_drafter(), prompt_of(14), [3, 4, 4]
    rows = torch.full((3, G - 1), drafter.mask_id)
    before = training_scores(drafter, ids, anchors, revealed=rows)
    rows[1, 1] = 77
    after = training_scores(drafter, ids, anchors, revealed=rows)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, True]
    changed = (after[1] - before[1]).abs().amax(-1) > 1e-4
    assert changed.tolist() == [False, True, True, True], "rows of a window see one another; the prefix sees none"


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_a_fed_unadapted_drafter_is_the_verifier_at_the_first_place(kind, tied):
    """The pending token alone is its own row; all before it is read from the verifier's cache."""
    drafter = tiny_drafter(kind, tied, prefix="verifier")
    for length in (1, 2, 13):
        ids = prompt_of(length)
        cache = cached(tiny_verifier(kind, tied), ids)
        found = drafter.draft(ids[-1:], G, cache.lend(drafter.layers))
        wanted = full_logits(ids, kind, tied).softmax(-1)
        torch.testing.assert_close(found[0].softmax(-1), wanted, rtol=0, atol=1e-5)
        assert cache.length == length - 1, "drafting commits nothing"
        torch.testing.assert_close(found, scores(tiny_drafter(kind, tied), ids), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_fed_drafter_reads_the_layers_it_was_cut_from():
    ids = prompt_of(9)
    cache = cached(tiny_verifier(), ids)
    drafter = tiny_drafter(layers=[1], prefix="verifier")
    right = drafter.draft(ids[-1:], G, cache.lend([1]))
    assert drafter.layers == (1,)
    assert not torch.allclose(right, drafter.draft(ids[-1:], G, cache.lend([0])), atol=1e-3)
    assert not torch.allclose(right, scores(tiny_drafter(layers=[1]), ids), atol=1e-3), "the whole verifier's prefix"


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_fed_training_rows_score_as_decoding_rows(kind, tied, window):
    drafter = tiny_drafter(kind, tied, layers=[1], words=WORDS, prefix="verifier")
    ids, anchors = prompt_of(12), [1, 4, 5, 5, 11]
    verifier = tiny_verifier(kind, tied)
    fixed = FixedCache(cached_rows(verifier, ids, [1])[:, :, None])
    layout = context_windows(torch.tensor([anchors]), torch.tensor([12]), cached=fixed.get_seq_length(), window=window)
    rows = torch.full((len(anchors), window), drafter.mask_id)
    rows[:, 0] = torch.tensor([ids[anchor - 1] for anchor in anchors])
    hidden = drafter(rows.reshape(1, -1), layout.positions_BR, layout.sees_BRC, fixed)
    for scores_GV, anchor in zip(drafter.logits(hidden[0, layout.source_BWG[0]]), anchors, strict=True):
        lent = cached(verifier, ids[:anchor]).lend(drafter.layers)
        torch.testing.assert_close(scores_GV, drafter.draft([ids[anchor - 1]], window, lent), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_the_mask_is_no_word():
    drafter = tiny_drafter(words=WORDS)
    assert drafter.mask_id == VOCABULARY
    assert drafter.mask_id not in drafter.d2t
    scores_GV = scores(drafter, prompt_of(3))
    assert scores_GV.shape == (G, len(WORDS))
    torch.testing.assert_close(scores_GV.softmax(-1).sum(-1), torch.ones(G))
    assert drafter.d2t[drafter.t2d[WORDS]].tolist() == WORDS
    assert int((drafter.t2d < 0).sum()) == VOCABULARY - len(WORDS)
    found = drafter.embed(torch.tensor([[5, drafter.mask_id]]))[0]
    assert torch.equal(found[0], drafter.body.embed_tokens.weight[5])
    assert torch.equal(found[1], drafter.mask_embedding)


def test_everything_is_trained_but_the_shared_embedding():
    drafter = tiny_drafter("qwen2")
    names = {name for name, p in drafter.named_parameters() if any(p is q for q in drafter.trained())}
    assert {name for name, _ in drafter.named_parameters()} - names == {"body.embed_tokens.weight"}
    assert {"mask_embedding", "lm_head.weight", "body.norm.weight"} <= names
    drafter.lm_head.weight.data += 1  # type: ignore[operator]
    assert not torch.equal(drafter.lm_head.weight, causal_lm("qwen2", copy=2).lm_head.weight[:VOCABULARY])


def card_of(drafter: Drafter, tokenizer: str) -> DrafterCard:
    return DrafterCard(
        kind="masked_window",
        block_size=G,
        mask_token_id=drafter.mask_id,
        steps=1,
        shift="left",
        prefix=drafter.prefix,
        layers=drafter.layers,
        verifier_tokenizer=tokenizer,
        verifier_config=CONFIG,
        vocab_size=VOCABULARY,
        draft_vocab_size=len(drafter.d2t),
        parameters=sum(p.numel() for p in drafter.trained()),
        objective="masked_ce",
        provenance={"steps": 3},
    )


def saved(folder: Path, kind, tied):
    """A trained-looking drafter in folder/drafter beside its verifier in folder/verifier."""
    for name in ("verifier", "drafter"):
        (folder / name).mkdir(parents=True)
    tiny.save_tiny(folder / "verifier", causal_lm(kind, tied, copy=1))
    drafter = tiny_drafter(kind, tied, layers=[1], words=WORDS, prefix="own" if tied else "verifier")
    g = torch.Generator().manual_seed(2)
    for p in drafter.trained():
        p.data += 0.02 * torch.randn(p.shape, generator=g)
    save_drafter(folder / "drafter", drafter, card_of(drafter, load_tokenizer(folder / "verifier").fingerprint()))
    return drafter


LOAD = """
import sys, torch
from pathlib import Path
from stages.common.drafters import load_drafter
from stages.common.models import load_causal_lm
from stages.common.tokenizers import load_tokenizer
for word in sys.argv[1:]:
    prefix, _, path = word.partition("=")
    folder = Path(path)
    verifier = load_causal_lm(folder / "verifier", torch.float32)
    name = load_tokenizer(folder / "verifier").fingerprint()
    embedding = verifier.get_input_embeddings()
    for packed in (False, True):
        settings = {"embedding": embedding, "tokenizer": name, "dtype": torch.float32, "packed": packed}
        settings |= {"config": "digest of the verifier's configuration"}
        drafter, card = load_drafter(folder / "drafter", **settings)
        assert (drafter.prefix, drafter.layers) == (card.prefix, card.layers) == (prefix, (1,))
        assert drafter.body.embed_tokens is embedding
        torch.save(drafter.draft([9, 8, 7, 6], 4, drafter.new_cache(1)), folder / f"{packed}.pt")
"""


def test_a_drafter_loaded_in_a_new_process_gives_the_same_scores(tmp_path):
    made = {tmp_path / f"{kind}_{tied}": saved(tmp_path / f"{kind}_{tied}", kind, tied) for kind, tied in KINDS}
    assert {drafter.prefix for drafter in made.values()} == {"own", "verifier"}
    words = [f"{drafter.prefix}={folder}" for folder, drafter in made.items()]
    subprocess.run([sys.executable, "-c", LOAD, *words], check=True, cwd=Path(__file__).parents[2])
    for folder, drafter in made.items():
        wanted = scores(drafter, [9, 8, 7, 6])
        assert torch.equal(torch.load(folder / "False.pt"), wanted), folder.name
        torch.testing.assert_close(torch.load(folder / "True.pt"), wanted, rtol=0, atol=1e-5)


def test_saved_files_and_refusals(tmp_path):
    drafter = saved(tmp_path, "llama", True)
    folder = tmp_path / "drafter"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "drafter.json", "model.safetensors"]
    card = read_card(folder)
    assert card == card_of(drafter, card.verifier_tokenizer)
    embedding = load_causal_lm(tmp_path / "verifier", torch.float32).get_input_embeddings()
    settings = {"embedding": embedding, "dtype": torch.float32, "config": CONFIG}
    with pytest.raises(ValueError, match="another tokenizer"):
        load_drafter(folder, tokenizer="other", **settings)
    with pytest.raises(ValueError, match=r"drafter\.json: no drafter here"):
        load_drafter(tmp_path, tokenizer=card.verifier_tokenizer, **settings)
    bigger = tiny_drafter("qwen2", True, layers=[1], words=WORDS)  # its biases have no place in a Llama
    config = (folder / "config.json").read_text()
    save_drafter(folder, bigger, replace(card, objective="streak"))
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match="too many"):
        load_drafter(folder, tokenizer=card.verifier_tokenizer, **settings)


@pytest.mark.parametrize("prefix", ["own", "verifier"])
def test_a_drafter_that_reads_the_cache_is_for_one_verifier(tmp_path, prefix):
    """One with a prefix of its own drafts for every verifier that speaks its ids."""
    drafter = tiny_drafter(layers=[1], words=WORDS, prefix=prefix)
    save_drafter(tmp_path, drafter, card_of(drafter, "words"))
    settings = {"embedding": causal_lm().get_input_embeddings(), "tokenizer": "words", "dtype": torch.float32}
    load_drafter(tmp_path, config=CONFIG, **settings)
    if prefix == "own":
        load_drafter(tmp_path, config="other", **settings)
    else:
        with pytest.raises(ValueError, match="reads the cache of another verifier"):
            load_drafter(tmp_path, config="other", **settings)
