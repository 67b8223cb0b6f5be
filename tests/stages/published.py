"""A foreign drafter and its verifier, on disk as the pipeline lays them out; and tokenizers that differ."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.common import foreign, tiny
from stages.common.drafters import ForeignDrafter
from stages.common.tiny import END_IDS, VOCABULARY
from stages.common.translate import Tokens, Words, match, tokens_of
from tests.stages.scripted import causal_lm

MASK_ID = {"qwen2": VOCABULARY, "llama": 77}  # a token of its own; a word that is borrowed
ROWS = VOCABULARY + 9  # of the drafter's embedding; the verifier's has VOCABULARY + 5


def published(folder: Path, kind="qwen2", *, seed=7, mask=None, context=256) -> Path:
    """models/drafter of this kind under a profile's folder."""
    mask = MASK_ID[kind] if mask is None else mask
    place = folder / "models" / "drafter"
    place.mkdir(parents=True)
    model = causal_lm(kind, False, seed=seed, vocab=ROWS, context=context, copy=9)
    tiny.save_published(place, model, mask_token_id=mask)
    foreign.write_layout(place, foreign.Layout(layout=kind, mask_token_id=mask, shift="left"))
    return place


def byte_words(place: Path) -> Words:
    """The map between the byte tokenizer, as the verifier's, and the published drafter's."""
    return match(
        tokens_of(tiny.byte_tokenizer()),
        foreign.drafter_tokens(place),
        vocab_size=VOCABULARY,
        rows=ROWS,
        mask=foreign.read_layout(place).mask_token_id,
        end_ids=END_IDS,
    )


def foreign_drafter(place: Path, *, prefix="own", words=None) -> ForeignDrafter:
    weights = foreign.weights_of(place, dtype=torch.float32)
    model = foreign.model_of(foreign.config_of(place), weights)
    mask = foreign.read_layout(place).mask_token_id
    return ForeignDrafter(model, words=words or byte_words(place), mask=mask, prefix=prefix).eval()


TEXTS = {
    "sums": ["the sum of the numbers is the sum of them all", "there are three numbers, thirteen and thirty", "naïve √"]
    * 4,
    "code": ["for number in numbers: return the_sum(number)", "def summing(them): return sum(them)", "other words"] * 4,
}


def trained_tokenizer(name: str, *, size: int, specials=("<s>", "</s>")) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges of its own; `specials` first, the second ends a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS[name], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=specials[0], eos_token=specials[1])


def tokens_trained(name: str, **settings) -> Tokens:
    return tokens_of(trained_tokenizer(name, **settings))
