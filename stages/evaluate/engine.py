"""The decoding loop: one engine for every method, vanilla included (METHOD.md section 2).

    prefill -> { propose -> one verifier pass with the pending token as root -> accept -> commit } until a stop

The verifier's cache holds every emitted token but the last, the *pending* one. A pass scores it and every node of the
proposal under a tree mask, so no second pass is ever needed; vanilla is the proposal without nodes. A method never
touches the verifier or the clock; of the cache it may read the committed rows, and use the room behind them; hidden
states of the committed rows it gets if it asks. Row i of a pass speaks for the token behind row i: row 0 is the pending
token's.

Letters: N nodes, M rows of a pass, V vocabulary, G window, D width.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from kernels import accept, multi_draft, sampling
from kernels.cache import KVCache, LentCache
from kernels.spread import Mirror
from kernels.tree import Tree, ancestors_NN, depths
from stages.common.features import Taps
from stages.common.models import Verifier
from stages.evaluate.contract import ACCEPT_STREAM, EMPTY, FINAL_STREAM, Cycle, Method, Proposal, Sampling, State, Text


class Clock:
    """Splits wall time into laps; waits for the devices before every reading."""

    def __init__(self, *devices: torch.device) -> None:
        self._cuda = [device for device in devices if device.type == "cuda"]
        self.last = self._now()

    def _now(self) -> float:
        for device in self._cuda:
            torch.cuda.synchronize(device)
        return perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds


class Engine:
    """Decodes one prompt at a time with any method and one sampling setting.

    drafter_device: where the method's drafter lives, if not beside the verifier. Then the rows of the verifier's cache
    that it reads and the proposals that it makes are moved; `moved_bytes` counts them, and they are part of `draft_s`.
    """

    def __init__(
        self,
        verifier: Verifier,
        sampling_: Sampling,
        *,
        max_new_tokens: int,
        drafter_device: torch.device | None = None,
    ) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; write 0 or more")
        self.verifier = verifier
        self.sampling = sampling_
        self.max_new_tokens = max_new_tokens
        self.cache: KVCache = verifier.new_cache(64)
        self.drafter_device, self.moved_bytes = drafter_device, 0
        self._mirror: Mirror | None = None
        self._devices = [*verifier.devices, *([drafter_device] if drafter_device else [])]

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
        taps = Taps(self.verifier.body if method.reads else None, method.reads, self.verifier.device)
        try:
            clock = Clock(*self._devices)
            first = self._prefill(text.prompt_ids, noise)
            taps.keep()
            method.start(text.prompt_ids, taps.rows())
            text.output_ids.append(first)
            text.prefill_s = clock.lap()
            text.finish_reason = self._stop(text)
            yield [first]
            while not text.finish_reason:
                cycle = self._cycle(text, method, key, noise, taps)
                text.cycles.append(cycle)
                text.finish_reason = cycle.stop
                yield cycle.tokens
        finally:
            taps.close()

    @torch.inference_mode()
    def vanilla_steps(self, text: Text, count: int, *, prompt_id: str) -> list[float]:
        """Decode the last `count` committed tokens again, one at a time: seconds of each step, the paired yardstick.

        Leaves the cache as long as it was. Between two cycles of `stream`, or after its last.
        """
        noise = self._noise(sampling.prompt_key(prompt_id))
        committed = self.cache.length - len(text.prompt_ids)
        assert 0 <= count <= committed, (count, committed)
        self.cache.roll_back(self.cache.length - count)
        clock, laps = Clock(*self._devices), []
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
        if self._mirror is not None:
            self.moved_bytes += self._mirror.catch_up()
        return int(self._choose(self.verifier.logits(hidden_D[None]), [len(prompt_ids)], noise))

    def _cycle(self, text: Text, method: Method, key: int, noise: sampling.KeyedNoise, taps: Taps) -> Cycle:
        clock = Clock(*self._devices)
        taps.drop()  # the passes of a yardstick
        ids = text.prompt_ids + text.output_ids
        state = State(ids, self._room(text) - 1, key, self.sampling, self._lend, taps.rows)
        other = clock.lap()
        proposal = self._brought(method.propose(state))
        draft_s = clock.lap()
        tree, depth_N = proposal.tree, depths(proposal.tree.parents)
        assert max(depth_N, default=0) <= state.max_depth, "a draft beyond the limit"
        assert self.cache.length == len(ids) - 1, "the cache holds every token but the pending one"
        other += clock.lap()
        logits_MV = self.verify(ids[-1], tree)
        verify_s = clock.lap()
        verdict = self._judge(proposal, logits_MV, [len(ids) + d for d in (0, *depth_N)], noise, key)
        kept = [0, *(node + 1 for node in verdict.path)]
        self.cache.keep(kept)
        taps.keep(kept)
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

    def _lend(self, layers: Sequence[int]) -> LentCache:
        """The committed rows of these layers, where the drafter is."""
        if self.drafter_device is None:
            return self.cache.lend(layers)
        if self._mirror is None or self._mirror.sources != tuple(layers):
            self._mirror, self.cache.unread = Mirror(self.cache, layers, self.drafter_device), 0
        self.moved_bytes += self._mirror.catch_up()
        return self._mirror.lend(range(len(layers)))

    def _brought(self, proposal: Proposal) -> Proposal:
        """A proposal where the verifier is."""
        if self.drafter_device is None:
            return proposal
        tokens_N, q_GV = proposal.tree.tokens_N, proposal.q_GV
        self.moved_bytes += tokens_N.nbytes + (0 if q_GV is None else q_GV.nbytes)
        tree = proposal.tree._replace(tokens_N=tokens_N.to(self.verifier.device))
        return proposal._replace(tree=tree, q_GV=None if q_GV is None else q_GV.to(self.verifier.device))

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
        if proposal.rule in ("leviathan", "recursive", "k_seq") and not greedy and tree.parents:
            return self._judge_with_q(proposal, logits_MV, positions, key)
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

    def _judge_with_q(self, proposal: Proposal, logits_MV: Tensor, positions: list[int], key: int) -> accept.Verdict:
        """Leviathan, or its kin for K drafts; coins keyed by place, apart from Match's and from the drafter's draws.

        A place is decided once: what a rejection discards was never consulted, so its coins are still fresh later. A
        place has a coin for each draft.
        """
        tree, s, q_GV = proposal.tree, self.sampling, proposal.q_GV
        paths = [list(range(len(tree.parents)))] if proposal.rule == "leviathan" else proposal.paths
        assert q_GV is not None, "the rule needs the q that the drafts were drawn from"
        assert paths, "the rule needs every draft, in drawn order"

        def p_at(rows: int | slice) -> Tensor:
            return sampling.probabilities(logits_MV[rows], temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)

        def coins(place: int, stream: int) -> Tensor:
            return sampling.keyed_uniform(len(paths), seed=s.seed, prompt_key=key, position=place, stream=stream)

        uniforms_GK = torch.stack([coins(positions[0] + depth, ACCEPT_STREAM) for depth in range(1, len(q_GV) + 1)])
        final = float(coins(positions[0], FINAL_STREAM)[0])
        if proposal.rule == "leviathan":
            chain_G = uniforms_GK[:, 0].to(logits_MV.device)
            return accept.leviathan(tree.tokens_N, q_GV, p_at(slice(None)), uniforms_G=chain_G, final_uniform=final)
        rule = multi_draft.recursive if proposal.rule == "recursive" else multi_draft.k_seq
        return multi_draft.multi_draft(tree, paths, q_GV, p_at, rule=rule, uniforms_GK=uniforms_GK, final_uniform=final)
