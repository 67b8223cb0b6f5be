"""Fixtures of the engine's tests: tiny models, and methods, verifiers and drafters whose behaviour is written down.

`Scripted` knows vanilla's text and proposes drafts that are right for exactly as many tokens as it is told, so every
length of acceptance can be had at every place. `TableVerifier` and `TableDrafter` are laws over a handful of tokens,
quick enough to count thousands of texts. Numbers from any of them mean nothing.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from time import sleep

import torch
from torch import Tensor, nn

from kernels.cache import KVCache
from kernels.tree import Tree
from stages.common.drafters import Drafter, Prefix, prune
from stages.common.models import Verifier
from stages.common.tiny import VOCABULARY, build_tiny
from stages.evaluate.contract import EMPTY, Proposal, Sampling, State
from stages.evaluate.engine import Engine
from stages.evaluate.methods.vanilla import Vanilla

KINDS = [(kind, tied) for kind in ("llama", "qwen2", "gemma") for tied in (True, False)]
FURTHER = ("qwen3", "mistral", "gemma3")  # families with a test or two each; the last two slide


@lru_cache
def causal_lm(kind="llama", tied=True, *, seed=1, copy=0, **sizes):
    """A frozen tiny model. Another `copy` has equal weights of its own and keeps transformers' attention."""
    with torch.inference_mode(False):  # whoever asks first: what is trained over it needs ordinary tensors
        return build_tiny(kind, seed=seed, tied=tied, **sizes).requires_grad_(False)


def tiny_verifier(kind="llama", tied=True, *, end_ids=(), **sizes) -> Verifier:
    return Verifier(causal_lm(kind, tied, **sizes), vocab_size=VOCABULARY, end_ids=end_ids).eval()


def cached(verifier: Verifier, ids: Sequence[int]) -> KVCache:
    """What the verifier has cached when the last of `ids` is pending, read a few tokens a pass."""
    cache = verifier.new_cache(1)
    if len(ids) > 1:
        verifier.prefill(ids[:-1], cache, chunk=5)
    return cache


def cached_rows(verifier: Verifier, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[L, 2, H, T, D] of it in these layers: what a text's context holds."""
    cache = cached(verifier, ids)
    assert cache.kv_L2BHCD is not None
    return cache.kv_L2BHCD[list(layers), :, 0, :, : cache.length]


@torch.no_grad()
def full_logits(ids: Sequence[int], kind="llama", tied=True, **sizes) -> Tensor:
    """transformers' own scores [V] behind the last of `ids`, from one pass without a cache."""
    return causal_lm(kind, tied, copy=1, **sizes)(torch.tensor([list(ids)])).logits[0, -1, :VOCABULARY]


def tiny_drafter(
    kind="llama", tied=True, *, layers=(0, 1), words=range(VOCABULARY), prefix: Prefix = "own", **sizes
) -> Drafter:
    """The verifier itself as drafter unless some layers or words are left out."""
    drafter = prune(
        causal_lm(kind, tied, copy=2, **sizes),
        layers=list(layers),
        d2t=torch.tensor(list(words)),
        vocab_size=VOCABULARY,
        prefix=prefix,
    )
    return drafter.eval().requires_grad_(False)


DAMAGES = ("cut", "header", "empty", "absent", "of another text")


def spoil(folder: Path, damage: str) -> None:
    """Damage 1.safetensors of a folder of shards, in one of the ways of DAMAGES."""
    path = folder / "1.safetensors"
    whole = path.read_bytes()
    if damage == "absent":
        path.unlink()
    elif damage == "of another text":
        path.write_bytes((folder / "0.safetensors").read_bytes())
    else:
        path.write_bytes(whole[: {"cut": len(whole) - 1, "header": 40, "empty": 0}[damage]])


def engine_of(verifier, *, temperature=0.0, limit=16, seed=3, top_k=0, top_p=1.0) -> Engine:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return Engine(verifier, sampling, max_new_tokens=limit)


def prompt_of(length: int, *, seed=0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def vanilla_text(verifier, prompt, *, prompt_id="p", **settings) -> list[int]:
    return engine_of(verifier, **settings).decode(prompt, Vanilla(), prompt_id=prompt_id).output_ids


class Scripted:
    """A chain of up to `gamma` tokens of which the first right(cycle) are vanilla's and the next is not.

    With siblings every depth also holds a wrong token, which stands before the right one and whose child repeats
    what would be right behind it: a walk that strays, or rows kept in node order, shows.
    """

    reads = ()

    def __init__(self, answer: Sequence[int], *, gamma: int, right: Callable[[int], int], siblings=False) -> None:
        self.answer, self.gamma, self.right, self.siblings = answer, gamma, right, siblings
        self.cycle, self.prompt_length = 0, 0

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        self.cycle, self.prompt_length = 0, len(prompt_ids)

    def propose(self, state: State) -> Proposal:
        window = min(self.gamma, state.max_depth)
        wanted = self.right(self.cycle)
        self.cycle += 1
        if window < 1:
            return Proposal(EMPTY)
        place = len(state.ids) - self.prompt_length
        coming = [*self.answer[place : place + window], *[0] * window][: window + 1]
        tokens, parents, parent = [], [], -1
        for depth in range(window):
            right = coming[depth]
            if self.siblings:
                wrong = len(tokens)
                tokens += [_other(right, 1), coming[depth + 1]][: 1 + (depth + 1 < window)]
                parents += [parent, wrong][: 1 + (depth + 1 < window)]
            tokens.append(right if depth < wanted else _other(right, 2))
            parents.append(parent)
            parent = len(tokens) - 1
        return Proposal(Tree(torch.tensor(tokens), parents))


def _other(token: int, step: int) -> int:
    return 3 + (token + step) % (VOCABULARY - 3)


def always(count: int) -> Callable[[int], int]:
    return lambda cycle: count


class Sleepy:
    """Another method, with pauses where it starts and where it proposes."""

    def __init__(self, inner, *, start_s=0.0, propose_s=0.0) -> None:
        self.inner, self.start_s, self.propose_s, self.reads = inner, start_s, propose_s, inner.reads

    def start(self, prompt_ids: Sequence[int], features_TC: Tensor) -> None:
        sleep(self.start_s)
        self.inner.start(prompt_ids, features_TC)

    def propose(self, state: State) -> Proposal:
        sleep(self.propose_s)
        return self.inner.propose(state)


class TableVerifier:
    """p(next | token) from a table of scores [V, V], as the engine wants a verifier."""

    context_limit, end_ids, device, devices = 10_000, frozenset[int](), torch.device("cpu"), (torch.device("cpu"),)

    def __init__(self, scores_VV: Tensor, *, pause_s=0.0) -> None:
        self.scores_VV, self.vocab_size, self.pause_s = scores_VV, len(scores_VV), pause_s

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, capacity=capacity)

    def __call__(self, ids_BN: Tensor, positions_BN: Tensor, sees: Tensor, cache: KVCache) -> Tensor:
        sleep(self.pause_s)
        rows = torch.zeros(1, 1, ids_BN.shape[1], 1)
        cache.update(rows, rows, 0)
        return self.scores_VV[ids_BN]

    def prefill(self, ids: Sequence[int], cache: KVCache) -> Tensor:
        hidden = self(torch.tensor([list(ids)]), torch.empty(0), torch.empty(0), cache)
        cache.keep(list(range(len(ids))))
        return hidden[0, -1]

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return hidden_XD


class TableDrafter(nn.Module):
    """Marginals q_1 .. q_G behind a token from a table of scores [V, G, V_d], as a method wants a drafter."""

    context_limit, prefix, tokenizer = 10_000, "own", "verifier"

    def __init__(self, scores_VGV: Tensor, d2t: Tensor) -> None:
        super().__init__()
        self.scores_VGV, self.d2t, self.vocab_size = scores_VGV, d2t, len(scores_VGV)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, capacity=capacity)

    def extend(self, new: Sequence[int], cache: KVCache) -> None:
        cache.length += len(new)

    def draft(self, new: Sequence[int], window: int, cache: KVCache) -> Tensor:
        self.extend(new, cache)
        return self.scores_VGV[new[-1], :window]
