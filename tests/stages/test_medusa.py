"""Medusa and Hydra: the shift between features and tokens, trees, losslessness, training that decoding accepts."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from kernels.tree import depths, validate
from stages.baselines import hydra, medusa, window_heads
from stages.baselines.fit import Fitting
from stages.common import entry, params, store
from stages.common.features import FINAL, Taps
from stages.common.heads import load_head, read_head_card
from stages.common.medusa import READS, HydraHead, MedusaHead
from stages.common.models import config_digest, load_verifier
from stages.common.tiny import VOCABULARY, build_tiny, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.evaluate.parts import method_module
from stages.features.__main__ import Params as FeaturesParams
from stages.features.__main__ import write_features
from tests.stages.scripted import engine_of, prompt_of, tiny_verifier, vanilla_text
from tests.stages.test_methods import state_of

G = 3
KINDS_OF_HEADS = (MedusaHead, HydraHead)
SOME_WORDS = [word for word in range(VOCABULARY) if word % 3]
CPU = entry.Device(name="cpu", dtype="float32", threads=1)
V = Validation(share=0.25, windows=3, tree_nodes=6)
BASE = {
    "steps": 6,
    "sequences": 2,
    "accumulation": 1,
    "max_tokens": 64,
    "optimizer": "muon",
    "lr": 0.02,
    "lr_other": 0.02,
    "weight_decay": 0.0,
    "warmup": 0.1,
    "final_lr": 0.1,
    "clip": 1.0,
    "evaluate_every": 3,
    "checkpoint_every": 2,
}
both = pytest.mark.parametrize("cls", KINDS_OF_HEADS, ids=lambda cls: cls.kind)


def settings(**changed):
    return window_heads.Params(heads=G, draft_vocab=200, decay=0.8, training=Fitting(**{**BASE, **changed}))


def head_of(cls, verifier, *, words=range(VOCABULARY), heads=G, noise=0.0):
    """As training starts; `noise` makes its heads differ from one another."""
    head = cls.build(verifier, reads=READS, d2t=torch.tensor(list(words)), heads=heads)
    head.initialise(seed=0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(noise * torch.randn(p.shape, generator=g))
    return head.eval()


def method_of(head, *, gamma=G, nodes=8, width=4, threshold=0.0):
    module = method_module(head.kind)
    return module.build(
        module.Params(drafter=head.kind, gamma=gamma, nodes=nodes, width=width, threshold=threshold), head
    )


def text_of(verifier, name="text", *, temperature=1.3, prompt=5, output=22):
    ids = prompt_of(prompt, seed=prompt)
    answer = vanilla_text(verifier, ids, prompt_id=name, temperature=temperature, limit=output)
    return Example(id=name, ids=(*ids, *answer), prompt_length=len(ids))


def states_of(verifier, *texts):
    """What stages/features keeps of them, in memory."""
    found = {}
    for e in texts:
        taps = Taps(verifier.body, READS)
        verifier.prefill(e.ids, verifier.new_cache(len(e.ids)))
        taps.keep()
        found[e.id] = taps.rows().clone().half()
        taps.close()
    return found


# The shift --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_an_untrained_head_proposes_the_pending_token_itself(cls, kind):
    """f_t, the last feature, speaks for x_{t+1}, which is pending: head j must learn to say x_{t+1+j} instead."""
    verifier, pending, proposed = tiny_verifier(kind), [], []

    class Recording:
        reads = READS

        def __init__(self):
            self.inner = method_of(head_of(cls, verifier), nodes=1)

        def start(self, prompt_ids, features_TC):
            pass

        def propose(self, state):
            proposal = self.inner.propose(state)
            pending.append(state.ids[-1])
            proposed.extend(proposal.tree.tokens_N.tolist() or [state.ids[-1]])
            return proposal

    engine_of(verifier, limit=12).decode(prompt_of(6), Recording(), prompt_id="p")
    assert len(set(pending)) > 2
    assert proposed == pending


@both
def test_training_pairs_each_feature_with_the_tokens_behind_the_pending_one(cls):
    verifier = tiny_verifier()
    head, e = head_of(cls, verifier, words=SOME_WORDS), text_of(verifier)
    states, anchors = states_of(verifier, e), list(e.anchors)
    found = window_heads.places(head, e, anchors, states)
    assert anchors[0] == e.prompt_length + 1, "the second output token: the first comes from the prefill"
    for row, a in enumerate(anchors):
        assert torch.equal(found.feature_XD[row], states[e.id][a - 2].float())
        before = [*e.ids, *[0] * G][a - 1 : a - 1 + G]
        assert found.before_XJ[row].tolist() == before, "from the pending token on"
        for j, target in enumerate(found.targets_XG[row].tolist()):
            token = e.ids[a + j] if a + j < len(e.ids) else None
            assert (SOME_WORDS[target] if target >= 0 else None) == (token if token in SOME_WORDS else None)
    assert int((found.targets_XG < 0).sum()) > 3, "words outside the draft vocabulary and the end of the text"


@both
def test_decoding_gives_the_heads_what_training_gave_them(cls):
    """The same feature, pending token and scores at every place that decoding comes to."""
    verifier, seen = tiny_verifier(), {}
    head = head_of(cls, verifier, noise=0.2)
    scores = head.scores

    def recorded(j, feature_XD, before_XJ):
        seen.setdefault((place[0], j), scores(j, feature_XD, before_XJ)[0].clone())
        return scores(j, feature_XD, before_XJ)

    class Recording:
        reads = READS

        def start(self, prompt_ids, features_TC):
            pass

        def propose(self, state):
            place[0] = len(state.ids)  # of x_1
            return inner.propose(state)

    place, inner, e = [0], method_of(head, nodes=12), text_of(verifier)
    head.scores = recorded
    engine = engine_of(verifier, temperature=1.3, limit=len(e.ids) - e.prompt_length)
    text = engine.decode(e.ids[: e.prompt_length], Recording(), prompt_id=e.id)
    assert (*e.ids[: e.prompt_length], *text.output_ids) == e.ids
    assert {j for _, j in seen} == {1, 2, 3}
    head.scores = scores
    found = window_heads.places(head, e, list(e.anchors), states_of(verifier, e))
    wanted = {j: head.scores(j, found.feature_XD, found.before_XJ) for j in range(1, G + 1)}
    for (a, j), scores_V in seen.items():
        if j == 1 or cls is MedusaHead:
            torch.testing.assert_close(scores_V, wanted[j][a - e.anchors.start], atol=0.05, rtol=0)


def test_only_hydras_heads_see_the_draft_and_no_more_than_comes_before():
    verifier, g = tiny_verifier(), torch.Generator().manual_seed(2)
    feature_XD = torch.randn(2, verifier.width, generator=g)
    first = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for cls, j, column in itertools.product(KINDS_OF_HEADS, (1, 2, 3), (0, 1, 2)):
        head, other = head_of(cls, verifier, noise=0.2), first.clone()
        other[:, column] += 20
        same = torch.equal(head.scores(j, feature_XD, first), head.scores(j, feature_XD, other))
        assert same == (cls is MedusaHead or column >= j)


# Trees ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def every_path(head, feature_D, pending, *, depth):
    """log q of every sequence of draft words up to a depth, by the verifier's ids."""
    found, layer = {}, {(): 0.0}
    for j in range(1, depth + 1):
        paths = list(layer)
        before = torch.tensor([[pending, *path] for path in paths])
        logq_XV = torch.log_softmax(head.scores(j, feature_D.expand(len(paths), -1), before), -1)
        layer = {
            (*path, word): layer[path] + logq
            for path, row in zip(paths, logq_XV.tolist(), strict=True)
            for word, logq in zip(head.d2t.tolist(), row, strict=True)
        }
        found |= layer
    return found


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@both
@pytest.mark.parametrize(("nodes", "threshold"), [(1, 0.0), (5, 0.0), (40, 0.0), (40, 0.02), (40, 1.0)])
def test_a_tree_without_a_limit_of_width_is_the_best_there_is(cls, nodes, threshold):
    words = [3, 70, 40, 200]
    head = head_of(cls, tiny_verifier(), words=words, noise=0.3)
    g = torch.Generator().manual_seed(nodes)
    for pending in (3, 99):
        feature_D = torch.randn(head.verifier.width, generator=g)
        tree = head.tree(feature_D, pending, depth=G, nodes=nodes, width=64, threshold=threshold)
        validate(tree)
        logq = every_path(head, feature_D, pending, depth=G)
        found = [logq[path] for path in paths_of(tree)]
        kept = [value for value in logq.values() if threshold == 0 or value >= math.log(threshold)]
        assert found == pytest.approx(sorted(kept, reverse=True)[:nodes], abs=1e-5)


def test_width_limits_what_hydra_expands():
    head, calls = head_of(HydraHead, tiny_verifier(), noise=0.3), []
    scores = head.scores
    head.scores = lambda j, f, before: calls.append(len(before)) or scores(j, f, before)
    feature_D = torch.randn(32, generator=torch.Generator().manual_seed(0))
    tree = head.tree(feature_D, 9, depth=G, nodes=500, width=5, threshold=0.0)
    assert calls == [1, 5, 5]
    assert len(tree.parents) == 5 + 25 + 25
    children = {parent: tree.parents.count(parent) for parent in tree.parents}
    assert set(children.values()) == {5}
    assert set(head.tree(feature_D, 9, depth=G, nodes=500, width=1, threshold=0.0).parents) == {-1, 0, 1}
    calls.clear()
    assert len(head.tree(feature_D, 9, depth=G, nodes=1, width=5, threshold=0.0).parents) == 1
    assert calls == [1], "nothing behind the best node can be among the best one"


@both
def test_a_broken_head_is_an_error(cls):
    head = head_of(cls, tiny_verifier())
    with torch.no_grad():
        head.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN in the drafter's log-probabilities"):
        head.tree(torch.ones(32), 5, depth=2, nodes=4, width=2, threshold=0.0)


# Losslessness and limits ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_the_text_is_vanillas(cls, kind):
    """Draft words and trees of several sizes at three temperatures; some drafts are accepted."""
    verifier, accepted = tiny_verifier(kind), 0
    for number, temperature in enumerate((0.0, 0.7, 1.3)):
        words = (SOME_WORDS, range(VOCABULARY))[number % 2]
        head = head_of(cls, verifier, words=words, noise=0.05)
        for nodes, width in ((64, 40), (6, 2)):
            prompt = prompt_of(1 + 7 * number, seed=nodes)
            engine = engine_of(verifier, temperature=temperature, limit=10)
            text = engine.decode(prompt, method_of(head, nodes=nodes, width=width), prompt_id="p")
            assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=10)
            assert 0 < max(cycle.nodes for cycle in text.cycles) <= nodes
            accepted += sum(cycle.accepted for cycle in text.cycles)
    assert accepted > 0


@both
@pytest.mark.parametrize("length", range(27, 33))
def test_no_draft_reaches_past_the_context_or_the_limit(cls, length):
    verifier = tiny_verifier(context=32)
    method = method_of(head_of(cls, verifier), nodes=5)
    text = engine_of(verifier, limit=20).decode(prompt_of(length), method, prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt_of(length), limit=20)
    assert length + len(text.output_ids) == 32
    short = engine_of(verifier, limit=2).decode(prompt_of(4), method, prompt_id="p")
    assert [cycle.proposed for cycle in short.cycles] == [0]


@both
@torch.inference_mode()
def test_a_draft_is_as_deep_as_the_shortest_limit(cls):
    head, ids = head_of(cls, tiny_verifier(), words=SOME_WORDS), prompt_of(5)
    features = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for gamma, max_depth, deepest in ((2, 9, 2), (9, 9, G), (9, 1, 1), (9, 0, 0), (9, -1, 0)):
        method = method_of(head, gamma=gamma, nodes=30, width=3)
        tree = method.propose(state_of(ids, max_depth=max_depth)._replace(features=lambda: features)).tree
        assert max(depths(tree.parents), default=0) == deepest
        assert set(tree.tokens_N.tolist()) <= set(SOME_WORDS)


# Training ---------------------------------------------------------------------------------------------------


@both
def test_overfit_gate_whole_windows_are_accepted_by_the_real_loop(cls, tmp_path):
    """A shift by one anywhere between features, tokens and heads leaves acceptance near 0."""
    verifier = tiny_verifier()
    e, head = text_of(verifier), head_of(cls, verifier)
    p = settings(steps=60, sequences=1, evaluate_every=60, checkpoint_every=99)
    states = states_of(verifier, e)
    rows = window_heads.fit_heads(head, [e], [e], states, p, V, seed=0, unfinished=tmp_path)
    head.eval().requires_grad_(False)
    engine = engine_of(verifier, temperature=1.3, limit=len(e.ids) - e.prompt_length)
    text = engine.decode(e.ids[: e.prompt_length], method_of(head, nodes=G, width=1), prompt_id=e.id)
    assert (*e.ids[: e.prompt_length], *text.output_ids) == e.ids
    assert all(cycle.accepted == cycle.proposed for cycle in text.cycles)
    assert [cycle.proposed for cycle in text.cycles][:-1] == [G] * (len(text.cycles) - 1)
    assert float(rows[0]["streak"]) < 0.5 < 2 < float(rows[-1]["streak"])
    assert float(rows[-1]["loss"]) < 0.3 < float(rows[0]["loss"])
    everywhere = V.__class__(share=0.5, windows=len(e.anchors), tree_nodes=1)
    row = window_heads.validate(head, [e], states, everywhere, seed=0)
    wanted = sum(min(G, len(e.ids) - a) for a in e.anchors) / len(e.anchors)
    assert row["streak"] == pytest.approx(wanted), "places near the end count what was there to accept"


@both
@torch.no_grad()
def test_loss_is_the_weighted_sum_over_heads_of_mean_cross_entropies(cls):
    verifier = tiny_verifier()
    head, texts = head_of(cls, verifier, words=SOME_WORDS, noise=0.2), [text_of(verifier, "a"), text_of(verifier, "b")]
    states = states_of(verifier, *texts)
    found = [window_heads.places(head, e, list(e.anchors), states) for e in texts]
    wanted = 0.0
    for j in range(1, G + 1):
        terms = []
        for e, place in zip(texts, found, strict=True):
            logq_XV = torch.log_softmax(head.scores(j, place.feature_XD, place.before_XJ), -1)
            for row, a in enumerate(e.anchors):
                if a + j - 1 < len(e.ids) and e.ids[a + j - 1] in SOME_WORDS:
                    terms.append(-float(logq_XV[row, SOME_WORDS.index(e.ids[a + j - 1])]))
        wanted += 0.8**j * sum(terms) / len(terms)
    assert float(window_heads.heads_loss(head, found, decay=0.8)) == pytest.approx(wanted, rel=1e-5)


@both
def test_measures_are_those_of_the_arg_max_chain(cls):
    verifier = tiny_verifier()
    head, texts = head_of(cls, verifier, noise=0.02), [text_of(verifier, "a", temperature=0.0, output=30)]
    states = states_of(verifier, *texts)
    row = window_heads.validate(head, texts, states, Validation(share=0.5, windows=29, tree_nodes=1), seed=4)
    assert row["streak"] == pytest.approx(sum(float(row[f"accept_{j}"]) for j in range(1, G + 1)))
    assert all(float(row[f"accept_{j}"]) <= float(row[f"accuracy_{j}"]) for j in range(1, G + 1))
    assert row["accept_1"] == row["accuracy_1"]
    (e,) = texts
    lengths = []
    for a in e.anchors:
        (path,) = paths_of(head.tree(states["a"][a - 2].float(), e.ids[a - 1], depth=G, nodes=G, width=1, threshold=0))[
            G - 1 :
        ]
        right = [token == truth for token, truth in zip(path, e.ids[a : a + G], strict=False)]
        lengths.append(len(list(itertools.takewhile(bool, right))))
    assert row["streak"] == pytest.approx(sum(lengths) / len(lengths))


@both
def test_nothing_that_can_be_drafted_is_no_loss(cls):
    verifier = tiny_verifier()
    e = text_of(verifier)
    head = head_of(cls, verifier, words=set(range(VOCABULARY)) - set(e.ids))
    states = states_of(verifier, e)
    row = window_heads.validate(head, [e], states, V, seed=0)
    assert (row["loss"], row["streak"]) == (None, 0)
    loss = window_heads.heads_loss(head, [window_heads.places(head, e, list(e.anchors), states)], decay=0.8)
    loss.backward()
    assert float(loss.detach()) == 0


class Killed(Exception):
    pass


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Eight texts of a tiny verifier and their features."""
    monkeypatch.chdir(tmp_path)
    model = build_tiny("llama", seed=1)
    save_tiny(store.verifier_folder("tiny"), model)
    Path(params.PARAMS).write_text(json.dumps({"seed": 3, "tiny": {"models": {}}}))
    g = torch.Generator().manual_seed(0)
    rows = []
    for number in range(8):
        ids = torch.randint(3, VOCABULARY, (20,), generator=g).tolist()
        rows.append({"id": f"c/{number}", "prompt_ids": ids[:6], "output_ids": ids[6:], "finish_reason": "length"})
        rows[-1] |= {"temperature": 0.0, "seed": 3}
    store.write_parquet(store.trajectories_file("tiny"), rows, store.TRAJECTORIES, {})
    write_features("tiny", FeaturesParams(layers=(0, FINAL), shard_size=3), CPU)
    return tmp_path


def outputs(kind):
    files = [*store.drafter_folder("tiny", kind).iterdir(), store.curves_file("tiny", kind)]
    found = {path.name: path.read_bytes() for path in files}
    curve = found.pop(f"{kind}.csv").decode().splitlines()
    timed = curve[0].split(",").index("seconds")
    return found, [[cell for i, cell in enumerate(line.split(",")) if i != timed] for line in curve]


@both
def test_a_trained_head_comes_back_and_a_killed_run_ends_as_an_undisturbed_one(cls, project, monkeypatch):
    module, p = {"medusa": medusa, "hydra": hydra}[cls.kind], settings()
    module.train("tiny", p, V, CPU, seed=3)
    undisturbed = outputs(cls.kind)
    assert not list(Path("data/scratch").iterdir())

    calls, whole = [], window_heads.heads_loss

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise Killed
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(window_heads, "heads_loss", counted)
        with pytest.raises(Killed):
            module.train("tiny", p, V, CPU, seed=3)
        calls[:] = [1] * 6
        module.train("tiny", p, V, CPU, seed=3)
    assert len(calls) == 6 + 2, "four of six steps were saved"
    assert outputs(cls.kind) == undisturbed

    folder, verifier_folder = store.drafter_folder("tiny", cls.kind), store.verifier_folder("tiny")
    card = read_head_card(folder)
    assert (card.kind, card.objective) == (cls.kind, cls.kind)
    assert (card.target_layer_ids, card.settings) == (READS, {"heads": G})
    marks = {"tokenizer": load_tokenizer(verifier_folder).fingerprint(), "config": config_digest(verifier_folder)}
    verifier = load_verifier(verifier_folder, dtype=torch.float32)
    head, _ = load_head(folder, cls, verifier, **marks)
    unpacked = load_verifier(verifier_folder, dtype=torch.float32, packed=False)
    plain, _ = load_head(folder, cls, unpacked, **marks, packed=False)
    assert card.parameters == sum(q.numel() for q in plain.parameters())
    assert len(plain.d2t) == card.draft_vocab_size < VOCABULARY
    feature_XD, before_XJ = torch.randn(3, 32), torch.tensor([[5, 6, 7]] * 3)
    with torch.inference_mode():
        for j in range(1, G + 1):
            torch.testing.assert_close(
                head.scores(j, feature_XD, before_XJ), plain.scores(j, feature_XD, before_XJ), atol=1e-4, rtol=1e-4
            )
    text = engine_of(verifier, limit=12).decode(prompt_of(6), method_of(head), prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt_of(6), limit=12)


@both
def test_training_moves_every_weight_of_the_head_and_none_of_the_verifiers(cls, tmp_path):
    verifier = tiny_verifier()
    head, e = head_of(cls, verifier), text_of(verifier)
    before = {name: q.detach().clone() for name, q in head.named_parameters()}
    kept = {name: q.detach().clone() for name, q in verifier.named_parameters()}
    window_heads.fit_heads(
        head, [e], [e], states_of(verifier, e), settings(sequences=1), V, seed=0, unfinished=tmp_path
    )
    assert all(not torch.equal(q, before[name]) for name, q in head.named_parameters())
    assert all(torch.equal(q, kept[name]) for name, q in verifier.named_parameters())
