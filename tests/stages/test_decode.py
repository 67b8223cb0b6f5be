"""A text decoded among others is the text the prompt gives alone, and no work is spent on anything else."""

import pytest
import torch

from kernels.cache import KVCache
from kernels.sampling import KeyedNoise, keyed_choice, prompt_key
from kernels.window import causal_mask
from stages.common import decode
from stages.common.decode import Decoded, decode_batch
from stages.common.models import Verifier
from stages.common.packing import pack_linears
from stages.common.tiny import VOCABULARY, build_tiny
from tests.stages.scripted import cached_rows

SEED = 5
LENGTHS = [7, 1, 40, 3, 23, 2, 9, 16, 1, 30]


def make(kind="llama", *, end_ids=(), context=256, tied=True, seed=1):
    model = build_tiny(kind, seed=seed, tied=tied, context=context)
    return Verifier(model.requires_grad_(False), vocab_size=VOCABULARY, end_ids=end_ids)


def prompts_of(lengths, *, beginning=()):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [[*beginning, *prompt] for prompt in made]


def names(prompts):
    return [f"prompt/{i}" for i in range(len(prompts))]


@torch.inference_mode()
def alone(verifier, prompt, key, *, temperature, limit):
    """One token a step, one text, the cache of the engine: what vanilla decoding gives."""
    noise = KeyedNoise(seed=SEED, prompt_key=prompt_key(key), vocab=verifier.vocab_size)
    cache, ids, output = KVCache(layers=verifier.num_layers, capacity=8), list(prompt), []
    limit = min(limit, verifier.context_limit - len(prompt))
    hidden_D = verifier.prefill(ids, cache) if limit else None
    while len(output) < limit:
        logits_1V = verifier.logits(hidden_D[None])
        token = int(keyed_choice(logits_1V, [len(ids)], noise, temperature=temperature))
        output.append(token)
        ids.append(token)
        if token in verifier.end_ids:
            return Decoded(output, "stop")
        place = torch.tensor([[len(ids) - 1]])
        seen = causal_mask(cached=cache.length, new=1)
        hidden_D = verifier(torch.tensor([[token]]), place, seen, cache)[0, -1]
        cache.keep([0])
    return Decoded(output, "length")


def together(verifier, prompts, *, temperature=0.0, limit=12, batch_size=4, **more):
    return decode_batch(
        verifier,
        prompts,
        keys=names(prompts),
        seed=SEED,
        temperature=temperature,
        max_new_tokens=limit,
        batch_size=batch_size,
        **more,
    )


def singly(verifier, prompts, *, temperature=0.0, limit=12):
    return [
        alone(verifier, prompt, key, temperature=temperature, limit=limit)
        for prompt, key in zip(prompts, names(prompts), strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False), ("gemma", True)])
def test_each_text_is_what_it_is_alone(kind, tied, temperature):
    verifier, prompts = make(kind, tied=tied, end_ids=range(0, 60)), prompts_of(LENGTHS)
    expected = singly(verifier, prompts, temperature=temperature)
    assert len({len(text.output_ids) for text in expected}) > 2, "the texts must end at different steps"
    assert together(verifier, prompts, temperature=temperature) == expected
    backwards = decode_batch(
        verifier,
        prompts[::-1],
        keys=names(prompts)[::-1],
        seed=SEED,
        temperature=temperature,
        max_new_tokens=12,
        batch_size=3,
    )
    assert backwards[::-1] == expected


@pytest.mark.parametrize("batch_size", [1, 2, 9, 10, 64])
def test_batch_size_changes_nothing(batch_size):
    verifier, prompts = make(end_ids=range(0, 60)), prompts_of(LENGTHS)
    pack_linears(verifier)
    expected = singly(verifier, prompts, temperature=0.8)
    assert together(verifier, prompts, temperature=0.8, batch_size=batch_size) == expected


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("beginning", [[], list(range(10, 30))])
def test_kept_layers_are_what_each_text_caches_alone(batch_size, beginning):
    """All tokens but the last, which was never read; whatever slot a text moved to."""
    verifier, prompts = make(end_ids=range(0, 60)), prompts_of(LENGTHS, beginning=beginning)
    found = together(verifier, prompts, temperature=0.8, batch_size=batch_size, keep_layers=[1, 0])
    for prompt, text in zip(prompts, found, strict=True):
        assert text.context is not None
        wanted = cached_rows(verifier, [*prompt, *text.output_ids], [1, 0])
        assert text.context.dtype == torch.float16
        torch.testing.assert_close(text.context.float(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 5]])
def test_a_layer_that_is_not_there_is_refused(layers):
    with pytest.raises(ValueError, match=r"keep_layers: .* are not layers of a model with 2"):
        together(make(), prompts_of(LENGTHS[:1]), keep_layers=layers)


def test_a_text_without_a_new_token_has_no_context():
    full, short = together(make(context=32), prompts_of([32, 5]), limit=3, keep_layers=[1])
    assert full == Decoded([], "length", None)
    assert short.context is not None
    assert short.context.shape[3] == 5 + 2


@pytest.mark.parametrize("beginning", [[], [5], list(range(10, 30))])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_shared_beginnings_and_prompts_in_parts(monkeypatch, beginning, rows):
    """Equal prompts, a prompt that is the beginning of another, and passes too small for a prompt."""
    monkeypatch.setattr(decode, "PREFILL_ROWS", rows)
    verifier, prompts = make(), prompts_of(LENGTHS[:5], beginning=beginning)
    prompts += [prompts[0], prompts[4][:5], prompts[4]]
    expected = singly(verifier, prompts, temperature=0.8, limit=5)
    assert together(verifier, prompts, temperature=0.8, limit=5) == expected
    assert together(verifier, prompts[:1], temperature=0.8, limit=5) == expected[:1]


def test_equal_prompts_with_names_of_their_own_sample_differently():
    verifier = make()
    texts = together(verifier, [[9, 8, 7]] * 6, temperature=0.8)
    assert len({tuple(text.output_ids) for text in texts}) == 6
    assert texts == singly(verifier, [[9, 8, 7]] * 6, temperature=0.8)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_end_id_ends_a_text_at_any_step(temperature):
    free, prompts = make(), prompts_of(LENGTHS[:6])
    endless = together(free, prompts, temperature=temperature)
    assert all(text.finish_reason == "length" and len(text.output_ids) == 12 for text in endless)
    for step in range(12):
        # The token at this step of two texts: a model may have several end ids.
        ends = frozenset(endless[i].output_ids[step] for i in (0, 3))
        free.end_ids = ends
        for text, whole in zip(together(free, prompts, temperature=temperature), endless, strict=True):
            hits = [place for place, token in enumerate(whole.output_ids) if token in ends]
            if hits:
                assert text == Decoded(whole.output_ids[: hits[0] + 1], "stop")
            else:
                assert text == whole


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_never_more_than_the_limit(limit):
    verifier, prompts = make(), prompts_of(LENGTHS)
    texts = together(verifier, prompts, limit=limit)
    assert texts == singly(verifier, prompts, limit=limit)
    assert {len(text.output_ids) for text in texts} == {limit}


def test_an_end_id_on_the_last_allowed_token_is_a_stop():
    verifier, prompts = make(), prompts_of([4, 6])
    verifier.end_ids = frozenset({together(verifier, prompts, limit=3)[0].output_ids[-1]})
    assert together(verifier, prompts, limit=3)[0].finish_reason == "stop"


def test_the_context_limit_ends_a_text():
    verifier, prompts = make(context=32), prompts_of([28, 29, 30, 31, 32, 5])
    texts = together(verifier, prompts, limit=8)
    assert [len(text.output_ids) for text in texts] == [4, 3, 2, 1, 0, 8]
    assert texts == singly(verifier, prompts, limit=8)
    assert {text.finish_reason for text in texts} == {"length"}


@pytest.mark.parametrize(
    ("prompts", "message"), [([[3], []], "'prompt/1' is empty"), ([[3] * 33], "'prompt/0' has 33 tokens")]
)
def test_prompts_that_cannot_be_continued(prompts, message):
    with pytest.raises(ValueError, match=message):
        together(make(context=32), prompts)


def test_keys_and_batch_size_are_checked():
    with pytest.raises(ValueError, match="2 prompts came with 1 keys"):
        decode_batch(make(), [[3], [4]], keys=["a"], seed=0, temperature=0.0, max_new_tokens=1, batch_size=1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        together(make(), [[3]], batch_size=0)
    assert together(make(), []) == []


def test_no_row_is_spent_on_a_finished_text_and_the_head_speaks_once_a_token(monkeypatch):
    verifier, prompts = make(end_ids=range(0, 60)), prompts_of(LENGTHS, beginning=range(100, 120))
    rows, heads = [], []
    forward, logits = verifier.forward, verifier.logits
    monkeypatch.setattr(verifier, "forward", lambda ids, *rest: (rows.append(tuple(ids.shape)), forward(ids, *rest))[1])
    monkeypatch.setattr(verifier, "logits", lambda hidden: (heads.append(len(hidden)), logits(hidden))[1])
    texts = together(verifier, prompts)
    steps = sum(batch for batch, count in rows if count == 1)
    single_rows = sum(length == 1 for length in LENGTHS)  # prompts with one token of their own
    assert steps <= sum(len(text.output_ids) - 1 for text in texts) + single_rows
    assert sum(heads) == sum(len(text.output_ids) for text in texts)
    assert sum(count == 20 for _, count in rows) == 1, "the shared beginning runs once"


def test_progress_adds_up():
    verifier, prompts = make(end_ids=range(0, 60), context=40), prompts_of(LENGTHS)
    seen = []
    texts = together(verifier, prompts, progress=lambda tokens, finished: seen.append((tokens, finished)))
    assert sum(tokens for tokens, _ in seen) == sum(len(text.output_ids) for text in texts)
    assert sum(finished for _, finished in seen) == len(prompts)
