"""Every method answers with vanilla's own text, whatever drafter stands behind it; sampling Leviathan with its law."""

from collections import Counter

import pytest
import torch

from kernels import sampling
from kernels.cache import KVCache
from kernels.tree import depths, prefix_trie
from stages.common.tiny import VOCABULARY, WINDOW
from stages.evaluate.contract import Sampling, State, Text
from stages.evaluate.drafting import sample_drafts
from stages.evaluate.harness import Shared, greedy_or_match
from stages.evaluate.parts import method_module
from tests.stages.scripted import (
    FURTHER,
    KINDS,
    TableDrafter,
    TableVerifier,
    engine_of,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
    vanilla_text,
)

MATCHING = ("specdiff2", "specdiff2_trie", "specdiff2_tree")
MODELLESS = ("vanilla", "prompt_lookup")
ABLATIONS = ("specdiff2_train", "specdiff2_test")
RIVALS = {"distillspec": 0.7, "first": 1.3}  # specdiff2 over other drafters, each at one temperature
NOTHING = torch.empty(0, 0)  # features of no layer
SOME_WORDS = [word for word in range(VOCABULARY) if word % 3]
# (window, drafts, nodes, prompt length): every window 1 .. 8, every K 1 .. 4, trees of 1 to 16 nodes
SHAPES = [
    (1, 1, 1, 1),
    (2, 2, 16, 40),
    (3, 3, 4, 7),
    (4, 4, 9, 2),
    (5, 1, 2, 23),
    (6, 3, 12, 1),
    (7, 2, 5, 13),
    (8, 4, 16, 5),
]


def method_of(name, drafter, *, gamma=4, drafts=2, nodes=8, temperature=1.0, width=4, threshold=0.0):
    module = method_module(name)
    settings = {
        "vanilla": {"drafter": None},
        "prompt_lookup": {"drafter": None, "gamma": gamma, "longest": drafts, "shortest": 1},
        "specdiff2_train": {"drafter": "streak", "gamma": gamma, "temperature": temperature},
        "specdiff": {"drafter": "adapt", "gamma": gamma, "temperature": temperature},
        "specdiff2_tree": {"drafter": "", "gamma": gamma, "nodes": nodes, "width": width, "threshold": threshold},
    }
    chosen = settings.get(name, {"drafter": "streak", "gamma": gamma, "drafts": drafts, "temperature": temperature})
    return module.build(module.Params(**chosen), drafter)


def check(verifier, drafter, name, prompt, *, temperature, limit=10, **shape):
    """The text's cycles; fails unless the method's text is vanilla's."""
    text = engine_of(verifier, temperature=temperature, limit=limit).decode(
        prompt, method_of(name, drafter, **shape), prompt_id="p"
    )
    assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=limit)
    return text.cycles


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def pair(request):
    kind, tied = request.param
    number = KINDS.index(request.param)
    own = [tiny_drafter(kind, tied), tiny_drafter(kind, tied, layers=[1], words=SOME_WORDS)]
    part = {"layers": [1], "words": SOME_WORDS} if number % 2 else {}
    return tiny_verifier(kind, tied), [*own, tiny_drafter(kind, tied, prefix="verifier", **part)], number


@pytest.mark.parametrize(
    ("name", "temperature"),
    [(name, temperature) for name in (*MODELLESS, *MATCHING, *ABLATIONS) for temperature in (0.0, 0.7, 1.3)]
    + [("specdiff", 0.0), *RIVALS.items()],
)
def test_every_method_equals_vanilla(pair, name, temperature):
    """With prefixes of their own at two shapes, and with the verifier's at another one for each kind."""
    verifier, drafters, number = pair
    start = ["specdiff", *MODELLESS, *MATCHING, *ABLATIONS, *RIVALS].index(name) + round(10 * temperature)
    for turn, drafter in enumerate([None] if name in MODELLESS else drafters):
        gamma, drafts, nodes, length = SHAPES[(start + (1 + number if turn == 2 else 3 * turn)) % len(SHAPES)]
        cycles = check(
            verifier,
            drafter,
            name,
            prompt_of(length, seed=length),
            temperature=temperature,
            gamma=gamma,
            drafts=drafts,
            nodes=nodes,
        )
        assert all(cycle.nodes <= max(nodes, gamma * drafts) for cycle in cycles)
        if name == "vanilla":
            assert all(cycle.accepted == 0 for cycle in cycles)
        elif drafter is not None and drafter.layers == (0, 1) and name == "specdiff2_tree" and temperature == 0:
            assert all(cycle.accepted > 0 for cycle in cycles if cycle.nodes), "the verifier itself at j = 1"


@pytest.mark.parametrize("prefix", ["own", "verifier"])
@pytest.mark.parametrize("kind", FURTHER)
def test_methods_equal_vanilla_for_further_families(kind, prefix):
    """Texts reach far beyond the window of the layers that slide."""
    verifier, drafter = tiny_verifier(kind), tiny_drafter(kind, prefix=prefix)
    assert 3 * WINDOW < 20
    cycles = check(verifier, drafter, "specdiff2_tree", prompt_of(20), temperature=0.0, gamma=5, nodes=12, limit=16)
    assert all(cycle.accepted > 0 for cycle in cycles if cycle.nodes), "the verifier itself at j = 1"
    part = tiny_drafter(kind, tied=False, prefix=prefix, layers=[1], words=SOME_WORDS)
    check(tiny_verifier(kind, False), part, "specdiff2_trie", prompt_of(5), temperature=0.7, gamma=4, limit=16)


def test_prompt_lookup_is_accepted_whole_where_a_text_repeats_itself():
    counting = TableVerifier(torch.eye(7).roll(1, 1) * 50)  # 0, 1, .. 6, 0, 1, ..
    text = engine_of(counting, limit=30).decode(list(range(7)), method_of("prompt_lookup", None), prompt_id="p")
    assert text.output_ids == [i % 7 for i in range(30)]
    assert [cycle.accepted for cycle in text.cycles] == [4, 4, 4, 4, 4, 3]
    assert all(cycle.proposed == cycle.accepted for cycle in text.cycles)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_tree_with_a_threshold_is_small_where_the_drafter_is_unsure(temperature):
    sizes = Counter()
    for threshold in (0.05, 0.3, 1.0):
        drafter, prompt = tiny_drafter(prefix="verifier"), prompt_of(9)
        shape = {"gamma": 4, "nodes": 12, "width": 6, "threshold": threshold}
        cycles = check(tiny_verifier(), drafter, "specdiff2_tree", prompt, temperature=temperature, limit=30, **shape)
        sizes[threshold] = sum(cycle.nodes for cycle in cycles) / len(cycles)
    assert sizes[0.05] > sizes[0.3] > sizes[1.0] == 0


def test_a_fed_drafter_sees_what_a_drafter_with_every_layer_sees():
    """The same proposals, cycle by cycle: nothing is stale after rejected rows, roll-backs and texts before."""
    verifier, texts = tiny_verifier(), {}
    for prefix in ("own", "verifier"):
        method = method_of("specdiff2_tree", tiny_drafter(prefix=prefix), gamma=3, nodes=6)
        engine = engine_of(verifier, temperature=1.3, limit=20)
        texts[prefix] = [engine.decode(prompt_of(n, seed=n), method, prompt_id=f"{n}").cycles for n in (1, 17, 6)]
    found = [
        [[(c.tokens, c.accepted, c.proposed, c.nodes) for c in text] for text in texts[prefix]] for prefix in texts
    ]
    assert found[0] == found[1]
    assert max(cycle[1] for text in found[0] for cycle in text) > 0


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("drafts", range(1, 5))
def test_every_window_and_number_of_drafts(gamma, drafts):
    name, temperature = MATCHING[(gamma + drafts) % 2], (0.0, 0.7, 1.3)[(gamma * drafts) % 3]
    length = 1 + (gamma * 5 + drafts * 9) % 40
    check(tiny_verifier(), tiny_drafter(), name, prompt_of(length), temperature=temperature, gamma=gamma, drafts=drafts)


@pytest.mark.parametrize("nodes", range(1, 17))
def test_every_tree_size(nodes):
    cycles = check(
        tiny_verifier(),
        tiny_drafter(),
        "specdiff2_tree",
        prompt_of(3 * nodes - 2),
        temperature=(0.0, 1.3)[nodes % 2],
        gamma=1 + nodes % 8,
        nodes=nodes,
        width=1 + nodes % 5,
    )
    assert max(cycle.nodes for cycle in cycles) <= nodes


@pytest.mark.parametrize("length", range(26, 33))
@pytest.mark.parametrize("drafter_limit", [32, 30, 24])
def test_context_limits_of_both_models(length, drafter_limit):
    verifier, drafter = tiny_verifier(context=32), tiny_drafter(context=32, prefix=("own", "verifier")[length % 2])
    drafter.context_limit = drafter_limit
    name = ("specdiff", *MATCHING)[(length + drafter_limit) % 4]
    cycles = check(verifier, drafter, name, prompt_of(length), temperature=0.0, limit=20, gamma=8)
    if length >= drafter_limit:
        assert all(cycle.proposed == 0 for cycle in cycles), "the drafter's context is full: plain steps"
    elif length < 28:
        assert max(cycle.proposed for cycle in cycles) > 0


def test_a_text_may_outgrow_the_drafter_and_the_next_text_is_drafted_again():
    verifier, drafter = tiny_verifier(), tiny_drafter()
    drafter.context_limit = 12
    method, engine = method_of("specdiff2_tree", drafter), engine_of(verifier, limit=12)
    for length in (8, 20, 8, 2):
        text = engine.decode(prompt_of(length), method, prompt_id="p")
        assert text.output_ids == vanilla_text(verifier, prompt_of(length), limit=12)
        proposed = [cycle.proposed for cycle in text.cycles]
        assert (max(proposed) > 0) == (length < 12)
        if length == 8:
            assert proposed[-1] == 0, "past the drafter's context there are plain steps"


def state_of(ids, *, max_depth=9, temperature=0.7, key=11):
    settings = Sampling(temperature=temperature, top_k=0, top_p=1.0, seed=2)
    return State(ids, max_depth, key, settings, KVCache(layers=1, capacity=1).lend, lambda: torch.empty(0, 0))


@torch.inference_mode()
def test_the_window_never_reaches_past_a_limit():
    drafter = tiny_drafter()
    drafter.context_limit = 10
    method = method_of("specdiff2_tree", drafter, gamma=4)
    assert [method.window(state_of(prompt_of(n))) for n in (5, 7, 8, 10, 11, 15)] == [4, 4, 3, 1, 0, 0]
    assert [method.window(state_of(prompt_of(5), max_depth=d)) for d in (0, 1, 4, 5)] == [0, 1, 4, 4]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["specdiff", *MATCHING])
def test_proposals_speak_the_verifiers_ids_and_only_words_that_can_be_drafted(name):
    drafter = tiny_drafter(words=SOME_WORDS)
    for seed in range(4):
        method = method_of(name, drafter, gamma=5, drafts=4, nodes=12)
        prompt = prompt_of(4, seed=seed)
        method.start(prompt, NOTHING)
        tree = method.propose(state_of([*prompt, 40])).tree
        assert set(tree.tokens_N.tolist()) <= set(SOME_WORDS)
        assert max(depths(tree.parents)) <= 5


@torch.inference_mode()
def test_both_methods_of_k_drafts_verify_the_same_drafts():
    drafter, prompt = tiny_drafter(words=SOME_WORDS), prompt_of(6)
    proposals = []
    for name in ("specdiff2", "specdiff2_trie"):
        method = method_of(name, drafter, gamma=4, drafts=3)
        method.start(prompt, NOTHING)
        proposals.append(method.propose(state_of([*prompt, 77])))
    first, second = proposals
    assert torch.equal(first.tree.tokens_N, second.tree.tokens_N)
    assert first.tree.parents == second.tree.parents
    assert (first.rule, second.rule) == ("select", "match")
    assert first.paths is not None
    assert [len(path) for path in first.paths] == [4, 4, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_walk_over_the_trie_is_never_shorter_than_the_selected_draft(temperature):
    verifier, drafter = tiny_verifier(), tiny_drafter()
    found = {}
    for name in ("specdiff2", "specdiff2_trie"):
        found[name] = check(verifier, drafter, name, prompt_of(5), temperature=temperature, gamma=3, drafts=4, limit=30)
    assert len(found["specdiff2_trie"]) <= len(found["specdiff2"])
    if temperature == 0:
        assert [c.accepted for c in found["specdiff2_trie"]] == [c.accepted for c in found["specdiff2"]]


def test_drafts_are_keyed_by_place_and_apart_from_the_verifiers_coins():
    q_GV = torch.full((4, 64), 1 / 64)
    here = sample_drafts(q_GV, 3, state_of([1, 2, 3, 4, 5]))
    assert torch.equal(here, sample_drafts(q_GV, 3, state_of([9, 9, 9, 9, 9])))
    later = sample_drafts(q_GV, 3, state_of([1, 2, 3, 4, 5, 6]))
    assert torch.equal(here[:, 1:], later[:, :-1])
    assert not torch.equal(here, sample_drafts(q_GV, 3, state_of([1, 2, 3, 4, 5], key=12)))
    places = [(5 + j, stream) for j in range(4) for stream in (0, 1)]
    coins = [sampling.keyed_uniform(3, seed=2, prompt_key=11, position=i, stream=stream) for i, stream in places]
    assert not any(torch.equal((coin * 64).long(), here[:, j // 2]) for j, coin in enumerate(coins))
    assert len(prefix_trie(here).tree.parents) > 4


# Leviathan: the joint law of three tokens, counted over many texts of a verifier with three words.
WORDS, TEXTS = 3, 600
CHI_SQUARE_26 = 66.0  # 26 degrees of freedom: exceeded with probability 2e-5


def tables():
    g = torch.Generator().manual_seed(4)
    verifier = TableVerifier(0.8 * torch.randn(WORDS, WORDS, generator=g))
    drafter = TableDrafter(0.8 * torch.randn(WORDS, 4, 2, generator=g), d2t=torch.tensor([2, 0]))
    return verifier, drafter


def law_statistic(method, temperature):
    """(chi-square of the first three tokens against the verifier's law, mean accepted)."""
    verifier, _ = tables()
    engine = engine_of(verifier, temperature=temperature, limit=4)
    counts, accepted, cycles = Counter(), 0, 0
    for number in range(TEXTS):
        text = Text([1])
        for _ in engine.stream(text, method, prompt_id=f"text/{number}"):
            if len(text.output_ids) >= 3:
                break
        counts[tuple(text.output_ids[:3])] += 1
        accepted += sum(cycle.accepted for cycle in text.cycles)
        cycles += len(text.cycles)
    p = (verifier.scores_VV / temperature).softmax(-1)
    statistic = 0.0
    for a in range(WORDS):
        for b in range(WORDS):
            for c in range(WORDS):
                expected = TEXTS * float(p[1, a] * p[a, b] * p[b, c])
                statistic += (counts[a, b, c] - expected) ** 2 / expected
    return statistic, accepted / cycles


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_leviathan_keeps_the_joint_law(temperature):
    statistic, accepted = law_statistic(method_of("specdiff", tables()[1], gamma=2), temperature)
    assert statistic < CHI_SQUARE_26
    assert accepted > 0.3, "drafts are really accepted"


def test_the_count_sees_a_draft_from_another_law_than_its_q():
    class WrongQ:
        """Hands over a flat q: the draft came from a sharp one over the same two words."""

        reads = ()

        def __init__(self):
            self.inner = method_of("specdiff", tables()[1], gamma=2, temperature=0.4)

        def start(self, prompt_ids, features_TC):
            self.inner.start(prompt_ids, features_TC)

        def propose(self, state):
            proposal = self.inner.propose(state)
            if proposal.q_GV is None:
                return proposal
            return proposal._replace(q_GV=(proposal.q_GV > 0) / 2.0)

    assert law_statistic(WrongQ(), 1.3)[0] > 1.5 * CHI_SQUARE_26


@torch.inference_mode()
def test_specdiff_hands_over_the_law_it_drew_from():
    drafter, prompt = tiny_drafter(words=SOME_WORDS), prompt_of(6)
    method = method_of("specdiff", drafter, gamma=3, temperature=0.8)
    method.start(prompt, NOTHING)
    proposal = method.propose(state_of([*prompt, 9]))
    assert proposal.rule == "leviathan"
    q_GV = proposal.q_GV
    assert q_GV is not None
    assert q_GV.shape == (3, VOCABULARY)
    torch.testing.assert_close(q_GV.sum(-1), torch.ones(3))
    outside = [word for word in range(VOCABULARY) if word not in SOME_WORDS]
    assert float(q_GV[:, outside].abs().sum()) == 0
    again = drafter.draft([*prompt, 9], 3, drafter.new_cache(16))
    torch.testing.assert_close(q_GV[:, SOME_WORDS], sampling.probabilities(again, temperature=0.8), atol=1e-6, rtol=0)


def test_only_leviathan_at_a_temperature_has_coins_of_its_own():
    shared = Shared(
        temperature=0.7,
        top_k=0,
        top_p=1.0,
        max_new_tokens=1,
        repeats=1,
        warm_up_tokens=1,
        yardstick_every=1,
        yardstick_tokens=1,
        excuse_multiple=0,
    )
    rules = {name: method_module(name).RULE for name in ("specdiff", *MODELLESS, *MATCHING, *ABLATIONS)}
    assert {name for name, rule in rules.items() if not greedy_or_match(shared, rule)} == {"specdiff"}


def test_an_unknown_method_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'eagle9'.*eagle2, .*prompt_lookup, recursive, specdiff, .*specdiff2_tree"):
        method_module("eagle9")
