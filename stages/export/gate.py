"""What a drafter proposes, and what is accepted of it, on a few held-out prompts: by the evaluate stage's engine.

Coins are keyed by place and draws by seed, so two drafters with equal weights give equal accounts.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from stages.common.models import Verifier
from stages.common.params import keys_at, load
from stages.common.tokenizers import Tokenizer
from stages.evaluate.contract import Method, Proposal, Sampling, State
from stages.evaluate.engine import Engine
from stages.evaluate.harness import Prompt, Shared
from stages.evaluate.parts import VANILLA, WINDOW, method_module, read_prompts


class Turns(NamedTuple):
    """One prompt's text, cycle by cycle."""

    prompt: str
    output_ids: list[int]
    accepted: list[int]
    drafts: list[tuple[list[int], list[int]]]  # the nodes' words and parents


Account = list[Turns]


def method_for(profile: str, name: str, kind: str) -> str:
    """A method of `<profile>.evaluate` that drafts with this drafter, or else with one of its kind.

    ValueError if there is none.
    """
    fitting = []
    for method in keys_at(profile, "evaluate"):
        if method in ("shared", VANILLA):
            continue
        module = method_module(method)
        params: Any = load(module.Params, profile, "evaluate", method)
        if params.drafter is not None and getattr(module, "KIND", WINDOW) == kind:
            fitting.append((params.drafter != name, method))
    if not fitting:
        raise ValueError(
            f"params.yaml: {profile}.evaluate: no method drafts with a drafter of kind {kind!r}, so nothing can show "
            f"that the export of {name!r} is accepted as it was; add a section"
        )
    return min(fitting, key=lambda pair: pair[0])[1]


def held_out(profile: str, tokenizer: Tokenizer, benchmarks: Sequence[str], *, count: int) -> list[Prompt]:
    """Benchmark prompts, in turn from each: the corpus is guarded against all of them. Fewer if there are no more."""
    found = [[p for p in read_prompts(profile, benchmark, tokenizer) if p.behind is None] for benchmark in benchmarks]
    mixed = [prompt for prompt in chain.from_iterable(zip_longest(*found)) if prompt is not None][:count]
    if not mixed:
        raise ValueError("params.yaml: benchmarks: [] leaves no held-out prompt to try the export on; name one")
    return mixed


def accepted(
    profile: str, method: str, drafter: Any, verifier: Verifier, prompts: Sequence[Prompt], *, seed: int
) -> Account:
    """What is drafted, and what the verifier accepts of it, with the method's settings."""
    module = method_module(method)
    decoder = Watched(module.build(load(module.Params, profile, "evaluate", method), drafter))
    shared = load(Shared, profile, "evaluate", "shared")
    sampling = Sampling(temperature=shared.temperature, top_k=shared.top_k, top_p=shared.top_p, seed=seed)
    engine = Engine(verifier, sampling, max_new_tokens=shared.max_new_tokens)
    account = []
    for prompt in prompts:
        decoder.drafts = []
        text = engine.decode(prompt.ids, decoder, prompt_id=prompt.id)
        account.append(Turns(prompt.id, text.output_ids, [cycle.accepted for cycle in text.cycles], decoder.drafts))
    return account


class Watched:
    """A method that keeps what it proposed: a short training may have nothing accepted."""

    def __init__(self, method: Method) -> None:
        self.method, self.reads = method, method.reads
        self.drafts: list[tuple[list[int], list[int]]] = []

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self.method.start(prompt_ids, features_TC)

    def propose(self, state: State) -> Proposal:
        proposal = self.method.propose(state)
        self.drafts.append((proposal.tree.tokens_N.tolist(), list(proposal.tree.parents)))
        return proposal


def acceptance_length(account: Account) -> float:
    """Tokens a pass of the verifier brings: those accepted, and its own."""
    cycles = [count for turns in account for count in turns.accepted]
    return 1 + sum(cycles) / max(1, len(cycles))


def refuse_difference(folder: Path, wanted: Account, found: Account) -> None:
    """ValueError if the folder's drafter does not draft just as the one it came from, or neither drafts at all."""
    if not any(tokens for turns in wanted for tokens, _ in turns.drafts):
        raise ValueError(
            f"{folder}: the drafter proposed nothing on {len(wanted)} prompts, so nothing shows that its export is as "
            "good; lower the threshold of its method, or raise shared.max_new_tokens"
        )
    bad = [before.prompt for before, after in zip(wanted, found, strict=True) if before != after]
    if bad:
        raise ValueError(
            f"{folder}: read back, the exported drafter drafts otherwise than the one it came from, on {len(bad)} of "
            f"{len(wanted)} prompts, first {bad[0]}: acceptance length {acceptance_length(found):.4f}, it was "
            f"{acceptance_length(wanted):.4f}. The folder was not kept"
        )
