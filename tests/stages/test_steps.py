"""Several denoising steps: one is a plain draft, more reveal the surest places first, and all of it is lossless."""

import pytest
import torch

from kernels.tree import depths
from stages.common.tiny import VOCABULARY
from stages.evaluate.methods import specdiff2_steps, specdiff2_train
from tests.stages.scripted import KINDS, cached, engine_of, prompt_of, tiny_drafter, tiny_verifier, vanilla_text
from tests.stages.test_methods import NOTHING, SOME_WORDS, state_of

G = 5


def method_of(drafter, *, steps, gamma=G, temperature=0.0):
    settings = {"drafter": "", "gamma": gamma, "steps": steps, "temperature": temperature}
    return specdiff2_steps.build(specdiff2_steps.Params(**settings), drafter)


def one_pass(drafter, *, gamma=G, temperature=0.0):
    return specdiff2_train.build(specdiff2_train.Params(drafter="", gamma=gamma, temperature=temperature), drafter)


def proposal_of(method, drafter, ids):
    """What a method proposes behind ids, whose last is pending."""
    method.start(ids[:-1], NOTHING)
    state = state_of(ids)
    if drafter.prefix == "verifier":
        state = state._replace(lend=cached(tiny_verifier(), ids).lend)
    with torch.inference_mode():
        return method.propose(state)


@pytest.mark.parametrize("prefix", ["own", "verifier"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_one_step_is_the_plain_draft(prefix, temperature):
    drafter = tiny_drafter(words=SOME_WORDS, prefix=prefix)
    for length in (1, 9):
        ids = prompt_of(length + 1, seed=length)
        found = proposal_of(method_of(drafter, steps=1, temperature=temperature), drafter, ids)
        wanted = proposal_of(one_pass(drafter, temperature=temperature), drafter, ids)
        assert torch.equal(found.tree.tokens_N, wanted.tree.tokens_N)
        assert found.tree.parents == wanted.tree.parents
        assert found.rule == "match"


def by_hand(drafter, ids, *, steps, gamma=G):
    """Greedy denoising from the definition: a fresh pass over the whole text for every step."""
    draft, masked = [drafter.mask_id] * gamma, set(range(gamma))
    for step in range(1, steps + 1):
        cache = drafter.new_cache(1)
        rows = torch.tensor([[*ids, *draft[:-1]]])
        n, total = len(ids), rows.shape[1]
        sees = torch.ones(total, total, dtype=torch.bool)
        sees[:n] = torch.ones(n, total, dtype=torch.bool).tril()
        hidden = drafter(rows, torch.arange(total)[None], sees, cache)
        q_GVd = drafter.logits(hidden[0, n - 1 :]).softmax(-1)
        sure = sorted(masked, key=lambda j: -float(q_GVd[j].max()))
        for j in sure[: len(masked) - gamma * (steps - step) // steps]:
            draft[j] = int(drafter.d2t[q_GVd[j].argmax()])
            masked.remove(j)
    assert not masked
    return draft


@torch.inference_mode()
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_surest_places_are_revealed_first_and_read_by_the_next_pass(steps):
    """A prefix of its own, cached, against passes without a cache; the cached drafter goes on from text to text."""
    drafter, changed = tiny_drafter(words=SOME_WORDS), 0
    method = method_of(drafter, steps=steps)
    for seed in range(4):
        ids = prompt_of(6 + seed, seed=seed)
        found = proposal_of(method, drafter, ids).tree.tokens_N.tolist()
        assert found == by_hand(drafter, ids, steps=steps)
        changed += found != by_hand(drafter, ids, steps=1)
    assert changed, "more than one step makes a difference"


@torch.inference_mode()
@pytest.mark.parametrize("steps", [2, 5])
def test_with_the_verifiers_prefix_the_steps_are_the_same(steps):
    """A drafter with every layer of the verifier reads from its cache what it would have cached itself."""
    own, lent = tiny_drafter(), tiny_drafter(prefix="verifier")
    for seed in range(3):
        ids = prompt_of(4 + 5 * seed, seed=seed)
        found = [proposal_of(method_of(d, steps=steps), d, ids).tree.tokens_N.tolist() for d in (own, lent)]
        assert found[0] == found[1]


@pytest.mark.parametrize(("number", "kind"), list(enumerate(KINDS)), ids=lambda value: str(value))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_text_is_vanillas(number, kind, temperature):
    verifier, prompt = tiny_verifier(*kind), prompt_of(3 + 4 * number, seed=number)
    wanted = vanilla_text(verifier, prompt, temperature=temperature, limit=12)
    for prefix in ("own", "verifier"):
        drafter = tiny_drafter(*kind, layers=[number % 2], words=range(VOCABULARY), prefix=prefix)
        method = method_of(drafter, steps=1 + (number + 1) % 4, temperature=(0.0, 1.0)[number % 2])
        text = engine_of(verifier, temperature=temperature, limit=12).decode(prompt, method, prompt_id="p")
        assert text.output_ids == wanted
        assert max(cycle.proposed for cycle in text.cycles) == G


def test_near_a_limit_the_window_is_shorter_than_the_steps():
    verifier, drafter = tiny_verifier(), tiny_drafter(prefix="verifier")
    text = engine_of(verifier, limit=4).decode(prompt_of(5), method_of(drafter, steps=5), prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt_of(5), limit=4)
    assert text.cycles[0].proposed == 2


def test_a_draft_has_no_more_tokens_than_its_window():
    drafter = tiny_drafter(words=SOME_WORDS)
    tree = proposal_of(method_of(drafter, steps=2, gamma=3), drafter, prompt_of(7)).tree
    assert depths(tree.parents) == [1, 2, 3]
    assert set(tree.tokens_N.tolist()) <= set(SOME_WORDS)


def test_more_steps_than_tokens_are_refused():
    with pytest.raises(ValueError, match="steps: 4 for a window of 3"):
        specdiff2_steps.Params(drafter="", gamma=3, steps=4, temperature=0.0)
