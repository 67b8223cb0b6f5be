"""EAGLE heads: vanilla's own text, a row joins a state with the next token, trees score as chains do, training pays."""

import csv
import io
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from kernels.tree import depths, validate
from kernels.window import causal_mask
from stages.baselines import eagle, eagle3, fit
from stages.baselines.fit import Fitting
from stages.common import entry, store
from stages.common.eagle import Eagle3Head, EagleHead
from stages.common.eagle_rows import collate, inside, measure, step_mask, unroll
from stages.common.features import FINAL, Taps, features_folder, write_index, write_shard
from stages.common.heads import load_head, read_head_card
from stages.common.models import config_digest, load_verifier
from stages.common.tiny import VOCABULARY, save_tiny
from stages.common.tokenizers import load_tokenizer
from stages.common.validation import Validation
from stages.common.windows import Example
from stages.evaluate.contract import Sampling, State
from stages.evaluate.growing import DynamicParams, DynamicTree, GrowingMethod, Scored
from stages.evaluate.methods.eagle import Params as EagleParams
from stages.evaluate.parts import method_module
from tests.stages.scripted import KINDS, causal_lm, engine_of, prompt_of, tiny_verifier, vanilla_text

METHODS = ("eagle", "eagle2", "eagle3")
SHAPE = ((3,), (2, 0, 1), (2, 1), (1,))
SOME_WORDS = [word for word in range(VOCABULARY) if word % 3]
FITTING = Fitting(
    steps=90,
    sequences=1,
    accumulation=1,
    max_tokens=64,
    optimizer="muon",
    lr=0.02,
    lr_other=0.005,
    weight_decay=0.0,
    warmup=0.1,
    final_lr=0.1,
    clip=1.0,
    evaluate_every=90,
    checkpoint_every=3,
)
EAGLE = {"layer": 1, "noise": 0.1, "feature_weight": 1.0, "token_weight": 0.1, "window": 3}
EAGLE3 = {"reads": (0, 1, FINAL), "layer": 1, "draft_vocab": 200, "test_steps": 3, "decay": 0.8, "window": 3}
V = Validation(share=0.3, windows=4, tree_nodes=6)


def head_of(name, verifier, *, words=range(VOCABULARY)):
    torch.manual_seed(5)
    if name == "eagle3":
        head = Eagle3Head(verifier, reads=(0, 1, FINAL), d2t=torch.tensor(list(words)), layer=1)
    else:
        head = EagleHead(verifier, reads=(FINAL,), d2t=torch.arange(VOCABULARY), layer=1)
    head.begin(prompt_of(9))
    return head


def method_of(name, head, *, gamma=4, top_k=3, nodes=10, shape=SHAPE, threshold=0.0):
    module = method_module(name)
    wide = {"shape": shape} if name == "eagle" else {"gamma": gamma, "top_k": top_k, "threshold": threshold}
    return module.build(module.Params(drafter=name, nodes=nodes, **wide), head)


def states_of(verifier, ids, layers):
    """[T, C] of every one of these tokens."""
    taps = Taps(verifier.body, layers)
    verifier.prefill(ids, verifier.new_cache(len(ids)))
    taps.keep()
    taps.close()
    return taps.rows().clone()


def state_of(verifier, ids, layers, *, max_depth=9):
    """What the engine shows when the last of `ids` is pending."""
    settings = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=2)
    found = states_of(verifier, ids[:-1], layers)
    return State(ids, max_depth, 1, settings, verifier.new_cache(1).lend, lambda: found)


def check(verifier, method, prompt, *, temperature=0.0, limit=12):
    text = engine_of(verifier, temperature=temperature, limit=limit).decode(prompt, method, prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=limit)
    return text.cycles


# Decoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tied", "name", "temperature"),
    [(*kind, name, t) for kind, name, t in product(KINDS, METHODS, (0.0, 0.7, 1.3)) if kind[1] or t == 0.7],
)
def test_every_method_equals_vanilla(kind, tied, name, temperature):
    verifier = tiny_verifier(kind, tied)
    head = head_of(name, verifier, words=SOME_WORDS if tied else range(VOCABULARY))
    number = KINDS.index((kind, tied)) + METHODS.index(name)
    method = method_of(name, head, gamma=1 + number % 5, top_k=1 + number % 4, nodes=10)
    for length, limit in ((1, 4), (3 + 4 * number, 8)):
        cycles = check(verifier, method, prompt_of(length), temperature=temperature, limit=limit)
        assert 0 < cycles[0].nodes <= 10


class Watched:
    """At every turn a method that has seen all it was shown before must propose what a new one does."""

    def __init__(self, name, head):
        self.make = lambda: method_of(name, head, top_k=4, nodes=12)
        self.inner, self.reads, self.turns = self.make(), head.reads, 0

    def start(self, prompt_ids, features_TC):
        self.inner.start(prompt_ids, features_TC)

    def propose(self, state):
        found, fresh = self.inner.propose(state), self.make()
        fresh.start((), torch.empty(0, 0))
        again = fresh.propose(state)
        assert found.tree.parents == again.tree.parents
        assert torch.equal(found.tree.tokens_N, again.tree.tokens_N)
        if found.tree.parents:
            kept, whole = (method.cache.kv_L2BHCD[..., : len(state.ids) - 1, :] for method in (self.inner, fresh))
            assert self.inner.cache.length == fresh.cache.length == len(state.ids) - 1
            torch.testing.assert_close(kept, whole, atol=1e-4, rtol=1e-4)
            validate(found.tree)
        self.turns += 1
        return found


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_cached_is_what_a_new_reader_computes(name, temperature):
    verifier = tiny_verifier()
    method = Watched(name, head_of(name, verifier))
    for length in (7, 2, 19):
        check(verifier, method, prompt_of(length), temperature=temperature, limit=8)
    assert method.turns >= 9


@pytest.mark.parametrize("name", METHODS)
def test_every_committed_token_is_read_once_with_its_own_state_and_the_next_token(name, monkeypatch):
    verifier, read = tiny_verifier(), []
    head, prompt = head_of(name, verifier), prompt_of(6)
    method, forward = method_of(name, head), head.forward

    def spy(words_BN, states_BND, positions_BN, sees, cache=None):
        if bool(positions_BN[0, 0] == cache.length) and spy.fused:
            read.extend(zip(positions_BN[0].tolist(), words_BN[0].tolist(), spy.fused.pop(), strict=True))
        return forward(words_BN, states_BND, positions_BN, sees, cache)

    spy.fused = []
    fuse = head.fuse
    monkeypatch.setattr(head, "fuse", lambda rows_XC: (spy.fused.append(rows_XC), fuse(rows_XC))[1])
    monkeypatch.setattr(head, "forward", spy)
    text = engine_of(verifier, limit=25).decode(prompt, method, prompt_id="p")
    ids = [*prompt, *text.output_ids]
    assert [place for place, *_ in read] == list(range(method.cache.length))
    assert [word for _, word, _ in read] == ids[1 : len(read) + 1]
    assert len(read) > len(ids) - 8
    true_TC = states_of(verifier, ids, head.reads)
    torch.testing.assert_close(torch.stack([row for *_, row in read]), true_TC[: len(read)], atol=1e-4, rtol=1e-4)


def chain_logq(head, state, path):
    """log q [len(path) + 1, V_d] behind the pending token and every word of a path: one row at a time, no cache.

    The true rows and all simulated ones go through the head again for every step.
    """
    known_TC = state.features()
    states_ND, found = head.fuse(known_TC), []
    for step in range(len(path) + 1):
        words = [*state.ids[1:], *path[:step]]
        rows = len(words)
        out_ND = head(
            torch.tensor([words]), states_ND[None], torch.arange(rows)[None], causal_mask(cached=0, new=rows)
        )[0]
        found.append(head.logits(out_ND[-1]).log_softmax(-1))
        states_ND = torch.cat([states_ND, out_ND[-1:]])
    return torch.stack(found)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("name", METHODS)
def test_a_node_scores_as_its_path_does_as_a_chain(name, kind):
    verifier = tiny_verifier(kind)
    head = head_of(name, verifier, words=SOME_WORDS)
    method, state = method_of(name, head), state_of(verifier, prompt_of(8), head.reads)
    method.start((), torch.empty(0, 0))
    scored = method.grow(method.read(state.ids, state.features()), 4)
    assert max(depths(scored.parents)) == 4
    for node, parent in enumerate(scored.parents):
        path = [node]
        while parent >= 0:
            path, parent = [parent, *path], scored.parents[parent]
        words = [scored.words[n] for n in path]
        logq = chain_logq(head, state, words[:-1])
        expected = sum(float(row[head.t2d[word]]) for row, word in zip(logq, words, strict=True))
        assert scored.chances[node] == pytest.approx(expected, abs=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("top_k", "nodes", "gamma"), [(2, 5, 3), (3, 11, 3), (3, 100, 2), (1, 4, 4)])
def test_eagle2_grows_and_reranks_as_by_brute_force(top_k, nodes, gamma):
    verifier = tiny_verifier()
    head = head_of("eagle2", verifier)
    state = state_of(verifier, prompt_of(5), head.reads)
    level, scored = {(): 0.0}, {}
    for _ in range(gamma):
        found = {}
        for path, chance in level.items():
            logq, words = chain_logq(head, state, list(path))[-1].topk(top_k)
            found |= {(*path, w): chance + v for w, v in zip(words.tolist(), logq.tolist(), strict=True)}
        scored |= found
        level = dict(sorted(found.items(), key=lambda item: -item[1])[:top_k])
    wanted = {path for path, _ in sorted(scored.items(), key=lambda item: -item[1])[:nodes]}
    method = method_of("eagle2", head, top_k=top_k, nodes=nodes, gamma=gamma)
    method.start((), torch.empty(0, 0))
    tree = method.propose(state).tree
    validate(tree)
    paths = []
    for word, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        paths.append((*paths[parent], word) if parent >= 0 else (word,))
    assert set(paths) == wanted
    assert len(paths) == len(wanted) == min(nodes, top_k + (gamma - 1) * top_k**2)


@torch.inference_mode()
def test_a_threshold_keeps_the_nodes_that_pay_and_spares_the_rows_of_the_others(monkeypatch):
    verifier = tiny_verifier()
    head, rows, trees = head_of("eagle2", verifier), [], []
    inner = type(head).forward

    def counting(self, words_BN, *more):
        rows[-1] += words_BN.shape[1]
        return inner(self, words_BN, *more)

    monkeypatch.setattr(type(head), "forward", counting)
    for threshold in (0.0, 0.005, 0.02, 1.0):
        rows.append(0)
        method = method_of("eagle2", head, top_k=4, nodes=100, gamma=4, threshold=threshold)
        method.start((), torch.empty(0, 0))
        tree = method.propose(state_of(verifier, prompt_of(8), head.reads)).tree
        paths = list[tuple[int, ...]]()
        for word, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
            paths.append((*paths[parent], word) if parent >= 0 else (word,))
        trees.append(set(paths))
    assert trees[0] > trees[1] > trees[2] > trees[3] == set()
    assert rows[0] > rows[1] > rows[2] >= rows[3] == 7, "the committed tokens are read in any case"


def test_equal_chances_keep_parents_before_children():
    scored = Scored(words=[4, 5, 6], parents=[-1, 0, 1], chances=[-1.0, -1.0, -1.0])
    assert scored.tree(scored.best(range(3), 2)).parents == [-1, 0]


@torch.inference_mode()
def test_the_static_tree_has_its_shape_whatever_the_scores():
    verifier = tiny_verifier()
    for seed in range(3):
        method = method_of(
            "eagle", head_of("eagle", verifier), shape=((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)), nodes=25
        )
        method.start((), torch.empty(0, 0))
        tree = method.propose(state_of(verifier, prompt_of(6, seed=seed), method.reads)).tree
        assert [depths(tree.parents).count(d) for d in range(1, 6)] == [4, 8, 8, 3, 2]
        assert tree.parents[4:12] == [0, 0, 0, 1, 1, 2, 2, 3]
        assert tree.parents[-5:] == [12, 12, 12, 20, 20]
        validate(tree)


@pytest.mark.parametrize("shape", [(), ((),), ((2, 1),), ((0,),), ((2,), (0, 0)), ((2,), (1, 1, 1)), ((9,), (9,))])
def test_a_shape_that_is_no_tree_or_too_big_is_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        EagleParams(drafter="eagle", shape=shape, nodes=12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("length", [26, 28, 31, 32])
@pytest.mark.parametrize("head_limit", [32, 24])
def test_context_limits(name, length, head_limit):
    verifier = tiny_verifier(context=32)
    head = head_of(name, verifier)
    head.context_limit = head_limit
    cycles = check(verifier, method_of(name, head), prompt_of(length), limit=20)
    if length > head_limit:
        assert all(cycle.proposed == 0 for cycle in cycles), "the head's context is full: plain steps"
    elif length < 29:
        assert max(cycle.proposed for cycle in cycles) > 0


@torch.inference_mode()
def test_no_tree_is_deeper_than_it_may_be():
    verifier = tiny_verifier()
    for name in METHODS:
        head = head_of(name, verifier)
        head.context_limit = 10
        method = method_of(name, head)
        found = []
        for length, depth in ((5, 0), (5, 1), (5, 3), (5, 9), (9, 9), (11, 9), (12, 9)):
            method.start((), torch.empty(0, 0))
            tree = method.propose(state_of(verifier, prompt_of(length), head.reads, max_depth=depth)).tree
            found.append(max(depths(tree.parents), default=0))
        assert found == [0, 1, 3, 4, 3, 1, 0]


# The shift of one -------------------------------------------------------------------------------------------


class Oracle(EagleHead):
    """Comes to the verifier's true state at t + 1 where it is given those at t and token t + 1 of a known text."""

    def know(self, ids, states_TD):
        self.ids, self.true_TD, self.asked = torch.tensor(ids), states_TD, 0

    def forward(self, words_BN, states_BND, positions_BN, sees, cache=None):
        if cache is not None:
            super().forward(words_BN, states_BND, positions_BN, sees, cache)
        at_BN = positions_BN.expand_as(words_BN)
        inside_BN = at_BN + 1 < len(self.ids)
        at_BN = at_BN.clamp(max=len(self.ids) - 2)
        same_BN = (states_BND - self.true_TD[at_BN]).abs().amax(-1) < 1e-3
        right_BN = inside_BN & same_BN & (words_BN == self.ids[at_BN + 1])
        self.asked += int(right_BN.sum())
        return torch.where(right_BN[..., None], self.true_TD[(at_BN + 1)], -self.true_TD[at_BN])


def oracle(verifier, prompt, limit):
    ids = [*prompt, *vanilla_text(verifier, prompt, limit=limit)]
    head = Oracle(verifier, reads=(FINAL,), d2t=torch.arange(VOCABULARY), layer=1)
    head.begin(ids)
    head.know(ids, states_of(verifier, ids, (FINAL,)))
    return head, Example(id="a", ids=tuple(ids), prompt_length=len(prompt))


@pytest.mark.parametrize("name", ["eagle", "eagle2"])
def test_the_oracle_that_knows_the_next_state_is_always_right_in_decoding(name):
    verifier, prompt = tiny_verifier(), prompt_of(5)
    head, _ = oracle(verifier, prompt, 21)
    cycles = check(verifier, method_of(name, head, top_k=1), prompt, limit=21)
    assert [cycle.accepted for cycle in cycles] == [4, 4, 4, 4]


class Table(dict):
    """Features by text, as `Features` gives them."""


def test_the_oracle_is_always_right_in_training_rows():
    verifier, prompt = tiny_verifier(), prompt_of(5)
    head, e = oracle(verifier, prompt, 21)
    found = Table(a=head.true_TD)
    row = measure(head, [e, e], found, places=len(e.anchors), window=3, sequences=2)
    assert row["accuracy"] == 1
    assert row["streak"] == pytest.approx((3 * (len(e.anchors) - 2) + 2 + 1) / len(e.anchors))
    rows = collate([e], found, head)
    (states,) = unroll(head, rows, rows.features_BTC[:, :-1], steps=1)
    assert float(F.smooth_l1_loss(states, rows.features_BTC[:, 1:])) < 1e-6
    moved = rows._replace(words_BN=torch.tensor([e.ids[:-1]]))
    (states,) = unroll(head, moved, moved.features_BTC[:, :-1], steps=1)
    assert float(F.smooth_l1_loss(states, rows.features_BTC[:, 1:])) > 0.1


def test_rows_begin_where_decoding_begins_and_end_with_the_text():
    e, short = (
        Example(id="a", ids=tuple(range(10, 18)), prompt_length=3),
        Example(id="b", ids=(9, 8, 7, 6), prompt_length=2),
    )
    head = head_of("eagle3", tiny_verifier(), words=[w for w in range(VOCABULARY) if w != 15])
    rows = collate([e, short], Table(a=torch.randn(9, 96), b=torch.randn(4, 96)), head)
    assert rows.words_BN.tolist() == [list(range(11, 18)), [8, 7, 6, 0, 0, 0, 0]]
    words = head.d2t[rows.targets_BN.clamp(min=0)].masked_fill(rows.targets_BN < 0, -1).tolist()
    assert words == [[12, 13, 14, -1, 16, 17, -1], [7, 6, -1, -1, -1, -1, -1]]
    for step, wanted in ((0, [[2, 4, 5], [1]]), (1, [[4, 5], []]), (2, [[4, 5], []]), (3, [[5], []])):
        assert [row.nonzero().flatten().tolist() for row in inside(rows, step=step)] == wanted


# Training ---------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_unrolled_rows_are_chains_as_decoding_drafts_them(name):
    verifier, ids = tiny_verifier("qwen2"), prompt_of(9)
    head = head_of(name, verifier)
    e = Example(id="a", ids=tuple(ids), prompt_length=3)
    rows = collate([e], Table(a=states_of(verifier, ids, head.reads)), head)
    steps = list(unroll(head, rows, head.fuse(rows.features_BTC[:, :-1]), steps=4))
    for start in range(2, 5):
        logq = chain_logq(head, state_of(verifier, ids[: start + 2], head.reads), ids[start + 2 : start + 5])
        for step in range(4):
            found = head.logits(steps[step][0, start + step]).log_softmax(-1)
            torch.testing.assert_close(found, logq[step], atol=1e-4, rtol=1e-4)
    assert step_mask(4, step=2)[3].nonzero().flatten().tolist() == [0, 1, 4 + 2, 8 + 3]


def fitting(**changed):
    return Fitting(**{**vars(FITTING), **changed})


def objective_of(name, head, found, f):
    if name == "eagle":
        return eagle.objective(
            head, found, eagle.Params(**EAGLE | {"noise": 0.02, "token_weight": 1.0}, training=f), seed=0
        )
    return eagle3.objective(head, found, eagle3.Params(**EAGLE3, training=f))


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def memorised(request, tmp_path_factory):
    """(name, head, text, curve) after training on one text."""
    name, verifier, prompt = request.param, tiny_verifier(), prompt_of(6)
    ids = [*prompt, *vanilla_text(verifier, prompt, limit=25)]
    e, head = Example(id="a", ids=tuple(ids), prompt_length=6), head_of(name, verifier)
    found = Table(a=states_of(verifier, ids, head.reads))
    f = FITTING if name == "eagle" else fitting(steps=40)
    rows = fit.fit(
        head,
        [e],
        objective_of(name, head, found, f),
        lambda: measure(head, [e], found, places=len(e.anchors), window=3, sequences=1),
        f,
        seed=0,
        scratch=tmp_path_factory.mktemp("scratch"),
        title=name,
    )
    return name, head, e, rows


def chains(name, head):
    return method_of(name, head, shape=((1,), (1,), (1,)), gamma=3, top_k=1, nodes=3)


def test_overfit_gate_whole_windows_are_accepted_by_the_real_loop(memorised):
    name, head, e, rows = memorised
    first, *_, last = (row for row in rows if row["split"] == "valid")
    assert first["streak"] < 1.5 < 2.7 < last["streak"]
    assert last["accuracy"] == 1
    cycles = check(tiny_verifier(), chains(name, head), e.ids[: e.prompt_length], limit=25)
    assert all(cycle.accepted == cycle.proposed for cycle in cycles)
    assert max(cycle.proposed for cycle in cycles) == 3


class Shifted(DynamicTree):
    """Joins a state with its own token instead of the next one."""

    def read(self, ids, features_TC):
        return super().read([ids[0], *ids[:-1]], features_TC)


def test_a_wrong_shift_does_not_pass_the_gate(memorised):
    """EAGLE-3's states tell the next word of a text without chance: there only the loss shows the shift."""
    name, head, e, _ = memorised
    if name == "eagle":
        method = Shifted(DynamicParams(drafter="", gamma=3, top_k=1, nodes=3, threshold=0.0), head)
        cycles = check(tiny_verifier(), method, e.ids[: e.prompt_length], limit=25)
        assert sum(cycle.accepted for cycle in cycles) < 0.5 * sum(cycle.proposed for cycle in cycles)
    rows = collate([e], Table(a=states_of(tiny_verifier(), e.ids, head.reads)), head)
    losses = [token_loss(head, rows._replace(words_BN=torch.tensor([w]))) for w in (e.ids[1:], e.ids[:-1])]
    assert losses[1] > 4 * losses[0]


@torch.no_grad()
def token_loss(head, rows):
    (states,) = unroll(head, rows, head.fuse(rows.features_BTC[:, :-1]), steps=1)
    learnt = inside(rows, step=0)
    return float(F.cross_entropy(head.logits(states[learnt]), rows.targets_BN[learnt]))


class Killed(Exception):
    pass


def run_of(name, folder, *, kill_after=None):
    verifier, texts, calls = tiny_verifier(), [], []
    for i in range(4):
        texts.append(Example(id=f"{i}", ids=tuple(prompt_of(14, seed=i)), prompt_length=5))
    head = head_of(name, verifier, words=SOME_WORDS)
    found = Table({e.id: states_of(verifier, e.ids, head.reads) for e in texts})
    f = fitting(steps=6, sequences=1, accumulation=2, evaluate_every=4)
    inner = objective_of(name, head, found, f)

    def loss(chosen, number):
        if kill_after is not None and len(calls) == 2 * kill_after:
            raise Killed
        calls.append(number)
        return inner(chosen, number)

    folder.mkdir(exist_ok=True)
    rows = fit.fit(
        head,
        texts[:3],
        loss,
        lambda: measure(head, texts[3:], found, places=2, window=2, sequences=2),
        f,
        seed=7,
        scratch=folder,
        title=name,
    )
    return [p.detach().clone() for p in head.trained()], [row | {"seconds": 0} for row in rows], calls


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_killed_run_ends_as_an_undisturbed_one(name, tmp_path):
    before = {name: p.clone() for name, p in tiny_verifier().named_parameters()}
    weights, rows, _ = run_of(name, tmp_path / "straight")
    with pytest.raises(Killed):
        run_of(name, tmp_path / "killed", kill_after=4)
    again, resumed, calls = run_of(name, tmp_path / "killed")
    assert calls[0] == 7, "three steps of two were saved"
    assert resumed == rows
    assert all(torch.equal(a, b) for a, b in zip(again, weights, strict=True))
    start = head_of(name, tiny_verifier(), words=SOME_WORDS).trained()
    assert not any(torch.equal(a, b) for a, b in zip(start, weights, strict=True)), "every weight of the head moves"
    assert all(torch.equal(p, before[name]) for name, p in tiny_verifier().named_parameters())


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A profile's folder with what training reads."""
    monkeypatch.chdir(tmp_path)
    save_tiny(store.verifier_folder("p"), causal_lm())
    verifier, rows, states = tiny_verifier(), [], {}
    for i in range(10):
        prompt = prompt_of(4 + i % 3, seed=i)
        row = {"id": f"{i}", "prompt_ids": prompt, "output_ids": prompt_of(9, seed=50 + i)}
        rows.append(row | {"finish_reason": "length", "temperature": 0.0, "seed": 0})
        states[f"{i}"] = states_of(verifier, [*prompt, *row["output_ids"]], (0, 1, FINAL))
    store.write_parquet(store.trajectories_file("p"), rows, store.TRAJECTORIES, {})
    write_shard(features_folder("p") / "0.safetensors", states)
    write_index(features_folder("p"), (0, 1, FINAL), dict.fromkeys(states, "0.safetensors"))
    return "p"


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_the_stage_writes_a_head_that_the_methods_decode_with(profile, name):
    module = {"eagle": eagle, "eagle3": eagle3}[name]
    settings = EAGLE if name == "eagle" else EAGLE3 | {"draft_vocab": 20}
    f = fitting(steps=4, sequences=2, evaluate_every=2)
    device = entry.Device(name="cpu", dtype="float32", threads=1)
    module.train(profile, module.Params(**settings, training=f), V, device, seed=1)
    folder, model = store.drafter_folder(profile, name), store.verifier_folder(profile)
    card = read_head_card(folder)
    assert (card.kind, card.objective, card.settings) == (name, name, {"layer": 1})
    assert card.draft_vocab_size == (VOCABULARY if name == "eagle" else 20)
    marks = {"tokenizer": load_tokenizer(model).fingerprint(), "config": config_digest(model)}
    cls = {"eagle": EagleHead, "eagle3": Eagle3Head}[name]
    plain, _ = load_head(folder, cls, tiny_verifier(), **marks, packed=False)
    assert card.parameters == sum(p.numel() for p in plain.parameters())
    packed, _ = load_head(folder, cls, load_verifier(model, dtype=torch.float32), **marks)
    for head in (plain, packed):
        for method in METHODS[:2] if name == "eagle" else METHODS[2:]:
            cycles = check(head.verifier, method_of(method, head), prompt_of(5))
            assert max(cycle.nodes for cycle in cycles) > 1
    curve = list(csv.DictReader(io.StringIO(store.curves_file(profile, name).read_text())))
    assert {"loss", "accuracy", "streak", "seconds"} <= set(curve[0])
    assert [row["step"] for row in curve if row["split"] == "valid"] == ["0", "2", "4"]


def test_a_layer_the_verifier_has_not_is_refused():
    for layer in (0, 2):
        with pytest.raises(ValueError, match=f"layer {layer}: .*1 to 1"):
            EagleHead(tiny_verifier(), reads=(FINAL,), d2t=torch.arange(VOCABULARY), layer=layer)


def test_methods_say_what_they_read():
    for name in METHODS:
        head = head_of(name, tiny_verifier())
        assert isinstance(method := method_of(name, head), GrowingMethod)
        assert method.reads == ((0, 1, FINAL) if name == "eagle3" else (FINAL,))
        assert method_module(name).RULE == "match"
