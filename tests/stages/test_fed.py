"""The drafter fed with the verifier's states: it sees in training what it sees in decoding, learns, and is lossless."""

from dataclasses import replace

import pytest
import torch

from kernels.tree import depths
from stages.baselines import fed, fit
from stages.baselines.fed import FedContexts, Params, Streak
from stages.baselines.fit import Fitting
from stages.common import entry, store, windows
from stages.common.features import Taps, features_folder, write_index, write_shard
from stages.common.fed import FedDrafter, keys_values
from stages.common.heads import HeadCard, load_head, save_head
from stages.common.models import config_digest, load_verifier
from stages.common.tiny import VOCABULARY, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.evaluate.methods import specdiff2_fed
from tests.stages.scripted import (
    KINDS,
    cached_rows,
    causal_lm,
    engine_of,
    prompt_of,
    tiny_verifier,
    vanilla_text,
)

G = 4
READS = (0, 1)
WORDS = [word for word in range(VOCABULARY) if word % 3]
V = Validation(share=0.1, windows=3, tree_nodes=6)
FITTING = Fitting(
    steps=60,
    sequences=3,
    accumulation=1,
    max_tokens=64,
    optimizer="muon",
    lr=0.02,
    lr_other=0.005,
    weight_decay=0.0,
    warmup=0.1,
    final_lr=0.1,
    clip=1.0,
    evaluate_every=30,
    checkpoint_every=999,
)
BASE = Params(
    layers=2,
    start_layers=(0, 1),
    reads=READS,
    draft_vocab=VOCABULARY,
    windows=10,
    window=G,
    full_mask_share=1.0,
    training=FITTING,
    streak=Streak(steps=10, drafts=16, lr=0.002, lr_other=0.0005),
)


def drafter_of(verifier, *, reads=READS, words=range(VOCABULARY), layers=2, start_layers=(0, 1), seed=0) -> FedDrafter:
    """As training starts it, but with a mask of its own and a fuse that is not a plain mean."""
    d2t = torch.tensor(list(words))
    head = FedDrafter.build(verifier, reads=reads, d2t=d2t, layers=layers, start_layers=start_layers)
    head.initialise(seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.fuse.weight += 0.1 * torch.randn(head.fuse.weight.shape, generator=g)
        head.mask_embedding += 0.5 * torch.randn(head.mask_embedding.shape, generator=g)
    return head.eval()


@torch.inference_mode()
def states_of(verifier, ids, layers=READS):
    """[T, C] of every token, from one pass."""
    taps = Taps(verifier.body, layers)
    verifier.prefill(ids, verifier.new_cache(len(ids)))
    taps.keep()
    taps.close()
    return taps.rows().clone()


def method_of(head, *, gamma=G, nodes=8, width=4, threshold=0.0):
    params = specdiff2_fed.Params(drafter="fed", gamma=gamma, nodes=nodes, width=width, threshold=threshold)
    return specdiff2_fed.build(params, head)


def text_of(verifier, method, prompt, **settings):
    return engine_of(verifier, **settings).decode(prompt, method, prompt_id="p")


def scores(head, states_TC, pending, window=G):
    cache = head.new_cache(1)
    head.extend(states_TC, cache)
    return head.draft(pending, window, cache)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_keys_and_values_are_those_the_attention_layer_caches(kind, tied):
    verifier, ids = tiny_verifier(kind, tied), prompt_of(11)
    inputs = [verifier.embed(torch.tensor([ids])), states_of(verifier, ids, [0])[None]]
    cos, sin = verifier.body.rotary_emb(inputs[0], torch.arange(11)[None])
    if kind == "gemma" and not hasattr(verifier.body.embed_tokens, "embed_scale"):
        inputs[0] = inputs[0] * 32**0.5  # older releases scale behind the embedding
    for layer, rows in enumerate(inputs):
        found = torch.stack(keys_values(verifier.body.layers[layer], rows, cos, sin))[:, 0]
        torch.testing.assert_close(found, cached_rows(verifier, [*ids, 5], [layer])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_the_text_is_vanillas(kind, tied, temperature):
    verifier, number = tiny_verifier(kind, tied), KINDS.index((kind, tied))
    layers, words = ((0, 1), range(VOCABULARY)) if number % 2 else ((1,), WORDS)
    reads = [(0, 1), (1,), (1, -1)][number % 3]
    head = drafter_of(verifier, reads=reads, words=words, layers=len(layers), start_layers=layers)
    method = method_of(head, gamma=1 + (number + round(10 * temperature)) % 6, nodes=12)
    for length in (1, 23):
        text = text_of(verifier, method, prompt_of(length, seed=length), temperature=temperature, limit=10)
        wanted = vanilla_text(verifier, prompt_of(length, seed=length), temperature=temperature, limit=10)
        assert text.output_ids == wanted
        assert max(cycle.nodes for cycle in text.cycles) == 12 or method.params.gamma == 1
    assert method.reads == reads


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("kind", "tied"), KINDS[::2])
def test_training_rows_score_as_decoding_rows(kind, tied, window):
    """Texts of three lengths in one padded batch."""
    verifier = tiny_verifier(kind, tied)
    head = drafter_of(verifier, words=WORDS)
    found = [Example(id=f"{n}", ids=tuple(prompt_of(n, seed=n)), prompt_length=n // 3) for n in (9, 30, 14)]
    states = {e.id: states_of(verifier, e.ids) for e in found}
    batch = windows.collate(
        found, head, FedContexts(head, states), windows=6, window=window, full_mask_share=1.0, seed=1, step=1
    )
    scores_BWGV = head.logits(windows.hidden(head, batch))
    for e, scores_WGV, anchors in zip(found, scores_BWGV, batch.layout.target_BWG[:, :, 0].tolist(), strict=True):
        for scores_GV, n in zip(scores_WGV, anchors, strict=True):
            decoded = scores(head, states[e.id][: n - 1], e.ids[n - 1], window)
            torch.testing.assert_close(scores_GV, decoded, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_context_row_by_row_is_context_at_once_and_a_draft_leaves_nothing_behind():
    verifier, ids = tiny_verifier("qwen2", False), prompt_of(13)
    head, states = drafter_of(verifier), states_of(verifier, ids)
    cache = head.new_cache(1)
    for n in range(2, 14):
        head.extend(states[cache.length : n - 1], cache)
        assert cache.length == n - 1
        torch.testing.assert_close(
            head.draft(ids[n - 1], G, cache), scores(head, states[: n - 1], ids[n - 1]), rtol=0, atol=1e-5
        )
        assert cache.length == n - 1


@torch.inference_mode()
def test_what_a_draft_depends_on():
    """x_1 on the context and the pending token, not on the masks; x_2 .. on the masks too; nothing on later states."""
    verifier, ids = tiny_verifier(), prompt_of(9)
    head, states = drafter_of(verifier), states_of(verifier, ids)
    whole = scores(head, states[:8], ids[8])
    torch.testing.assert_close(scores(head, states[:8], ids[8], 1), whole[:1], rtol=0, atol=1e-5)
    assert not torch.allclose(scores(head, states[:8], ids[8], 3)[1:], whole[1:3], atol=1e-3), "masks see one another"
    for place in range(8):
        changed = states[:8].clone()
        changed[place] += torch.randn(changed.shape[1], generator=torch.Generator().manual_seed(place))
        difference = (scores(head, changed, ids[8]) - whole).abs().amax(-1)
        assert bool((difference > 1e-4).all()), (place, difference)


def test_the_context_is_what_a_fresh_cache_would_hold_after_texts_and_rejections():
    verifier = tiny_verifier()
    method = method_of(drafter_of(verifier), gamma=3, nodes=6)
    engine = engine_of(verifier, temperature=1.3, limit=14)
    for length in (17, 1, 6):
        text = engine.decode(prompt_of(length, seed=length), method, prompt_id=f"{length}")
        ids = [*text.prompt_ids, *text.output_ids]
        fresh = method.drafter.new_cache(1)
        method.drafter.extend(states_of(verifier, ids)[: method.cache.length], fresh)
        assert length < method.cache.length < len(ids)
        kept, wanted = (cache.kv_L2BHCD[..., : fresh.length, :] for cache in (method.cache, fresh))
        torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [20, 21, 29, 30])
def test_limits_of_the_context(length):
    verifier = tiny_verifier(context=32)
    head = drafter_of(verifier)
    head.context_limit = (32, 26)[length % 2]
    text = text_of(verifier, method_of(head, gamma=8, nodes=9, width=1), prompt_of(length), limit=20)
    assert text.output_ids == vanilla_text(verifier, prompt_of(length), limit=20)
    place = length
    for cycle in text.cycles:
        place += 1
        room = min(8, head.context_limit - place + 1, 32 - place - 1)
        assert cycle.proposed == max(0, room), (place, cycle)
        place += len(cycle.tokens) - 1


def test_only_words_that_can_be_drafted_are_proposed():
    verifier, seen = tiny_verifier(), []
    method = method_of(drafter_of(verifier, words=WORDS), nodes=16, width=9)

    class Watching:
        reads = method.reads
        start = method.start

        def propose(self, state):
            proposal = method.propose(state)
            seen.extend(proposal.tree.tokens_N.tolist())
            assert max(depths(proposal.tree.parents), default=0) <= G
            return proposal

    text_of(verifier, Watching(), prompt_of(5))
    assert seen
    assert set(seen) <= set(WORDS)


def texts_of(verifier, count, *, output=24, temperature=1.3):
    found = []
    for i in range(count):
        prompt = prompt_of(3 + i, seed=10 + i)
        ids = vanilla_text(verifier, prompt, prompt_id=f"text/{i}", temperature=temperature, limit=output)
        found.append(Example(id=f"text/{i}", ids=(*prompt, *ids), prompt_length=len(prompt)))
    return found, {e.id: states_of(verifier, e.ids) for e in found}


def test_overfit_gate_and_streak_stays_there(tmp_path):
    """A shift by one anywhere between states, places, rows and labels leaves acceptance near 0."""
    verifier = tiny_verifier()
    found, states = texts_of(verifier, 3)
    head = drafter_of(verifier).train()
    rows = fed.learn(head, found, found, states, BASE, V, seed=0, scratch=tmp_path)
    method = method_of(head.eval(), nodes=G, width=1)
    for e in found:
        engine = engine_of(verifier, temperature=1.3, limit=len(e.ids) - e.prompt_length)
        text = engine.decode(e.ids[: e.prompt_length], method, prompt_id=e.id)
        assert (*e.ids[: e.prompt_length], *text.output_ids) == e.ids, "the text it was trained on"
        assert all(cycle.accepted == cycle.proposed for cycle in text.cycles)
        assert max(cycle.proposed for cycle in text.cycles) == G
    valid = [row for row in rows if row["split"] == "valid"]
    assert [row["step"] for row in valid] == [0, 30, 60, 70]
    assert [row["objective"] for row in valid] == ["masked_ce"] * 3 + ["trie_streak"]
    assert float(valid[0]["streak"]) < 1 < 2.5 < float(valid[-1]["streak"])
    seconds = [row["seconds"] for row in rows if row["split"] == "train"]
    assert len(seconds) == 70
    assert seconds == sorted(seconds)
    assert set(valid[-1]) >= {"loss", "streak", "tree", f"accept_{G}"}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_gradients_reach_every_trained_weight_and_none_of_the_verifiers(kind):
    verifier = tiny_verifier(kind, False)
    found, states = texts_of(verifier, 2)
    head = drafter_of(verifier, words=WORDS)
    batch = windows.collate(
        found, head, FedContexts(head, states), windows=4, window=G, full_mask_share=0.5, seed=0, step=3
    )
    fed._masked_ce(windows.log_q(head, batch), batch).backward()
    names = {name for name, p in head.named_parameters() if p.grad is None or not bool((p.grad != 0).any())}
    assert not names
    assert len(head.trained()) == len(list(head.named_parameters()))
    assert all(p.grad is None for p in verifier.parameters())
    assert not any("embed_tokens" in name for name in head.state_dict())


SHORT = replace(
    BASE,
    windows=2,
    full_mask_share=0.5,
    training=replace(FITTING, steps=5, sequences=2, evaluate_every=3, checkpoint_every=2),
    streak=replace(BASE.streak, steps=4),
)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """(a short run in a scratch folder: its head and curve)."""
    verifier = tiny_verifier()
    found, states = texts_of(verifier, 4, output=8)

    def run(scratch):
        head = drafter_of(verifier).train()
        return head, fed.learn(head, found, found, states, SHORT, V, seed=5, scratch=scratch)

    return run, run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_killed_run_ends_where_an_undisturbed_one_does(short, tmp_path, monkeypatch, stop):
    """Killed in the first phase, at the first step of the second, and further on in it."""
    run, (whole, rows) = short
    inner, calls = fit._step, []

    def dying(*args):
        calls.append(args)
        if len(calls) == stop + 1:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(fit, "_step", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    before = len(calls)
    resumed, again = run(tmp_path)
    assert len(calls) - before == {3: 3 + 4, 5: 4, 7: 2}[stop], "steps since the last checkpoint, none before"
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    untimed = [[{k: v for k, v in row.items() if k != "seconds"} for row in curve] for curve in (rows, again)]
    assert untimed[0] == untimed[1]


def test_the_second_phase_sees_other_windows_than_the_first(tmp_path, monkeypatch):
    steps, inner = [], windows.collate

    def watching(*args, step, **more):
        steps.append((step, more["full_mask_share"]))
        return inner(*args, step=step, **more)

    monkeypatch.setattr(windows, "collate", watching)
    training = replace(FITTING, steps=2, sequences=1, accumulation=2)
    p = replace(BASE, windows=2, full_mask_share=0.25, training=training, streak=replace(BASE.streak, steps=1))
    verifier = tiny_verifier()
    found, states = texts_of(verifier, 2, output=6)
    fed.learn(drafter_of(verifier).train(), found, found, states, p, V, seed=0, scratch=tmp_path)
    assert [s for s in steps if s[0] > 0] == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.25), (5, 1.0), (6, 1.0)]


def card_of(head, **changed):
    fields = {
        "kind": "fed",
        "target_layer_ids": head.reads,
        "settings": head.settings(),
        "verifier_tokenizer": "t",
        "verifier_config": "c",
        "vocab_size": head.vocab_size,
        "draft_vocab_size": len(head.d2t),
        "parameters": 1,
        "objective": "masked_ce",
        "provenance": {},
    }
    return HeadCard(**{**fields, **changed})


@torch.inference_mode()
@pytest.mark.parametrize("start_layers", [(1, 0), ()])
def test_a_saved_drafter_drafts_the_same(tmp_path, start_layers):
    verifier, ids = tiny_verifier("qwen2"), prompt_of(8)
    head = drafter_of(verifier, words=WORDS, start_layers=start_layers)
    save_head(tmp_path, head, card_of(head))
    wanted = scores(head, states_of(verifier, ids)[:7], ids[7])
    for packed in (True, False):
        again, card = load_head(tmp_path, FedDrafter, verifier, tokenizer="t", config="c", packed=packed)
        assert card.settings == {"layers": 2, "start_layers": list(start_layers)}
        found = scores(again, states_of(verifier, ids)[:7], ids[7])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_places_stay_exact_in_a_narrow_number_format():
    head = drafter_of(tiny_verifier()).to(dtype=torch.bfloat16)
    assert head.decoder.body.layers[0].self_attn.k_proj.weight.dtype == torch.bfloat16
    assert torch.equal(head.decoder.body.rotary_emb.inv_freq, tiny_verifier().body.rotary_emb.inv_freq)


def test_random_weights_are_a_function_of_the_seed():
    verifier = tiny_verifier()
    first, same, other = (drafter_of(verifier, start_layers=(), seed=seed).decoder.state_dict() for seed in (1, 1, 2))
    name = "body.layers.1.self_attn.q_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], verifier.state_dict()[name])


def test_what_cannot_be_built_is_refused():
    verifier = tiny_verifier()
    for layers, start_layers in ((2, (0,)), (1, (2,)), (3, ())):
        with pytest.raises(ValueError, match="start_layers"):
            drafter_of(verifier, layers=layers, start_layers=start_layers)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A profile's folder with what training reads: model, trajectories, states."""
    monkeypatch.chdir(tmp_path)
    save_tiny(store.verifier_folder("p"), causal_lm())
    verifier, rows, states = tiny_verifier(), [], {}
    for i in range(12):
        prompt = prompt_of(4 + i % 3, seed=i)
        ids = vanilla_text(verifier, prompt, prompt_id=f"{i}", limit=9)
        rows.append(
            {
                "id": f"{i}",
                "prompt_ids": prompt,
                "output_ids": ids,
                "finish_reason": "length",
                "temperature": 0.0,
                "seed": 0,
            }
        )
        states[f"{i}"] = states_of(verifier, [*prompt, *ids])
    store.write_parquet(store.trajectories_file("p"), rows, store.TRAJECTORIES, {})
    write_shard(features_folder("p") / "0.safetensors", states)
    write_index(features_folder("p"), READS, dict.fromkeys(states, "0.safetensors"))
    return "p"


def test_the_stage_writes_a_drafter_that_the_method_decodes_with(profile):
    p = replace(
        BASE,
        reads=(1,),
        draft_vocab=50,
        windows=2,
        training=replace(FITTING, steps=3, evaluate_every=3),
        streak=replace(BASE.streak, steps=1),
    )
    fed.train(profile, p, replace(V, share=0.3), entry.Device(name="cpu", dtype="float32", threads=1), seed=0)
    folder = store.verifier_folder(profile)
    verifier = load_verifier(folder, dtype=torch.float32)
    head, card = load_head(
        store.drafter_folder(profile, "fed"),
        FedDrafter,
        verifier,
        tokenizer=load_tokenizer(folder).fingerprint(),
        config=config_digest(folder),
    )
    assert card.target_layer_ids == (1,)
    assert card.objective == "masked_ce, then trie_streak"
    assert card.parameters == sum(
        p.numel()
        for p in FedDrafter.build(tiny_verifier(), reads=(1,), d2t=head.d2t, layers=2, start_layers=(0, 1)).parameters()
    )
    header, *lines = store.curves_file(profile, "fed").read_text().splitlines()
    assert header.startswith("step,split,loss,streak")
    assert [int(line.split(",")[0]) for line in lines] == [0, 1, 2, 3, 3, 4, 4]
    assert not any((store.DATA / "scratch").iterdir())
    text = text_of(verifier, method_of(head), prompt_of(5), temperature=0.7)
    assert text.output_ids == vanilla_text(verifier, prompt_of(5), temperature=0.7)
