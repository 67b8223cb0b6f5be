"""What a cell measures: its counts, its yardstick, and that no difference from vanilla is waved through."""

import math

import pytest
import torch

from stages.common.models import Verifier
from stages.common.tiny import VOCABULARY, build_tiny
from stages.evaluate import harness
from stages.evaluate.__main__ import refuse_differences
from stages.evaluate.contract import Text
from stages.evaluate.harness import Prompt, Reference, Shared
from stages.evaluate.methods.vanilla import Vanilla
from tests.stages.scripted import Scripted, always, engine_of, prompt_of, tiny_drafter, tiny_verifier, vanilla_text
from tests.stages.test_methods import method_of

G = 4
BASE = Shared(
    temperature=0.7,
    top_k=0,
    top_p=1.0,
    max_new_tokens=14,
    repeats=1,
    warm_up_tokens=4,
    yardstick_every=6,
    yardstick_tokens=3,
    excuse_multiple=0.0,
)
PROMPTS = [Prompt(id=f"text/{i}", split="test", ids=tuple(prompt_of(4 + 3 * i, seed=i))) for i in range(3)]


def shared_of(**changed):
    return Shared(**{**vars(BASE), **changed})


class Bar:
    done = 0

    def update(self, count):
        self.done += count


def measured(method, *, shared=BASE, reference=None, covered=None, comparable=True, verifier=None, prompts=PROMPTS):
    engine = engine_of(verifier or tiny_verifier(), limit=shared.max_new_tokens)
    bar = Bar()
    rows, rounding = harness.measure(
        engine,
        method,
        prompts,
        shared,
        seed=5,
        reference=reference,
        covered=covered,
        comparable=comparable,
        progress=bar,
    )
    assert bar.done == len(rows) == len(prompts) * shared.repeats
    return rows, rounding


def decoded(engine, method, prompt, shared):
    """(text, seconds of its vanilla steps)."""
    text, laps, shown = Text(list(prompt.ids)), [], []
    for tokens in harness.paired(engine, method, prompt, shared, text, laps):
        shown += tokens
    assert shown == text.output_ids
    return text, laps


def texts_of(rows):
    return {(row["prompt_id"], row["repeat"]): row["output_ids"] for row in rows}


@pytest.fixture(scope="module")
def vanilla_rows():
    return measured(Vanilla(), shared=shared_of(repeats=2))[0]


def test_repeats_have_seeds_of_their_own_and_vanilla_equals_itself(vanilla_rows):
    assert [(row["repeat"], row["seed"]) for row in vanilla_rows] == [(0, 5)] * 3 + [(1, 6)] * 3
    for row in vanilla_rows:
        wanted = vanilla_text(
            tiny_verifier(),
            next(p.ids for p in PROMPTS if p.id == row["prompt_id"]),
            prompt_id=row["prompt_id"],
            temperature=0.7,
            seed=row["seed"],
            limit=14,
        )
        assert row["output_ids"] == wanted
        assert row["matches_vanilla"]
        assert row["accepted"] == [0] * 13
        assert (row["num_draft_tokens"], row["window"], row["nodes"]) == (0, 0, 0)
        assert row["covered_tokens"] == row["new_tokens"] == 14
    first, second = vanilla_rows[0]["output_ids"], vanilla_rows[3]["output_ids"]
    assert first != second


@pytest.mark.parametrize("name", ["specdiff2", "specdiff2_tree"])
def test_a_method_is_compared_with_vanilla_and_its_counts_add_up(vanilla_rows, name):
    words = [word for word in range(VOCABULARY) if word % 2]
    drafter = tiny_drafter(words=words)
    rows, rounding = measured(
        method_of(name, drafter, gamma=3, nodes=7),
        shared=shared_of(repeats=2),
        reference=Reference(texts=texts_of(vanilla_rows)),
        covered=drafter.t2d >= 0,
    )
    assert 0 < rounding < 1e-4
    for row in rows:
        assert row["matches_vanilla"]
        assert (row["first_difference"], row["excused"]) == (-1, False)
        assert math.isnan(row["top2_gap"])
        assert sum(accepted + 1 for accepted in row["accepted"]) == row["new_tokens"] - 1
        assert row["num_draft_tokens"] >= sum(row["accepted"])
        assert row["window"] <= 3
        assert row["nodes"] <= 7
        assert row["covered_tokens"] == sum(token % 2 for token in row["output_ids"])
        parts = row["draft_s"] + row["verify_s"] + row["other_s"]
        assert row["decode_s"] == pytest.approx(parts)
    refuse_differences(rows, rounding, None)


def test_missing_vanilla_text_is_named():
    with pytest.raises(ValueError, match=r"no text for prompt text/0, repeat 0"):
        measured(Vanilla(), reference=Reference(texts={}))


def tampered(index, *, length=None):
    """(engine, decoded text, a reference that differs from `index` on)."""
    engine = engine_of(tiny_verifier(), temperature=0.7, limit=14)
    text = engine.decode(PROMPTS[0].ids, Vanilla(), prompt_id="text/0")
    wanted = list(text.output_ids)
    wanted[index] = wanted[index] % 200 + 9
    return engine, text, wanted[:length]


def compared(engine, text, wanted, *, multiple=10.0, rounding=1e-6, comparable=True):
    shared = shared_of(excuse_multiple=multiple)
    return harness.compare(engine, text, wanted, PROMPTS[0], shared, rounding, comparable=comparable)


@pytest.mark.parametrize("index", [0, 5, 13])
def test_a_difference_with_a_large_gap_fails_and_is_named(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = compared(*tampered(index))
    assert (found["matches_vanilla"], found["first_difference"], found["excused"]) == (False, index, False)
    assert found["top2_gap"] > 1e-3
    row = found | {"prompt_id": "text/0", "repeat": 0, "output_ids": [1]}
    equal = row | {"first_difference": -1}
    path = tmp_path / "cells" / "humaneval" / "specdiff2.parquet"
    with pytest.raises(ValueError, match=rf"1 of 2 texts differ.*text/0 at token {index}.*not lossless"):
        refuse_differences([equal, row], 1e-6, path)
    assert list(tmp_path.rglob("specdiff2.json")), "the texts are kept for a look"


def test_a_text_that_is_shorter_or_longer_differs_at_its_end():
    engine, text, _ = tampered(3)
    shorter = compared(engine, text, text.output_ids[:6])
    longer = compared(engine, text, [*text.output_ids, 7])
    assert (shorter["first_difference"], shorter["excused"]) == (6, False)
    assert (longer["first_difference"], longer["excused"]) == (14, False)


def test_a_gap_below_the_rounding_is_excused_and_never_at_multiple_zero():
    engine, text, wanted = tampered(5)
    gap = compared(engine, text, wanted)["top2_gap"]
    assert compared(engine, text, wanted, rounding=gap, multiple=1.5)["excused"]
    assert not compared(engine, text, wanted, rounding=gap, multiple=0.9)["excused"]
    assert not compared(engine, text, wanted, rounding=1e9, multiple=0)["excused"]
    refuse_differences([compared(engine, text, wanted, rounding=gap, multiple=1.5)], gap, None)


def test_an_exact_tie_is_excused_where_rounding_is_and_fails_at_multiple_zero():
    """Two words with one row of the head: which of them is emitted is a matter of rounding."""
    model = build_tiny("llama", seed=1, tied=False)
    plain = vanilla_text(Verifier(model, vocab_size=VOCABULARY, end_ids=()), PROMPTS[0].ids, limit=6)
    twin = next(word for word in range(250, VOCABULARY) if word not in plain)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[plain[2]]
    engine = engine_of(Verifier(model, vocab_size=VOCABULARY, end_ids=()), limit=3)
    text = engine.decode(PROMPTS[0].ids, Vanilla(), prompt_id="text/0")
    other = ({twin, plain[2]} - {text.output_ids[2]}).pop()
    wanted = [*text.output_ids[:2], other]
    for multiple in (4.0, 0.0):
        found = harness.compare(
            engine,
            text,
            wanted,
            PROMPTS[0],
            shared_of(temperature=0.0, excuse_multiple=multiple),
            1e-6,
            comparable=True,
        )
        assert found["top2_gap"] < 1e-6
        assert found["excused"] == (multiple > 0)


def test_leviathans_own_text_is_no_difference():
    found = compared(*tampered(2), comparable=False)
    assert (found["matches_vanilla"], found["first_difference"], found["excused"]) == (False, -1, False)


@pytest.mark.parametrize("end", [None, 2, 7])
@pytest.mark.parametrize(("every", "tokens"), [(1, 1), (5, 3), (6, 99), (99, 4)])
def test_texts_are_the_same_with_and_without_the_yardstick(every, tokens, end):
    prompt = PROMPTS[2]
    plain = vanilla_text(tiny_verifier(), prompt.ids, prompt_id=prompt.id, temperature=0.7, limit=14)
    verifier = tiny_verifier(end_ids=[] if end is None else [plain[end]])
    wanted = vanilla_text(verifier, prompt.ids, prompt_id=prompt.id, temperature=0.7, limit=14)
    engine = engine_of(verifier, temperature=0.7, limit=14)
    shared = shared_of(yardstick_every=every, yardstick_tokens=tokens)
    text, laps = decoded(engine, Scripted(plain, gamma=G, right=always(3)), prompt, shared)
    assert text.output_ids == wanted
    assert all(lap > 0 for lap in laps)
    due, lengths, length = every, [], 0
    for emitted in (1, *(len(cycle.tokens) for cycle in text.cycles)):
        length += emitted
        if length >= due or length == len(wanted):
            lengths.append(length)
            due = length + every
    assert len(laps) == sum(min(tokens, length - 1) for length in lengths)
    row = harness.account(text, laps)
    assert row["yardstick_tokens"] == len(laps)
    assert row["yardstick_s"] == pytest.approx(sum(laps))


@pytest.mark.parametrize("prefix", ["own", "verifier"])
def test_the_drafter_goes_on_after_a_yardstick(prefix):
    """A cache of its own is not rolled back with the verifier's; one it borrows holds the same rows again."""
    prompt, drafter = PROMPTS[1], tiny_drafter(prefix=prefix)
    counts = []
    for every in (1, 99):
        engine = engine_of(tiny_verifier(), temperature=0.7, limit=20)
        shared = shared_of(yardstick_every=every, yardstick_tokens=5)
        text, _ = decoded(engine, method_of("specdiff2_trie", drafter), prompt, shared)
        counts.append([cycle.accepted for cycle in text.cycles])
    assert counts[0] == counts[1]


def test_warm_up_measures_rounding_and_leaves_the_limit_as_it_was():
    engine = engine_of(tiny_verifier(), temperature=0.7, limit=14)
    rounding = harness.warm_up(engine, Vanilla(), PROMPTS[0], BASE)
    assert engine.max_new_tokens == 14
    assert 0 < rounding < 1e-4


def test_rounding_is_the_largest_difference_of_any_logit(monkeypatch):
    engine = engine_of(tiny_verifier(), limit=5)
    text = engine.decode(PROMPTS[0].ids, Vanilla(), prompt_id="text/0")
    exact = engine.verify

    def blurred(root, *tree):
        logits_MV = exact(root, *tree)
        if logits_MV.shape[0] > 1:
            logits_MV[2, 17] += 0.5
        return logits_MV

    monkeypatch.setattr(engine, "verify", blurred)
    assert harness.block_rounding(engine, text) == pytest.approx(0.5, abs=1e-4)


def test_a_first_prompt_that_fills_the_context_measures_no_rounding():
    verifier = tiny_verifier(context=32)
    full = Prompt(id="full", split="test", ids=tuple(prompt_of(32)))
    rows, rounding = measured(Vanilla(), verifier=verifier, prompts=[full, PROMPTS[0]])
    assert rounding == 0, "and so nothing is excused"
    assert (rows[0]["output_ids"], rows[0]["new_tokens"], rows[0]["yardstick_tokens"]) == ([], 0, 0)
    assert rows[1]["new_tokens"] == 14
