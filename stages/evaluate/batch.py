"""Many texts at once, each with its own draft: throughput instead of the shortest wait.

    fill free slots -> { one drafting pass -> one verifier pass over all trees -> judge every text -> commit its path }

Acceptance is ragged: every text keeps the path that it walked. Its tokens are those it gets alone, for its rows see its
own prefix and its own tree, and its coins are keyed by its prompt; shorter trees are padded with rows that nobody sees.
A text that ends gives its slot to the next prompt. The seconds of a turn are split evenly among its texts.

Drafts that read the verifier's cache are made in one pass for all texts, and any other method is asked text by text.
Methods that read the verifier's hidden states, or draft in several passes over its cache, are not built for batches.

Letters: B texts, M rows of a text (pending token and nodes), R rows of a drafting pass, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from kernels import sampling
from kernels.cache import RaggedKVCache
from kernels.tree import ancestors_NN, depths
from kernels.window import decoding_mask
from stages.common.models import Verifier
from stages.evaluate.contract import Cycle, Method, Proposal, Sampling, State, Text
from stages.evaluate.drafting import asked
from stages.evaluate.engine import Clock, Engine
from stages.evaluate.harness import Prompt

MOST_ROWS = 256  # of one text in a pass: room behind its committed rows
NOTHING = torch.empty(0, 0)


@dataclass(kw_only=True)
class _Live:
    index: int
    text: Text
    method: Method
    key: int
    noise: sampling.KeyedNoise


class BatchEngine(Engine):
    """Decodes prompts with a method, up to `slots` of them side by side."""

    def __init__(self, verifier: Verifier, sampling_: Sampling, *, max_new_tokens: int, slots: int) -> None:
        super().__init__(verifier, sampling_, max_new_tokens=max_new_tokens)
        if slots < 1:
            raise ValueError(f"slots is {slots}; decode at least one text at a time")
        self.slots = slots

    @torch.inference_mode()
    def decode_all(self, prompts: Sequence[Prompt], build: Callable[[], Method]) -> list[Text]:
        """The texts in the order of their prompts. build: a method for one text; drafters may be shared."""
        if later := [prompt.id for prompt in prompts if prompt.behind is not None]:
            raise ValueError(f"prompt {later[0]} is a later turn of a chat, which stands behind a text not decoded yet")
        texts = [Text(list(prompt.ids)) for prompt in prompts]
        waiting = deque(range(len(texts)))
        longest = max((len(text.prompt_ids) + max(0, self._room(text)) for text in texts), default=0)
        cache = RaggedKVCache(layers=self.verifier.num_layers, slots=self.slots, capacity=longest + MOST_ROWS)
        live: list[_Live] = []  # live[i] is in slot i
        while waiting or live:
            while waiting and len(live) < self.slots:
                index = waiting.popleft()
                if self._room(texts[index]) < 1:
                    texts[index].finish_reason = "length"
                    continue
                live.append(self._enter(cache, len(live), index, texts[index], prompts[index].id, build()))
                self._leave(live, cache)
            if live:
                self._turn(live, cache)
                self._leave(live, cache)
        return texts

    def _enter(self, cache: RaggedKVCache, slot: int, index: int, text: Text, prompt_id: str, method: Method) -> _Live:
        """Prefill a slot; the text's first token."""
        if method.reads:
            raise ValueError(f"{type(method).__name__} reads the verifier's hidden states, which batches do not keep")
        clock, key = Clock(self.verifier.device), sampling.prompt_key(prompt_id)
        cache.lengths[slot] = 0
        hidden_D = torch.empty(0)
        for start in range(0, len(text.prompt_ids), MOST_ROWS):
            part = text.prompt_ids[start : start + MOST_ROWS]
            positions, sees = cache.open(slot, slot + 1, new=len(part), device=self.verifier.device)
            hidden_D = self.verifier(torch.tensor([part], device=self.verifier.device), positions, sees, cache)[0, -1]
            cache.commit([len(part)])
        noise = self._noise(key)
        first = self._choose(self.verifier.logits(hidden_D[None]), [len(text.prompt_ids)], noise)
        method.start(text.prompt_ids, NOTHING)
        text.output_ids.append(int(first))
        text.prefill_s = clock.lap()
        text.finish_reason = self._stop(text)
        return _Live(index=index, text=text, method=method, key=key, noise=noise)

    def _leave(self, live: list[_Live], cache: RaggedKVCache) -> None:
        """Take finished texts out; the last one moves into the gap."""
        for slot in reversed(range(len(live))):
            if live[slot].text.finish_reason:
                cache.copy(len(live) - 1, slot)
                live[slot] = live[-1]
                live.pop()

    def _turn(self, live: list[_Live], cache: RaggedKVCache) -> None:
        """One cycle of every live text."""
        clock = Clock(self.verifier.device)
        states = [
            State(
                text.prompt_ids + text.output_ids, self._room(text) - 1, one.key, self.sampling, _no_lending, _no_states
            )
            for one in live
            for text in [one.text]
        ]
        proposals = [
            one.method.propose(state) for one, state in zip(live, self._drafted(live, states, cache), strict=True)
        ]
        draft_s = clock.lap()
        depth = [[0, *depths(proposal.tree.parents)] for proposal in proposals]
        logits = self._verify([state.ids[-1] for state in states], proposals, depth, cache)
        verify_s = clock.lap()
        kept: list[list[int]] = []
        turns: list[tuple[list[int], int]] = []
        for one, state, proposal, places, logits_MV in zip(live, states, proposals, depth, logits, strict=True):
            assert max(places) <= state.max_depth, "a draft beyond the limit"
            verdict = self._judge(proposal, logits_MV, [len(state.ids) + d for d in places], one.noise, one.key)
            emitted = self._emit(one.text, [*proposal.tree.tokens_N[verdict.path].tolist(), verdict.token])
            kept.append([0, *(node + 1 for node in verdict.path)][: len(emitted)])
            turns.append((emitted, len(verdict.path)))
        cache.keep(kept)
        shares = [seconds / len(live) for seconds in (draft_s, verify_s, clock.lap())]
        for one, (emitted, accepted), places in zip(live, turns, depth, strict=True):
            one.text.cycles.append(
                Cycle(
                    tokens=emitted,
                    accepted=accepted,
                    proposed=max(places),
                    nodes=len(places) - 1,
                    draft_s=shares[0],
                    verify_s=shares[1],
                    other_s=shares[2],
                    stop=self._stop(one.text),
                )
            )

    def _emit(self, text: Text, tokens: list[int]) -> list[int]:
        """Append tokens up to a stop; those that were appended."""
        for count, token in enumerate(tokens, 1):
            text.output_ids.append(token)
            text.finish_reason = self._stop(text)
            if text.finish_reason:
                return tokens[:count]
        return tokens

    def _drafted(self, live: list[_Live], states: list[State], cache: RaggedKVCache) -> list[State]:
        """The states, with the scores of the windows that were asked for: one pass of their drafter for all texts."""
        asks = [asked(one.method, state) for one, state in zip(live, states, strict=True)]
        drafter = next((ask.drafter for ask in asks if ask is not None), None)
        if drafter is None:
            return states
        windows = [0 if ask is None else ask.window for ask in asks]
        rows, device = max(windows), self.verifier.device
        ids_BR = torch.full((len(live), rows), drafter.mask_id, device=device)
        ids_BR[:, 0] = torch.tensor([state.ids[-1] for state in states], device=device)
        sees_BRR = torch.eye(rows, dtype=torch.bool, device=device).repeat(len(live), 1, 1)
        for text, window in enumerate(windows):
            if window:
                mask = decoding_mask(cached=0, new=1, window_rows=window - 1, device=device)
                sees_BRR[text, :window, :window] = mask
        depth_BR = torch.arange(rows, device=device).repeat(len(live), 1)
        # A row that is beyond a text's window is padding, and must not be beyond the positions either.
        depth_BR = depth_BR.minimum(torch.tensor(windows, device=device).sub(1).clamp(min=0)[:, None])
        positions, sees = cache.open_trees(0, len(live), depth_BR, sees_BRR, layers=drafter.layers)
        hidden_BRD = drafter(ids_BR, positions, sees, cache)
        return [
            state._replace(drafted=drafter.logits(hidden_BRD[text, :window])) if window else state
            for text, (state, window) in enumerate(zip(states, windows, strict=True))
        ]

    def _verify(
        self, roots: list[int], proposals: list[Proposal], depth: list[list[int]], cache: RaggedKVCache
    ) -> tuple[Tensor, ...]:
        """Of each text the scores [M, V] behind its pending token and its nodes, from one pass over all of them."""
        device, counts = self.verifier.device, [len(places) for places in depth]
        most = max(counts)
        assert most <= MOST_ROWS, (most, MOST_ROWS)
        ids_BM = torch.zeros(len(roots), most, dtype=torch.long)
        depth_BM = torch.zeros(len(roots), most, dtype=torch.long)
        sees_BMM = torch.eye(most, dtype=torch.bool).repeat(len(roots), 1, 1)
        for text, (root, proposal, places) in enumerate(zip(roots, proposals, depth, strict=True)):
            rows = len(places)
            ids_BM[text, :rows] = torch.cat([torch.tensor([root]), proposal.tree.tokens_N.cpu()])
            depth_BM[text, :rows] = torch.tensor(places)
            sees_BMM[text, :rows, 0] = True
            if rows > 1:
                sees_BMM[text, 1:rows, 1:rows] = ancestors_NN(proposal.tree).cpu()
        positions, sees = cache.open_trees(0, len(roots), depth_BM.to(device), sees_BMM.to(device))
        hidden_BMD = self.verifier(ids_BM.to(device), positions, sees, cache)
        real_BM = torch.arange(most) < torch.tensor(counts)[:, None]
        return self.verifier.logits(hidden_BMD[real_BM.to(device)]).split(counts)


def _no_lending(_: Sequence[int]) -> NoReturn:
    raise ValueError("this method drafts in several passes over the verifier's cache, which batches do not lend")


def _no_states() -> Tensor:
    return NOTHING
