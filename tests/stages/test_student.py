"""The causal student: it learns what decoding accepts; `speculative` and `dyspec` draft with it and lose nothing."""

from collections import Counter
from functools import lru_cache

import pytest
import torch

from kernels import sampling
from kernels.cache import KVCache
from kernels.tree import depths, validate
from stages.baselines import fit, student
from stages.common import store
from stages.common.drafters import load_drafter
from stages.common.entry import Device
from stages.common.models import config_digest, load_verifier
from stages.common.tiny import VOCABULARY, build_tiny, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.evaluate.contract import Sampling, State
from stages.evaluate.methods import dyspec, speculative
from tests.stages.scripted import (
    KINDS,
    engine_of,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
    vanilla_text,
)
from tests.stages.test_methods import CHI_SQUARE_26, law_statistic, tables

SOME_WORDS = [word for word in range(VOCABULARY) if word % 3]
# (G, N, width): chains, bushes, trees smaller and larger than the passes can fill
SHAPES = [(1, 1, 1), (2, 16, 4), (3, 4, 2), (4, 9, 3), (5, 2, 4), (6, 12, 2), (8, 5, 1), (3, 30, 3)]


def chain_of(drafter, *, gamma=4, temperature=0.0):
    return speculative.build(speculative.Params(drafter="student", gamma=gamma, temperature=temperature), drafter)


def tree_of(drafter, *, gamma=4, nodes=8, width=4, threshold=0.0):
    params = dyspec.Params(drafter="student", gamma=gamma, nodes=nodes, width=width, threshold=threshold)
    return dyspec.build(params, drafter)


def check(verifier, method, prompt, *, temperature=0.0, limit=10):
    """The text's cycles; fails unless the method's text is vanilla's."""
    text = engine_of(verifier, temperature=temperature, limit=limit).decode(prompt, method, prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=limit)
    return text.cycles


def state_of(ids, *, max_depth=9, temperature=0.7):
    settings = Sampling(temperature=temperature, top_k=0, top_p=1.0, seed=2)
    return State(ids, max_depth, 11, settings, KVCache(layers=1, capacity=1).lend, lambda: torch.empty(0, 0))


def scores_behind(drafter, ids):
    """[V_d] behind a plain text: one pass, nothing cached before."""
    return drafter.draft(list(ids), 1, drafter.new_cache(1))[0]


class Watched:
    """A method, and the (state, proposal, rows of every pass of its drafter) of each cycle."""

    reads = ()

    def __init__(self, inner):
        self.inner, self.seen, self._rows = inner, [], []
        self.hook = inner.drafter.register_forward_hook(lambda _, inputs, __: self._rows.append(inputs[0].shape[1]))

    def start(self, prompt_ids, features_TC):
        self.inner.start(prompt_ids, features_TC)

    def propose(self, state):
        self._rows.clear()
        proposal = self.inner.propose(state)
        self.seen.append((state, proposal, list(self._rows)))
        return proposal


# The same text as vanilla's ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def pair(request):
    kind, tied = request.param
    drafters = [tiny_drafter(kind, tied), tiny_drafter(kind, tied, layers=[1], words=SOME_WORDS)]
    return tiny_verifier(kind, tied), drafters, KINDS.index(request.param)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_dyspec_equals_vanilla(pair, temperature):
    verifier, drafters, number = pair
    for turn, drafter in enumerate(drafters):
        gamma, nodes, width = SHAPES[(number + round(10 * temperature) + 3 * turn) % len(SHAPES)]
        method = tree_of(drafter, gamma=gamma, nodes=nodes, width=width)
        cycles = check(verifier, method, prompt_of(1 + 7 * number, seed=number), temperature=temperature)
        assert all(cycle.nodes <= nodes and cycle.proposed <= gamma for cycle in cycles)
        if turn == 0 and temperature == 0:
            assert all(cycle.accepted > 0 for cycle in cycles if cycle.nodes), "the best node is the verifier's own"


@pytest.mark.parametrize("drafter_temperature", [0.0, 1.0])
def test_speculative_equals_vanilla_and_the_verifier_as_student_is_always_right(pair, drafter_temperature):
    verifier, drafters, number = pair
    for turn, drafter in enumerate(drafters):
        method = chain_of(drafter, gamma=1 + (number + turn) % 6, temperature=drafter_temperature)
        cycles = check(verifier, method, prompt_of(1 + 5 * number, seed=number), limit=14)
        if turn == 0 and drafter_temperature == 0:
            assert all(cycle.accepted == cycle.proposed for cycle in cycles)
            assert max(cycle.proposed for cycle in cycles) == method.gamma


@pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
def test_every_shape_of_tree(shape):
    gamma, nodes, width = shape
    method = tree_of(tiny_drafter(layers=[1]), gamma=gamma, nodes=nodes, width=width)
    check(tiny_verifier(), method, prompt_of(3 * nodes), temperature=(0.0, 1.3)[gamma % 2])


@pytest.mark.parametrize("make", [chain_of, tree_of])
@pytest.mark.parametrize("length", [26, 30, 31])
@pytest.mark.parametrize("drafter_limit", [32, 30, 24])
def test_context_limits_of_both_models(make, length, drafter_limit):
    verifier, drafter = tiny_verifier(context=32), tiny_drafter(context=32)
    drafter.context_limit = drafter_limit
    cycles = check(verifier, make(drafter, gamma=8), prompt_of(length), limit=20)
    if length >= drafter_limit:
        assert all(cycle.proposed == 0 for cycle in cycles), "the student's context is full: plain steps"
    elif length < 28:
        assert max(cycle.proposed for cycle in cycles) > 0


@pytest.mark.parametrize("make", [chain_of, tree_of])
def test_a_text_may_outgrow_the_student_and_the_next_text_is_drafted_again(make):
    drafter = tiny_drafter()
    drafter.context_limit = 12
    method = make(drafter)
    for length in (8, 20, 8, 2):
        cycles = check(tiny_verifier(), method, prompt_of(length), limit=12)
        assert (max(cycle.proposed for cycle in cycles) > 0) == (length < 12)


@torch.inference_mode()
@pytest.mark.parametrize("make", [chain_of, tree_of])
def test_depth_words_and_order_of_what_is_proposed(make):
    for depth in (0, 1, 3, 9):
        method, prompt = make(tiny_drafter(words=SOME_WORDS), gamma=4), prompt_of(5)
        method.start(prompt, torch.empty(0, 0))
        tree = method.propose(state_of([*prompt, 9], max_depth=depth)).tree
        validate(tree)
        assert max(depths(tree.parents), default=0) <= min(depth, 4)
        assert bool(tree.parents) == (depth > 0)
        assert set(tree.tokens_N.tolist()) <= set(SOME_WORDS)


@pytest.mark.parametrize("module", [speculative, dyspec])
def test_a_drafter_that_reads_the_verifiers_cache_is_refused(module):
    with pytest.raises(ValueError, match="prefix own"):
        (chain_of if module is speculative else tree_of)(tiny_drafter(prefix="verifier"))


# Speculative: the law --------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("part", [{}, {"layers": [1], "words": SOME_WORDS}], ids=["whole", "part"])
def test_the_q_handed_over_is_that_of_a_fresh_pass_and_no_token_is_read_twice(part):
    """Through a whole text with rejections: what is cached, kept and rolled back never shows in q."""
    drafter = tiny_drafter(**part)
    method, accepted = Watched(chain_of(drafter, gamma=3, temperature=0.8)), Counter()
    text = engine_of(tiny_verifier(), temperature=0.9, limit=24).decode(prompt_of(7), method, prompt_id="p")
    method.hook.remove()
    for (state, proposal, rows), cycle in zip(method.seen, text.cycles, strict=True):
        accepted[cycle.accepted] += 1
        assert not rows or (rows[0] <= 2 and set(rows[1:]) <= {1}), "only tokens that were not read before"
        assert len(rows) == cycle.proposed
        if not rows:
            continue
        assert proposal.rule == "leviathan"
        assert proposal.q_GV is not None
        torch.testing.assert_close(proposal.q_GV.sum(-1), torch.ones(len(rows)))
        ids = list(state.ids)
        for token, q_V in zip(proposal.tree.tokens_N.tolist(), proposal.q_GV, strict=True):
            fresh_Vd = sampling.probabilities(scores_behind(drafter, ids), temperature=0.8)
            fresh_V = torch.zeros(VOCABULARY).index_copy(0, drafter.d2t, fresh_Vd)
            torch.testing.assert_close(q_V, fresh_V, atol=1e-5, rtol=0)
            coin = sampling.keyed_uniform(1, seed=3, prompt_key=state.key, position=len(ids), stream=2)
            assert token == int(sampling.sample_rows(q_V[None], coin)), "drawn from it, with the coin of its place"
            ids.append(token)
    assert len(accepted) > 1, "rejections and acceptances"


def test_speculative_sampling_keeps_the_joint_law():
    """The very count that test_methods.py shows to see a draft from another law than its q."""
    statistic, accepted = law_statistic(chain_of(tables()[1], gamma=2, temperature=1.0), 0.7)
    assert statistic < CHI_SQUARE_26
    assert accepted > 0.3, "drafts are really accepted"


# DySpec: the tree ------------------------------------------------------------------------------------------------


def paths_of(words, parents):
    paths = list[tuple[int, ...]]()
    for word, parent in zip(words, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), word))
    return paths


def values_of_all(drafter, ids, *, depth, width):
    """Sum of log q of every path of the `width` likeliest words at each of `depth` steps: a plain pass for each."""
    found, layer = {}, {(): 0.0}
    for _ in range(depth):
        following = {}
        for path, value in layer.items():
            logq = scores_behind(drafter, [*ids, *drafter.d2t[list(path)].tolist()]).log_softmax(-1)
            top = logq.topk(width)
            for gain, word in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                following[(*path, word)] = value + gain
        found |= following
        layer = following
    return found


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize(("gamma", "width"), [(3, 3), (4, 2)])
def test_the_tree_is_the_best_of_all_trees_in_few_passes(monkeypatch, kind, gamma, width):
    """Every node's value is that of its path as a plain text; the N kept are the N best of all there could be."""
    kept = []

    class Kept(dyspec.Scored):
        def __init__(self, **settings):
            super().__init__(**settings)
            kept.append(self)

    monkeypatch.setattr(dyspec, "Scored", Kept)
    drafter = tiny_drafter(kind, layers=[1], words=SOME_WORDS)
    prompt = prompt_of(6)
    ids = [*prompt, 9, 30, 31]
    every = values_of_all(drafter, ids, depth=gamma, width=width)
    for nodes in (*range(1, 16), 100):
        method = Watched(tree_of(drafter, gamma=gamma, nodes=nodes, width=width))
        method.start(prompt, torch.empty(0, 0))
        tree = method.propose(state_of(ids)).tree
        rows = method.seen[0][2]
        method.hook.remove()
        validate(tree)
        best = sorted(every, key=lambda path: -every[path])[:nodes]
        words = drafter.t2d[tree.tokens_N].tolist()
        assert sorted(paths_of(words, tree.parents)) == sorted(best)
        assert len(rows) <= gamma
        assert rows[0] == 3, "what was committed since, in one pass"
        assert all(row < max(nodes, 2) for row in rows[1:])
        assert method.inner.read.length == len(ids), "the tree's rows are forgotten"
        scored = kept[-1]
        values = dict(zip(paths_of(scored.words, scored.parents), scored.values, strict=True))
        assert values == pytest.approx({path: every[path] for path in values}, abs=2e-5)


@torch.inference_mode()
def test_what_a_text_left_behind_never_shows_in_a_tree():
    drafter = tiny_drafter(layers=[1], words=SOME_WORDS)
    method = Watched(tree_of(drafter, gamma=4, nodes=10, width=3))
    for length in (5, 2):
        engine_of(tiny_verifier(), temperature=1.3, limit=16).decode(prompt_of(length), method, prompt_id="p")
    for state, proposal, _ in method.seen:
        fresh = tree_of(drafter, gamma=4, nodes=10, width=3).propose(state).tree
        assert torch.equal(fresh.tokens_N, proposal.tree.tokens_N)
        assert fresh.parents == proposal.tree.parents


def test_ties_and_words_without_a_chance():
    scored = dyspec.Scored(width=3)
    scored.add([-1], torch.tensor([[0.5, 0.5, 0.0]]).log())
    scored.add([0, 1], torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]).log())
    for count in range(1, 7):
        tree = scored.tree(count, torch.arange(3))
        validate(tree)
        assert len(tree.parents) == count
    assert (scored.words, scored.parents) == ([0, 1, 0, 0, 1, 2], [-1, -1, 0, 1, 1, 1])
    assert scored.best(3) == [0, 1, 2]
    with pytest.raises(ValueError, match="NaN"):
        scored.add([0], torch.tensor([[torch.nan, 0.0, 0.0]]))


# Training --------------------------------------------------------------------------------------------------------

BASE = fit.Fitting(
    steps=8,
    sequences=2,
    accumulation=1,
    max_tokens=64,
    optimizer="muon",
    lr=0.02,
    lr_other=0.005,
    weight_decay=0.01,
    warmup=0.1,
    final_lr=0.1,
    clip=1.0,
    evaluate_every=4,
    checkpoint_every=3,
)


def settings(**changed):
    return fit.Fitting(**{**vars(BASE), **changed})


@lru_cache
def texts(count, *, output=20, temperature=1.3):
    """Vanilla's own texts of the tiny Llama, each of another length."""
    verifier, found = tiny_verifier(), list[Example]()
    for i in range(count):
        prompt = prompt_of(3 + i, seed=10 + i)
        ids = vanilla_text(verifier, prompt, prompt_id=f"text/{i}", temperature=temperature, limit=output)
        found.append(Example(id=f"text/{i}", ids=(*prompt, *ids), prompt_length=len(prompt)))
    return tuple(found)


def fitted(drafter, found, held_out, f, folder, *, seed=0, loss=student.loss, window=4):
    return fit.fit(
        drafter,
        found,
        lambda chosen, number: loss(drafter, chosen),
        lambda: student.measure(drafter, held_out, window=window, sequences=f.sequences),
        f,
        seed=seed,
        scratch=folder,
        title="test",
    )


def test_overfit_gate_every_chain_is_accepted_by_the_real_loop(tmp_path):
    """Half of the verifier learns one text until whole chains and the trunk of every tree are right."""
    (e,) = found = texts(1, output=25)
    drafter = student.learning(tiny_drafter(layers=[1]))
    f = settings(steps=60, sequences=1, evaluate_every=30, checkpoint_every=99)
    rows = fitted(drafter, found, found, f, tmp_path)
    drafter.eval()
    first, *_, last = (row for row in rows if row["split"] == "valid")
    assert float(first["loss"]) > 1 > 0.2 > float(last["loss"])
    assert (float(first["streak"]) < 1, last["accuracy"]) == (True, 1.0)
    places = len(e.anchors)
    assert last["streak"] == pytest.approx(sum(min(4, places - i) for i in range(places)) / places)
    for method in (chain_of(drafter, gamma=4), tree_of(drafter, gamma=4, nodes=8, width=2)):
        engine = engine_of(tiny_verifier(), temperature=1.3, limit=len(e.ids) - e.prompt_length)
        if isinstance(method, speculative.Speculative):  # its own law at a temperature: under Match it must be right
            propose = method.propose
            method.propose = lambda state, inner=propose: inner(state)._replace(rule="match", q_GV=None)
        text = engine.decode(e.ids[: e.prompt_length], method, prompt_id=e.id)
        assert (*e.ids[: e.prompt_length], *text.output_ids) == e.ids, "the text it was trained on"
        assert all(cycle.accepted == cycle.proposed for cycle in text.cycles)
        assert max(cycle.proposed for cycle in text.cycles) == 4


@torch.no_grad()
@pytest.mark.parametrize("words", [range(VOCABULARY), SOME_WORDS], ids=["all words", "some words"])
def test_measure_and_loss_by_hand(words):
    """Texts of several lengths side by side give what passes over one growing text give; and a chain's real length."""
    found, window = texts(3, output=9), 3
    drafter = tiny_drafter(words=words)
    losses, right, streaks = [], [], []
    for e in found:
        lengths = []
        for place in e.anchors:
            ids, length = list(e.ids[:place]), 0
            while length < window and place + length < len(e.ids):
                word = int(drafter.d2t[scores_behind(drafter, ids).argmax()])
                if word != e.ids[place + length]:
                    break
                ids.append(word)
                length += 1
            lengths.append(length)
            right.append(length > 0)
            if (target := int(drafter.t2d[e.ids[place]])) >= 0:
                losses.append(-float(scores_behind(drafter, e.ids[:place]).log_softmax(-1)[target]))
        streaks.append(sum(lengths) / len(lengths))
    row = student.measure(drafter, found, window=window, sequences=2)
    assert row["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert row["accuracy"] == pytest.approx(sum(right) / len(right))
    assert row["streak"] == pytest.approx(sum(streaks) / len(streaks))
    assert 0 < float(row["accuracy"]) < 1
    assert float(student.loss(drafter, found)) == pytest.approx(float(row["loss"]), abs=1e-5)


def test_a_batch_that_cannot_be_drafted_has_no_gradient():
    found = texts(2, output=5)
    used = {token for e in found for token in e.ids}
    drafter = student.learning(tiny_drafter(words=sorted(set(range(VOCABULARY)) - used)))
    value = student.loss(drafter, found)
    value.backward()
    assert float(value.detach()) == 0
    row = student.measure(drafter, found, window=4, sequences=2)
    assert row == {"loss": None, "accuracy": 0.0, "streak": 0.0}


def test_runs_of_right_tokens():
    right_T = torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool()
    assert student.runs(right_T, 3).tolist() == [2, 1, 0, 3, 3, 2, 1]
    assert student.runs(right_T[:2], 5).tolist() == [2, 1]
    assert student.runs(right_T, 1).tolist() == right_T.float().tolist()


class Killed(Exception):
    pass


def run(folder, *, kill_after=None, **changed):
    """(weights, curve) of a run in `folder`; killed in the middle of step `kill_after` + 1."""
    found, drafter, losses = texts(5, output=8), student.learning(tiny_drafter(layers=[1], words=SOME_WORDS)), []

    def loss(drafter, chosen):
        if kill_after is not None and len(losses) == kill_after:
            raise Killed
        losses.append(1)
        return student.loss(drafter, chosen)

    folder.mkdir(exist_ok=True)
    rows = fitted(drafter, found[:4], found[4:], settings(**changed), folder, seed=7, loss=loss)
    curve = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return [p.detach().clone() for p in drafter.trained()], curve, len(losses)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path, optimizer):
    """Saved every third step and killed in the middle of the fifth and, resumed, of the eighth."""
    weights, rows, steps = run(tmp_path / "straight", optimizer=optimizer)
    assert steps == 8
    for _ in range(2):
        with pytest.raises(Killed):
            run(tmp_path / "killed", kill_after=4, optimizer=optimizer)
    again, resumed, steps = run(tmp_path / "killed", optimizer=optimizer)
    assert steps == 2, "six steps were saved"
    assert resumed == rows
    assert all(torch.equal(a, b) for a, b in zip(again, weights, strict=True))


def test_training_moves_every_weight_but_the_embedding_and_the_mask(tmp_path):
    drafter, found = student.learning(tiny_drafter(layers=[1])), texts(3, output=8)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    fitted(drafter, found[:2], found[2:], settings(), tmp_path)
    same = {name for name, p in drafter.named_parameters() if torch.equal(p, before[name])}
    assert same == {"body.embed_tokens.weight", "mask_embedding"}


def test_the_stage_writes_a_student_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = store.verifier_folder("tiny")
    folder.mkdir(parents=True)
    save_tiny(folder, build_tiny("llama", seed=1, layers=3))
    rows = [
        {
            "id": f"corpus/{i}",
            "prompt_ids": prompt_of(4, seed=i),
            "output_ids": prompt_of(9, seed=50 + i),
            "finish_reason": "length",
            "temperature": 0.0,
            "seed": 0,
        }
        for i in range(20)
    ]
    store.write_parquet(store.trajectories_file("tiny"), rows, store.TRAJECTORIES, {})
    params = student.Params(layers=(0, 2), draft_vocab=40, window=4, training=settings(steps=4))
    v = Validation(share=0.3, windows=2, tree_nodes=4)
    student.train("tiny", params, v, Device(name="cpu", dtype="float32", threads=1), seed=0)
    verifier = load_verifier(folder, dtype=torch.float32)
    drafter, card = load_drafter(
        store.drafter_folder("tiny", "student"),
        embedding=verifier.body.embed_tokens,
        tokenizer=load_tokenizer(folder).fingerprint(),
        config=config_digest(folder),
        dtype=torch.float32,
        packed=False,
    )
    assert (card.kind, card.block_size, card.prefix, card.objective) == ("causal", 1, "own", "token_ce")
    assert (card.layers, card.draft_vocab_size, len(drafter.d2t)) == ((0, 2), 40, 40)
    assert card.parameters == sum(p.numel() for p in drafter.trained()) - drafter.width, "all but the mask's"
    _, held_out = fit.read_texts("tiny", params.training, v, seed=0)
    curve = store.curves_file("tiny", "student").read_text().splitlines()
    last = dict(zip(curve[0].split(","), curve[-1].split(","), strict=True))
    measured = student.measure(drafter, held_out, window=4, sequences=2)
    assert float(last["loss"]) == pytest.approx(float(measured["loss"]), rel=1e-4)
    assert float(last["streak"]) == pytest.approx(float(measured["streak"]), abs=1e-4)
    assert not list(store.scratch_file().glob("*")), "the resume state is gone"
    check(verifier, tree_of(drafter), prompt_of(6), limit=6)


@torch.inference_mode()
def test_a_threshold_keeps_the_nodes_that_pay():
    """Those of the whole tree whose product of q is above it, and no pass for what is below."""
    drafter, prompt = tiny_drafter(), prompt_of(7)
    trees = []
    for threshold in (0.0, 0.01, 0.04, 1.0):
        method = tree_of(drafter, nodes=100, width=5, threshold=threshold)
        method.start(prompt, torch.empty(0, 0))
        tree = method.propose(state_of([*prompt, 9])).tree
        trees.append(set(paths_of(tree.tokens_N.tolist(), tree.parents)))
    assert trees[0] > trees[1] > trees[2] > trees[3] == set()
