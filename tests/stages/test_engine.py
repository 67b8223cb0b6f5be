"""The engine emits vanilla's text whatever is drafted, keeps its cache in step, and stops where vanilla stops."""

from time import sleep

import pytest
import torch

from kernels import sampling
from kernels.cache import KVCache
from stages.common.models import Verifier
from stages.common.tiny import VOCABULARY
from stages.evaluate.contract import Proposal, Sampling, Text
from stages.evaluate.engine import Engine
from stages.evaluate.methods.vanilla import Vanilla
from tests.stages.scripted import (
    KINDS,
    Scripted,
    Sleepy,
    TableVerifier,
    always,
    causal_lm,
    engine_of,
    full_logits,
    prompt_of,
    tiny_verifier,
    vanilla_text,
)

G = 4
PAUSE = 0.02


@pytest.mark.parametrize("length", [1, 2, 17, 40])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_vanilla_is_the_greedy_text_of_transformers(kind, tied, length):
    prompt = prompt_of(length)
    with torch.no_grad():
        wanted = causal_lm(kind, tied, copy=1).generate(
            torch.tensor([prompt]),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(range(VOCABULARY, VOCABULARY + 5)),
        )
    assert vanilla_text(tiny_verifier(kind, tied), prompt, limit=14) == wanted[0, length:].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_vanilla_is_the_noisy_arg_max_of_full_passes(temperature):
    prompt = prompt_of(5)
    noise = sampling.KeyedNoise(seed=3, prompt_key=sampling.prompt_key("p"), vocab=VOCABULARY)
    ids = list(prompt)
    for _ in range(10):
        ids.append(int((full_logits(ids) / temperature + noise.row(len(ids))).argmax()))
    found = vanilla_text(tiny_verifier(), prompt, temperature=temperature, limit=10)
    assert found == ids[5:]
    assert found != vanilla_text(tiny_verifier(), prompt, temperature=temperature, limit=10, prompt_id="other")


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("right", range(G + 1))
@pytest.mark.parametrize(("temperature", "length"), [(0.0, 1), (1.3, 9)])
def test_cache_is_in_step_after_every_length_of_acceptance(temperature, length, right, siblings):
    prompt, verifier = prompt_of(length), tiny_verifier("qwen2", False)
    wanted = vanilla_text(verifier, prompt, temperature=temperature, limit=14)
    engine = engine_of(verifier, temperature=temperature, limit=14)
    method = Scripted(wanted, gamma=G, right=always(right), siblings=siblings)
    text = Text(list(prompt))
    for _ in engine.stream(text, method, prompt_id="p"):
        ids = text.prompt_ids + text.output_ids
        assert engine.cache.length == len(ids) - 1
        with torch.inference_mode():
            next_V = engine.verify(ids[-1])[0]
        torch.testing.assert_close(next_V, full_logits(ids, "qwen2", False), rtol=0, atol=1e-5)
    assert text.output_ids == wanted
    assert all(cycle.accepted == min(right, cycle.proposed) for cycle in text.cycles)


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_acceptance_may_differ_from_cycle_to_cycle(kind, tied):
    prompt, verifier = prompt_of(6), tiny_verifier(kind, tied)
    wanted = vanilla_text(verifier, prompt, temperature=0.7, limit=40)
    pattern = [0, 4, 1, 0, 0, 3, 4, 4, 2, 0, 1, 4, 3]
    method = Scripted(wanted, gamma=G, right=lambda cycle: pattern[cycle % 13], siblings=True)
    text = engine_of(verifier, temperature=0.7, limit=40).decode(prompt, method, prompt_id="p")
    assert text.output_ids == wanted
    assert [c.accepted for c in text.cycles] == [min(a, c.proposed) for a, c in zip(pattern, text.cycles, strict=False)]


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_always_wrong_and_always_right_drafts_are_the_ends_of_acceptance(gamma):
    prompt, verifier = prompt_of(3), tiny_verifier()
    wanted = vanilla_text(verifier, prompt, limit=1 + 2 * (gamma + 1))
    for right, cycles in ((0, 2 * (gamma + 1)), (gamma, 2)):
        method = Scripted(wanted, gamma=gamma, right=always(right))
        text = engine_of(verifier, limit=len(wanted)).decode(prompt, method, prompt_id="p")
        assert text.output_ids == wanted
        assert len(text.cycles) == cycles, "acceptance length 1, or gamma + 1"
        assert {cycle.accepted for cycle in text.cycles} == {right}


@pytest.mark.parametrize("right", [0, 1, G])
@pytest.mark.parametrize("place", range(1, 2 * (G + 1) + 1))
def test_an_end_id_anywhere_in_a_window_ends_the_text_there(place, right):
    prompt = prompt_of(8, seed=10)
    plain = vanilla_text(tiny_verifier(), prompt, temperature=1.3, limit=20)
    end = plain[place]
    assert plain.index(end) == place, "choose a prompt whose text does not repeat"
    verifier = tiny_verifier(end_ids=[end])
    method = Scripted(plain, gamma=G, right=always(right), siblings=bool(place % 2))
    engine = engine_of(verifier, temperature=1.3, limit=20)
    shown = []
    text = Text(prompt)
    for part in engine.stream(text, method, prompt_id="p"):
        shown += part
    assert text.output_ids == shown == plain[: place + 1]
    assert text.finish_reason == "stop"
    assert engine.cache.length == len(prompt) + place, "rows behind the end are dropped"
    assert vanilla_text(verifier, prompt, temperature=1.3, limit=20) == text.output_ids


def test_the_first_of_several_end_ids_ends_the_text_and_none_never_does():
    prompt = prompt_of(8, seed=10)
    plain = vanilla_text(tiny_verifier(), prompt, temperature=1.3, limit=20)
    for ends, length in (([plain[9], plain[4]], 5), ([plain[0], plain[6]], 1), ([], 20)):
        method = Scripted(plain, gamma=G, right=always(G))
        engine = engine_of(tiny_verifier(end_ids=ends), temperature=1.3, limit=20)
        text = engine.decode(prompt, method, prompt_id="p")
        assert text.output_ids == plain[:length]
        assert text.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("limit", [0, 1, 2, G, G + 1, G + 2])
@pytest.mark.parametrize("right", [0, G])
def test_the_limit_is_met_exactly(limit, right):
    prompt, verifier = prompt_of(5), tiny_verifier()
    plain = vanilla_text(verifier, prompt, limit=20)
    method = Scripted(plain, gamma=G, right=always(right), siblings=True)
    text = engine_of(verifier, limit=limit).decode(prompt, method, prompt_id="p")
    assert text.output_ids == plain[:limit]
    assert text.finish_reason == "length"
    assert sum(cycle.accepted + 1 for cycle in text.cycles) == max(0, limit - 1), "nothing is counted and then cut"


def test_an_end_id_at_the_limit_is_a_stop():
    prompt = prompt_of(5)
    plain = vanilla_text(tiny_verifier(), prompt, temperature=1.3, limit=6)
    verifier = tiny_verifier(end_ids=[plain[5]])
    text = engine_of(verifier, temperature=1.3, limit=6).decode(prompt, Vanilla(), prompt_id="p")
    assert (text.output_ids, text.finish_reason) == (plain, "stop")


def test_a_negative_limit_and_an_empty_prompt_are_refused():
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        engine_of(tiny_verifier(), limit=-1)
    with pytest.raises(ValueError, match="empty prompt"):
        engine_of(tiny_verifier()).decode([], Vanilla(), prompt_id="p")


@pytest.mark.parametrize("length", range(28, 34))
def test_the_window_shrinks_at_the_context_limit(length):
    prompt, verifier = prompt_of(length), tiny_verifier(context=32)
    wanted = vanilla_text(tiny_verifier(), prompt, limit=20)[: max(0, 32 - length)]
    method = Scripted(wanted, gamma=8, right=always(8))
    text = engine_of(verifier, limit=20).decode(prompt, method, prompt_id="p")
    assert text.output_ids == wanted
    assert text.finish_reason == "length"
    assert engine_of(verifier, limit=20).decode(prompt, Vanilla(), prompt_id="p").output_ids == wanted


def test_a_draft_beyond_the_limit_is_a_fault_of_the_method():
    class Overlong(Scripted):
        def propose(self, state):
            return super().propose(state._replace(max_depth=99))

    prompt, verifier = prompt_of(5), tiny_verifier()
    plain = vanilla_text(verifier, prompt, limit=20)
    with pytest.raises(AssertionError, match="beyond the limit"):
        engine_of(verifier, limit=3).decode(prompt, Overlong(plain, gamma=G, right=always(G)), prompt_id="p")


@pytest.mark.parametrize("right", range(G + 1))
def test_counts_add_up(right):
    prompt = prompt_of(8, seed=10)
    plain = vanilla_text(tiny_verifier(), prompt, temperature=1.3, limit=40)
    place = 17
    verifier = tiny_verifier(end_ids=[plain[place]])
    method = Scripted(plain, gamma=G, right=always(right), siblings=True)
    text = engine_of(verifier, temperature=1.3, limit=40).decode(prompt, method, prompt_id="p")
    cut = sum(cycle.accepted + 1 - len(cycle.tokens) for cycle in text.cycles)
    assert cut == text.cycles[-1].accepted + 1 - len(text.cycles[-1].tokens), "only the last cycle is cut"
    assert sum(cycle.accepted + 1 for cycle in text.cycles) == len(text.output_ids) - 1 + cut
    assert all(cycle.proposed == G and cycle.nodes == 3 * G - 1 for cycle in text.cycles)
    assert cut == -place % (right + 1)


def test_phantom_rows_of_a_padded_head_are_never_emitted():
    model = causal_lm("llama", False, seed=7, vocab=VOCABULARY + 6)
    with torch.no_grad():
        for row in range(3):
            model.lm_head.weight[VOCABULARY + row] = 9 * model.lm_head.weight[row + 20]
            model.lm_head.weight[VOCABULARY + 3 + row] = -9 * model.lm_head.weight[row + 20]
    verifier = Verifier(model, vocab_size=VOCABULARY, end_ids=())
    prompt = prompt_of(6)
    for temperature in (0.0, 1.3):
        plain = vanilla_text(verifier, prompt, temperature=temperature, limit=20)
        method = Scripted(plain, gamma=G, right=always(2))
        text = engine_of(verifier, temperature=temperature, limit=20).decode(prompt, method, prompt_id="p")
        assert text.output_ids == plain
        assert max(plain) < VOCABULARY
    cache = verifier.new_cache(32)
    last_V = model.lm_head(verifier.prefill(prompt, cache))
    assert int(last_V.argmax()) >= VOCABULARY, "the phantoms would win"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_the_logits_raises_and_never_becomes_a_token(temperature):
    scores_VV = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    scores_VV[2] = torch.nan
    for prompt in ([2], [0]):
        table = scores_VV.clone()
        table[[0, 1, 3, 4], 2] = 50.0  # every other token leads to the broken one
        engine = engine_of(TableVerifier(table), temperature=temperature, limit=9)
        with pytest.raises(ValueError, match="NaN"):
            engine.decode(prompt, Vanilla(), prompt_id="p")


def laps_of(*, load_s=0.0, start_s=0.0, propose_s=0.0, verify_s=0.0):
    """Seconds (prefill, draft, verify, other) of two cycles."""
    verifier = TableVerifier(torch.eye(VOCABULARY), pause_s=verify_s)
    sleep(load_s)
    engine = Engine(verifier, Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0), max_new_tokens=3)
    method = Sleepy(Vanilla(), start_s=start_s, propose_s=propose_s)
    text = engine.decode([5], method, prompt_id="p")
    return text.prefill_s, *(text.seconds(part) for part in ("draft_s", "verify_s", "other_s"))


@pytest.mark.parametrize(
    ("pause", "moved"),
    [("load_s", {}), ("start_s", {0: 1}), ("propose_s", {1: 2}), ("verify_s", {0: 1, 2: 2})],
)
def test_each_pause_is_on_its_own_clock(pause, moved):
    laps_of()
    found = laps_of(**{pause: PAUSE})
    for column, seconds in enumerate(found):
        expected = moved.get(column, 0) * PAUSE
        assert expected <= seconds < expected + PAUSE / 2, (column, found)


def test_the_clock_stands_still_between_cycles():
    engine = engine_of(TableVerifier(torch.eye(5)), limit=4)
    text = Text([1])
    for _ in engine.stream(text, Vanilla(), prompt_id="p"):
        sleep(PAUSE)
    assert text.prefill_s + text.decode_s < PAUSE


@pytest.mark.parametrize("end", [None, 3, 7])
@pytest.mark.parametrize("every", [1, 5])
def test_the_yardstick_leaves_text_and_cache_as_they_were(every, end):
    prompt = prompt_of(8, seed=10)
    plain = vanilla_text(tiny_verifier(), prompt, temperature=0.7, limit=16)
    ends = [] if end is None else [plain[end]]
    wanted = vanilla_text(tiny_verifier(end_ids=ends), prompt, temperature=0.7, limit=16)
    engine = engine_of(tiny_verifier(end_ids=ends), temperature=0.7, limit=16)
    text = Text(prompt)
    for turn, _ in enumerate(engine.stream(text, Scripted(plain, gamma=G, right=always(3)), prompt_id="p")):
        if turn % every and not text.finish_reason:
            continue
        before = engine.cache.length
        count = len(text.output_ids) - 1
        assert len(engine.vanilla_steps(text, count, prompt_id="p")) == count
        assert engine.cache.length == before == len(prompt) + count
        ids = prompt + text.output_ids
        with torch.inference_mode():
            torch.testing.assert_close(engine.verify(ids[-1])[0], full_logits(ids), rtol=0, atol=1e-5)
    assert text.output_ids == wanted


def test_gap_is_between_vanillas_choice_and_the_runner_up():
    prompt, engine = prompt_of(4), engine_of(tiny_verifier(), temperature=0.7)
    text = engine.decode(prompt, Vanilla(), prompt_id="p")
    noise = sampling.KeyedNoise(seed=3, prompt_key=sampling.prompt_key("p"), vocab=VOCABULARY)
    for index in (0, 6):
        ids = prompt + text.output_ids[:index]
        noisy_V = full_logits(ids) + 0.7 * noise.row(len(ids))
        top = noisy_V.topk(2)
        assert int(top.indices[0]) == text.output_ids[index]
        assert engine.gap(text, index, prompt_id="p") == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-4)


def test_one_engine_serves_many_prompts():
    verifier, engine = tiny_verifier(), engine_of(tiny_verifier(), limit=9)
    for length in (30, 2, 11):
        found = engine.decode(prompt_of(length), Vanilla(), prompt_id="p").output_ids
        assert found == vanilla_text(verifier, prompt_of(length), limit=9)


def test_leviathan_without_its_q_is_refused():
    class Blind(Scripted):
        def propose(self, state: object) -> Proposal:
            return super().propose(state)._replace(rule="leviathan")

    method = Blind([1, 2, 3], gamma=2, right=always(0))
    with pytest.raises(AssertionError, match="needs the q"):
        engine_of(tiny_verifier(), temperature=1.0, limit=5).decode(prompt_of(3), method, prompt_id="p")


def test_table_verifier_keeps_the_cache_like_a_model():
    verifier = TableVerifier(torch.eye(4))
    cache = verifier.new_cache(2)
    verifier.prefill([1, 2, 3], cache)
    assert isinstance(cache, KVCache)
    assert cache.length == 3
