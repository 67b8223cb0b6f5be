"""Batches: every text is what the prompt gives alone, whatever its neighbours draft and accept."""

import pytest
import torch

from kernels.cache import RaggedKVCache
from stages.evaluate.batch import BatchEngine
from stages.evaluate.contract import Sampling
from stages.evaluate.harness import Prompt
from stages.evaluate.methods import specdiff2_steps
from tests.stages.scripted import Scripted, engine_of, prompt_of, tiny_drafter, tiny_verifier, vanilla_text
from tests.stages.test_methods import method_of

LENGTHS = (3, 40, 1, 17, 8, 26, 5)
PROMPTS = [Prompt(id=f"p{n}", split="test", ids=tuple(prompt_of(n, seed=n))) for n in LENGTHS]


def batch_of(verifier, *, slots, temperature=0.0, limit=12, seed=3):
    settings = Sampling(temperature=temperature, top_k=0, top_p=1.0, seed=seed)
    return BatchEngine(verifier, settings, max_new_tokens=limit, slots=slots)


def alone(verifier, **settings):
    return [vanilla_text(verifier, prompt.ids, prompt_id=prompt.id, **settings) for prompt in PROMPTS]


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_the_prompts_alone(slots, temperature):
    verifier = tiny_verifier()
    wanted = alone(verifier, temperature=temperature, limit=12)
    for name in ("vanilla", "prompt_lookup", "specdiff2_tree", "specdiff2_trie", "specdiff2"):
        drafter = tiny_drafter(prefix="verifier", layers=[1])
        engine = batch_of(verifier, slots=slots, temperature=temperature)
        texts = engine.decode_all(PROMPTS, lambda name=name, drafter=drafter: method_of(name, drafter, gamma=3))
        assert [text.output_ids for text in texts] == wanted, name
        assert [text.finish_reason for text in texts] == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("name", ["specdiff2_tree", "specdiff2_trie"])
def test_a_text_drafts_and_accepts_as_it_does_alone(name):
    """The drafter is the verifier itself, so its q decides what is proposed: a stray row or a stale key would show."""
    verifier, drafter = tiny_verifier(), tiny_drafter(prefix="verifier")
    engine = batch_of(verifier, slots=4, temperature=1.3, limit=20)
    texts = engine.decode_all(PROMPTS, lambda: method_of(name, drafter, gamma=4))
    single = engine_of(verifier, temperature=1.3, limit=20)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        other = single.decode(prompt.ids, method_of(name, drafter, gamma=4), prompt_id=prompt.id)
        assert [(c.tokens, c.accepted, c.proposed, c.nodes, c.stop) for c in text.cycles] == [
            (c.tokens, c.accepted, c.proposed, c.nodes, c.stop) for c in other.cycles
        ]
    assert sum(cycle.accepted for text in texts for cycle in text.cycles) > 5


def test_acceptance_is_ragged():
    """Scripted drafts that are right for 0 .. 4 tokens by turns, with siblings, each text out of step with the next."""
    verifier = tiny_verifier()
    answers = dict(zip([prompt.ids for prompt in PROMPTS], alone(verifier, limit=25), strict=True))

    class Told(Scripted):
        def __init__(self):
            super().__init__([], gamma=4, right=lambda cycle: (cycle + self.prompt_length) % 5, siblings=True)

        def start(self, prompt_ids, features_TC):
            super().start(prompt_ids, features_TC)
            self.answer = answers[tuple(prompt_ids)]

    texts = batch_of(verifier, slots=3, limit=25).decode_all(PROMPTS, Told)
    assert [text.output_ids for text in texts] == list(answers.values())
    assert {cycle.accepted for text in texts for cycle in text.cycles} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("limit", [0, 1, 4, 5])
def test_limits_and_end_ids(limit):
    plain = alone(tiny_verifier(), limit=9)
    for place in (0, 2, 4):
        end = plain[1][place]
        verifier = tiny_verifier(end_ids=[end])
        wanted = alone(verifier, limit=limit)
        drafter = tiny_drafter(prefix="verifier")
        texts = batch_of(verifier, slots=2, limit=limit).decode_all(
            PROMPTS, lambda drafter=drafter: method_of("specdiff2_tree", drafter, gamma=4)
        )
        assert [text.output_ids for text in texts] == wanted
        assert [text.finish_reason for text in texts] == ["stop" if end in text else "length" for text in wanted]


def test_texts_stop_at_the_context_limit():
    verifier, drafter = tiny_verifier(context=44), tiny_drafter(context=44, prefix="verifier")
    texts = batch_of(verifier, slots=3, limit=30).decode_all(PROMPTS, lambda: method_of("specdiff2_tree", drafter))
    assert [text.output_ids for text in texts] == alone(verifier, limit=30)
    assert len(texts[1].output_ids) == 4


def test_the_account_adds_up():
    verifier, drafter = tiny_verifier(), tiny_drafter(prefix="verifier")
    texts = batch_of(verifier, slots=3, limit=12).decode_all(PROMPTS, lambda: method_of("specdiff2_tree", drafter))
    for text in texts:
        assert 1 + sum(len(cycle.tokens) for cycle in text.cycles) == len(text.output_ids)
        assert text.decode_s > 0
        assert text.prefill_s > 0


def test_what_is_not_built_says_so():
    verifier, drafter = tiny_verifier(), tiny_drafter(prefix="verifier")
    with pytest.raises(ValueError, match="slots is 0"):
        batch_of(verifier, slots=0)
    steps = specdiff2_steps.Params(drafter="adapt", gamma=4, steps=2, temperature=0.0)
    with pytest.raises(ValueError, match="in several passes"):
        batch_of(verifier, slots=2).decode_all(PROMPTS, lambda: specdiff2_steps.build(steps, drafter))
    reader = method_of("vanilla", None)
    reader.reads = (1,)
    with pytest.raises(ValueError, match="hidden states"):
        batch_of(verifier, slots=2).decode_all(PROMPTS, lambda: reader)


def test_the_cache_keeps_a_path_in_every_slot():
    """Rows of slot 0 and 1 at their own lengths; each keeps its own rows, in its own order."""
    cache = RaggedKVCache(layers=1, slots=2, capacity=9)

    def write(first, rows_BN):
        rows = rows_BN.float()[:, None, :, None]
        return cache.update(rows, -rows, 0)

    cache.open(0, 1, new=2, device="cpu")
    write(0, torch.tensor([[1, 2]]))
    cache.commit([2])
    depth = torch.tensor([[0, 1, 1], [0, 1, 2]])
    sees = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
    sees[:, :, 0] = True
    positions, seen = cache.open_trees(0, 2, depth, sees)
    assert positions.tolist() == [[2, 3, 3], [0, 1, 2]]
    assert seen[0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert seen[1].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]
    keys, _ = write(0, torch.tensor([[3, 4, 5], [6, 7, 8]]))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 5]
    cache.keep([[0, 2], [1]])
    assert cache.lengths == [4, 1]
    assert cache.rows_of(0, [0])[0, 0, 0, :, 0].tolist() == [1, 2, 3, 5]
    assert cache.rows_of(1, [0])[0, 1, 0, :, 0].tolist() == [-7]
    with pytest.raises(ValueError, match="room for 9"):
        cache.open_trees(0, 2, torch.zeros(2, 6, dtype=torch.long), torch.eye(6, dtype=torch.bool).repeat(2, 1, 1))
