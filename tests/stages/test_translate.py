"""Two tokenizers that really differ: what one writes the other reads byte for byte, and words go back one for one."""

from pathlib import Path

import pytest
import torch

from stages.common import foreign
from stages.common.translate import load_words, match, save_words, tokens_of
from tests.stages.published import tokens_trained, trained_tokenizer

MASK = 2
END = 1
SPECIALS = ("<s>", "</s>", "<mask>")
TEXT = "the sum of thirteen numbers,\nthree of them naïve √ and other summing words: 🦜"


@pytest.fixture(scope="module")
def pair():
    return tokens_trained("sums", size=330), tokens_trained("code", size=310, specials=SPECIALS)


def words_of(verifier, drafter, *, vocab_size=None, rows=None, mask=MASK, end_ids=(END,)):
    sizes = {"vocab_size": vocab_size or len(verifier.tokens), "rows": rows or len(drafter.tokens)}
    return match(verifier, drafter, mask=mask, end_ids=end_ids, **sizes)


def own_ids(words, rows):
    """The drafter's ids behind rows."""
    V = len(words.own_V)
    return [int(words.own_V[row]) if row < V else row - V - 1 for row in rows]


def test_a_text_reads_as_the_same_bytes(pair):
    verifier, drafter = pair
    words = words_of(verifier, drafter)
    ids = verifier.inner(TEXT, add_special_tokens=False)["input_ids"]
    rows = [row for id_ in ids for row in words.read(id_)]
    assert len(rows) > len(ids), "some tokens are read in pieces"
    assert b"".join(drafter.tokens[own].bytes for own in own_ids(words, rows)) == TEXT.encode()
    assert not words.same
    assert sum(row < len(words.own_V) for row in rows) > len(ids) // 2, "others have a counterpart"


def test_every_token_of_the_verifier_writes_what_it_reads_as(pair):
    verifier, drafter = pair
    words = words_of(verifier, drafter)
    for id_, token in verifier.ordinary():
        assert b"".join(drafter.tokens[own].bytes for own in own_ids(words, words.read(id_))) == token.bytes
    assert {"the", "sum"} & {token.text for _, token in verifier.ordinary()}


def test_words_go_back_one_for_one(pair):
    verifier, drafter = pair
    words = words_of(verifier, drafter)
    assert len(set(words.d2t_Vd.tolist())) == len(set(words.words_Vd.tolist())) == len(words.d2t_Vd) > 256
    for own, id_ in zip(words.words_Vd.tolist(), words.d2t_Vd.tolist(), strict=True):
        assert int(words.own_V[id_]) == own, "what is proposed is read as it was written"
        assert drafter.tokens[own].bytes == verifier.tokens[id_].bytes
    absent = {token.bytes for _, token in drafter.ordinary()} - {token.bytes for _, token in verifier.ordinary()}
    assert absent, "the drafter has words that the verifier lacks"
    assert not absent & {drafter.tokens[own].bytes for own in words.words_Vd.tolist()}


def test_of_special_tokens_only_ends_are_proposed(pair):
    verifier, drafter = pair
    assert {0, 1, 2} & set(words_of(verifier, drafter).words_Vd.tolist()) == {END}
    assert not {0, 1, 2} & set(words_of(verifier, drafter, end_ids=()).words_Vd.tolist())
    assert END not in words_of(verifier, drafter, mask=END).words_Vd, "nor where one is borrowed as mask"
    bare = words_of(tokens_trained("sums", size=330, specials=("<begin>", "<end>")), drafter)
    spelled = b"".join(drafter.tokens[own].bytes for own in bare.pieces[0])
    assert spelled == b"<begin>", "a special token that the drafter lacks is a text to it"
    assert not [own for own in bare.pieces[0] if drafter.tokens[own].special]


def test_one_tokenizer_is_the_identity(pair):
    """By what ids mean, not how many there are: one has a mask behind, and its embedding rows are more."""
    verifier = tokens_trained("sums", size=330)
    inner, size = trained_tokenizer("sums", size=330), len(verifier.tokens)
    inner.add_special_tokens({"mask_token": "<mask>"})
    drafter = tokens_of(inner)
    words = words_of(verifier, drafter, mask=size, rows=400)
    assert words.same
    assert words.own_V.tolist() == list(range(size))
    assert words.words_Vd.tolist() == words.d2t_Vd.tolist() == list(range(1, size))
    assert not words.pieces
    sizes = [len(tokens_trained(name, size=290).tokens) for name in ("sums", "code")]
    assert sizes[0] == sizes[1], "equal lengths say nothing"
    assert not words_of(tokens_trained("sums", size=290), tokens_trained("code", size=290), mask=0).same


def test_ids_without_a_token_or_a_row_are_no_words(pair):
    verifier, drafter = pair
    words = words_of(verifier, drafter, vocab_size=len(verifier.tokens) + 6, rows=len(drafter.tokens) - 5)
    assert int(words.words_Vd.max()) < len(drafter.tokens) - 5
    assert int(words.d2t_Vd.max()) < len(verifier.tokens)
    with pytest.raises(ValueError, match="mask_token_id: 400 is no row"):
        words_of(verifier, drafter, mask=400)


def test_a_map_survives_its_file(pair, tmp_path):
    words = words_of(*pair)
    save_words(tmp_path, words)
    found = load_words(tmp_path)
    for name in ("own_V", "words_Vd", "d2t_Vd"):
        assert torch.equal(getattr(found, name), getattr(words, name))
    assert (found.pieces, found.same) == (words.pieces, words.same)
    save_words(tmp_path, words_of(pair[0], pair[0]))
    assert load_words(tmp_path).pieces == {}


GEMMA, SMOLLM2 = Path("data/scratch/tokenizers/gemma3"), Path("data/cpu/models/verifier")


@pytest.mark.slow
@pytest.mark.skipif(not (GEMMA.exists() and SMOLLM2.exists()), reason=f"needs tokenizers in {GEMMA} and {SMOLLM2}")
@pytest.mark.parametrize("turn", [False, True])
def test_smollm2_and_gemma_3_read_each_other(turn):
    """Byte-level BPE against SentencePiece pieces with byte fallback."""
    verifier, drafter = [foreign.verifier_tokens(folder) for folder in (SMOLLM2, GEMMA)][:: -1 if turn else 1]
    words = words_of(verifier, drafter, mask=3, end_ids=(1, 2))
    ids = verifier.inner(TEXT, add_special_tokens=False)["input_ids"]
    rows = [row for id_ in ids for row in words.read(id_)]
    assert b"".join(drafter.tokens[own].bytes for own in own_ids(words, rows)) == TEXT.encode()
    assert len(words.d2t_Vd) > 40_000
