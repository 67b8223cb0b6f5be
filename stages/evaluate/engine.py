"""The decoding loop: one engine for every method, vanilla included (METHOD.md section 2).

    prefill -> { propose -> one verifier pass with the pending token as root -> accept -> commit } until a stop

The verifier's cache holds every emitted token but the last, the *pending* one. A pass scores it and every node of the
proposal under a tree mask, so no second pass is ever needed; vanilla is the proposal without nodes. A method never
touches the verifier or the clock; of the cache it may read the committed rows, and use the room behind them. Row i of a
pass speaks for the token behind row i: row 0 is the pending token's.

Letters: N nodes, V vocabulary, G window, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import accept, sampling
from kernels.cache import KVCache, LentCache
from kernels.tree import Tree, ancestors_NN, depths
from stages.common.models import Verifier

Rule = Literal["match", "select", "leviathan"]


class Proposal(NamedTuple):
    """A tree to verify. `paths` are the K drafts in it (rule `select`); `q_GV` is what a chain was drawn from."""

    tree: Tree
    rule: Rule = "match"
    paths: list[list[int]] | None = None
    q_GV: Tensor | None = None


ACCEPT_STREAM, FINAL_STREAM, DRAFT_STREAM = 0, 1, 2  # uses of a place's uniforms, independent of one another
EMPTY = Tree(torch.empty(0, dtype=torch.long), [])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What one token is drawn with: the deployed settings and the seed of the position-keyed coins."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


class State(NamedTuple):
    """What a method may look at: the text so far, whose last token is pending, and how deep a draft can count."""

    ids: Sequence[int]
    max_depth: int
    key: int  # of the prompt, for the drafter's own position-keyed draws
    sampling: Sampling
    lend: Callable[[Sequence[int]], LentCache]  # the verifier's cache of some layers: every token but the pending one


class Method(Protocol):
    """How a text is drafted. One object serves many prompts, one at a time."""

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget the last prompt; read this one."""
        ...

    def propose(self, state: State) -> Proposal: ...


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One turn of the loop."""

    tokens: list[int]  # emitted: accepted draft tokens, then the verifier's own; cut at a stop
    accepted: int  # L, before the cut
    proposed: int  # depth of the judged path
    nodes: int
    draft_s: float
    verify_s: float
    other_s: float
    stop: Literal["", "stop", "length"]


@dataclass
class Text:
    """A decoded text and its account. The first token comes from the prefill and is in no cycle."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    prefill_s: float = 0.0
    finish_reason: str = ""

    @property
    def decode_s(self) -> float:
        return sum(c.draft_s + c.verify_s + c.other_s for c in self.cycles)

    def seconds(self, part: Literal["draft_s", "verify_s", "other_s"]) -> float:
        return sum(getattr(cycle, part) for cycle in self.cycles)


class Clock:
    """Splits wall time into laps; waits for the device before every reading."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else None
        self.last = self._now()

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds


class Engine:
    """Decodes one prompt at a time with any method and one sampling setting."""

    def __init__(self, verifier: Verifier, sampling_: Sampling, *, max_new_tokens: int) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; write 0 or more")
        self.verifier = verifier
        self.sampling = sampling_
        self.max_new_tokens = max_new_tokens
        self.cache: KVCache = verifier.new_cache(64)

    def decode(self, prompt_ids: Sequence[int], method: Method, *, prompt_id: str) -> Text:
        """The whole text, with its account."""
        text = Text(list(prompt_ids))
        for _ in self.stream(text, method, prompt_id=prompt_id):
            pass
        return text

    @torch.inference_mode()
    def stream(self, text: Text, method: Method, *, prompt_id: str) -> Iterator[list[int]]:
        """Fill `text` cycle by cycle, yielding what each emits. The clock stands still between cycles."""
        key = sampling.prompt_key(prompt_id)
        noise = self._noise(key)
        if self._room(text) < 1:
            text.finish_reason = "length"
            return
        clock = Clock(self.verifier.device)
        first = self._prefill(text.prompt_ids, noise)
        method.start(text.prompt_ids)
        text.output_ids.append(first)
        text.prefill_s = clock.lap()
        text.finish_reason = self._stop(text)
        yield [first]
        while not text.finish_reason:
            cycle = self._cycle(text, method, key, noise)
            text.cycles.append(cycle)
            text.finish_reason = cycle.stop
            yield cycle.tokens

    @torch.inference_mode()
    def vanilla_steps(self, text: Text, count: int, *, prompt_id: str) -> list[float]:
        """Decode the last `count` committed tokens again, one at a time: seconds of each step, the paired yardstick.

        Leaves the cache as long as it was. Between two cycles of `stream`, or after its last.
        """
        noise = self._noise(sampling.prompt_key(prompt_id))
        committed = self.cache.length - len(text.prompt_ids)
        assert 0 <= count <= committed, (count, committed)
        self.cache.roll_back(self.cache.length - count)
        clock, laps = Clock(self.verifier.device), []
        for token in text.output_ids[committed - count : committed]:
            self._choose(self.verify(token), [self.cache.length + 1], noise)
            self.cache.keep([0])
            laps.append(clock.lap())
        return laps

    def gap(self, text: Text, index: int, *, prompt_id: str) -> float:
        """Vanilla's top-2 gap, in logit units, where it chose output token `index`."""
        ids = [*text.prompt_ids, *text.output_ids[:index]]
        self.cache.roll_back(0)
        with torch.inference_mode():
            logits_V = self.verifier.logits(self.verifier.prefill(ids, self.cache))
        noise = self._noise(sampling.prompt_key(prompt_id))
        s = self.sampling
        return sampling.noisy_top2(logits_V, len(ids), noise, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)

    def _noise(self, key: int) -> sampling.KeyedNoise:
        v = self.verifier
        return sampling.KeyedNoise(seed=self.sampling.seed, prompt_key=key, vocab=v.vocab_size, device=v.device)

    def _room(self, text: Text) -> int:
        """Tokens that may still be emitted: the limit, and what the context holds."""
        length = len(text.prompt_ids) + len(text.output_ids)
        return min(self.max_new_tokens - len(text.output_ids), self.verifier.context_limit - length)

    def _stop(self, text: Text) -> Literal["", "stop", "length"]:
        if text.output_ids[-1] in self.verifier.end_ids:
            return "stop"
        return "length" if self._room(text) < 1 else ""

    def _prefill(self, prompt_ids: Sequence[int], noise: sampling.KeyedNoise) -> int:
        self.cache.roll_back(0)
        hidden_D = self.verifier.prefill(prompt_ids, self.cache)
        return int(self._choose(self.verifier.logits(hidden_D[None]), [len(prompt_ids)], noise))

    def _cycle(self, text: Text, method: Method, key: int, noise: sampling.KeyedNoise) -> Cycle:
        clock = Clock(self.verifier.device)
        ids = text.prompt_ids + text.output_ids
        state = State(ids, self._room(text) - 1, key, self.sampling, self.cache.lend)
        other = clock.lap()
        proposal = method.propose(state)
        draft_s = clock.lap()
        tree, depth_N = proposal.tree, depths(proposal.tree.parents)
        assert max(depth_N, default=0) <= state.max_depth, "a draft beyond the limit"
        assert self.cache.length == len(ids) - 1, "the cache holds every token but the pending one"
        other += clock.lap()
        logits_MV = self.verify(ids[-1], tree)
        verify_s = clock.lap()
        verdict = self._judge(proposal, logits_MV, [len(ids) + d for d in (0, *depth_N)], noise, key)
        self.cache.keep([0, *(node + 1 for node in verdict.path)])
        emitted = [*tree.tokens_N[verdict.path].tolist(), verdict.token]
        stop: Literal["", "stop", "length"] = ""
        for count, token in enumerate(emitted, 1):
            text.output_ids.append(token)
            if stop := self._stop(text):
                emitted = emitted[:count]
                self.cache.roll_back(len(ids) + count - 1)
                break
        return Cycle(
            tokens=emitted,
            accepted=len(verdict.path),
            proposed=max(depth_N, default=0),
            nodes=len(depth_N),
            draft_s=draft_s,
            verify_s=verify_s,
            other_s=other + clock.lap(),
            stop=stop,
        )

    def verify(self, root: int, tree: Tree = EMPTY) -> Tensor:
        """Float32 scores [N + 1, V] behind the pending token and behind every node, in one pass. Commits nothing."""
        device, cached = self.verifier.device, self.cache.length
        rows = 1 + len(tree.parents)
        tokens = torch.cat([torch.tensor([root]), tree.tokens_N.cpu()]).to(device)
        places = torch.tensor([0, *depths(tree.parents)], device=device) + cached
        sees = torch.ones(rows, cached + rows, dtype=torch.bool, device=device)
        if rows > 1:
            sees[0, cached + 1 :] = False
            sees[1:, cached + 1 :] = ancestors_NN(tree).to(device)
        hidden_1MD = self.verifier(tokens[None], places[None], sees, self.cache)
        return self.verifier.logits(hidden_1MD[0])

    def _choose(self, logits_MV: Tensor, positions: list[int], noise: sampling.KeyedNoise) -> Tensor:
        s = self.sampling
        return sampling.keyed_choice(
            logits_MV, positions, noise, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p
        )

    def _judge(
        self,
        proposal: Proposal,
        logits_MV: Tensor,
        positions: list[int],
        noise: sampling.KeyedNoise,
        key: int,
    ) -> accept.Verdict:
        tree, s = proposal.tree, self.sampling
        greedy = sampling.is_greedy(s.temperature)
        if proposal.rule == "leviathan" and not greedy and tree.parents:
            return self._leviathan(proposal, logits_MV, positions, key)
        choices_M = self._choose(logits_MV, positions, noise)
        if proposal.rule != "select" or not tree.parents:
            return accept.match(tree, choices_M)
        # Self-selection may look at p, never at the coins: at T_v = 0 they are the same arg max.
        assert proposal.paths is not None
        if greedy:
            p_N = accept.node_matches(tree, choices_M)
        else:
            scores = sampling.process_logits(logits_MV, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)
            p_N = accept.node_probabilities(tree, scores)
        branch = accept.select_chain(tree, proposal.paths[accept.self_select(proposal.paths, tree, p_N)])
        verdict = accept.match(branch.tree, choices_M[branch.rows])
        return accept.Verdict([branch.nodes[i] for i in verdict.path], verdict.token)

    def _leviathan(self, proposal: Proposal, logits_MV: Tensor, positions: list[int], key: int) -> accept.Verdict:
        """min(1, p/q) with coins keyed by place, apart from Match's and from the drafter's own draws.

        A place is decided once: what a rejection discards was never consulted, so its coins are still fresh later.
        """
        tree, s = proposal.tree, self.sampling
        assert proposal.q_GV is not None, "the rule needs the q that the chain was drawn from"
        p_MV = sampling.probabilities(logits_MV, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)

        def coin(place: int, stream: int) -> Tensor:
            return sampling.keyed_uniform(1, seed=s.seed, prompt_key=key, position=place, stream=stream)

        uniforms_G = torch.cat([coin(place, ACCEPT_STREAM) for place in positions[1:]]).to(p_MV.device)
        final = float(coin(positions[0], FINAL_STREAM))
        return accept.leviathan(tree.tokens_N, proposal.q_GV, p_MV, uniforms_G=uniforms_G, final_uniform=final)
