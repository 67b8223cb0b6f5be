"""Exact laws of emitted tokens, by calling the production rules under every coin they read.

A law is a dict from a tuple of tokens to its probability. Everything is float64; a scheme is lossless when
its law over the next tokens is the verifier's, to rounding.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernels.accept import Verdict, leviathan, match
from kernels.tree import Tree, depths

Law = dict[tuple[int, ...], float]


class Verifier:
    """Random next-token laws, one for each prefix: a law that forgets its context hides joint errors."""

    def __init__(self, vocab: int, seed: int, *, sharpness: float = 1.5):
        self.vocab, self.sharpness = vocab, sharpness
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._rows:
            logits_V = self.sharpness * torch.randn(self.vocab, generator=self._generator, dtype=torch.float64)
            self._rows[prefix] = logits_V.softmax(0)
        return self._rows[prefix]


class Constant(Verifier):
    """The same law after every prefix."""

    def __init__(self, *law: float):
        super().__init__(len(law), seed=0)
        self._law_V = torch.tensor(law, dtype=torch.float64)

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        return self._law_V


def random_q(window: int, vocab: int, seed: int, *, support: int = 0) -> Tensor:
    """Marginals [G, V], float64; only `support` ids of each row have mass if it is given."""
    generator = torch.Generator().manual_seed(seed)
    logits_GV = torch.randn(window, vocab, generator=generator, dtype=torch.float64)
    if support:
        low_GX = torch.rand(window, vocab, generator=generator).argsort(-1)[:, support:]
        logits_GV.scatter_(-1, low_GX, -torch.inf)
    return logits_GV.softmax(-1)


def drafts_of(q_GV: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every draft with its probability under product-form marginals."""
    for draft in itertools.product(range(q_GV.shape[1]), repeat=q_GV.shape[0]):
        weight = 1.0
        for row, token in zip(q_GV.tolist(), draft, strict=True):
            weight *= row[token]
        if weight > 0:
            yield draft, weight


def add(law: Law, tokens: Sequence[int], weight: float) -> None:
    law[tuple(tokens)] = law.get(tuple(tokens), 0.0) + weight


def mix(laws: Iterator[tuple[Law, float]]) -> Law:
    mixture: Law = {}
    for law, weight in laws:
        for tokens, probability in law.items():
            add(mixture, tokens, weight * probability)
    return mixture


def vanilla(verifier: Verifier, prefix: tuple[int, ...], count: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(count):
        law = {
            (*tokens, token): weight * value
            for tokens, weight in law.items()
            for token, value in enumerate(verifier((*prefix, *tokens)).tolist())
        }
    return law


def after(cycle: Callable[[tuple[int, ...]], Law], verifier: Verifier, *, count: int, cycles: int) -> Law:
    """Law of the first `count` tokens of so many cycles; what is still missing comes from the verifier."""

    def go(prefix: tuple[int, ...], left: int) -> Law:
        if len(prefix) >= count:
            return {prefix[:count]: 1.0}
        if left == 0:
            return {(*prefix, *rest): w for rest, w in vanilla(verifier, prefix, count - len(prefix)).items()}
        return mix((go((*prefix, *emitted), left - 1), w) for emitted, w in cycle(prefix).items())

    return go((), cycles)


def total_variation(one: Law, two: Law) -> float:
    return 0.5 * sum(abs(one.get(tokens, 0.0) - two.get(tokens, 0.0)) for tokens in one.keys() | two.keys())


def first_token(law: Law, vocab: int) -> list[float]:
    return [sum(w for tokens, w in law.items() if tokens[0] == token) for token in range(vocab)]


def row_contexts(tree: Tree, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The context each row of a tree's tables speaks for."""
    contexts = [prefix]
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        contexts.append((*contexts[parent + 1], token))
    return contexts


def p_rows(tree: Tree, verifier: Verifier, prefix: tuple[int, ...]) -> Tensor:
    return torch.stack([verifier(context) for context in row_contexts(tree, prefix)])


class _NeedsCoin(Exception):
    def __init__(self, row: int):
        self.row = row


class _Coins(Sequence):
    """Coins known so far; asking for another one starts a branch for each of its values."""

    def __init__(self, known: dict[int, int], count: int):
        self.known, self.count = known, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row):
        if row not in self.known:
            raise _NeedsCoin(row)
        return self.known[row]


def walk(rule: Callable[[Sequence[int]], Verdict], p_MV: Tensor) -> Iterator[tuple[Verdict, float]]:
    """Every verdict of a rule that reads one coin y ~ p a row, with its probability."""
    rows = p_MV.tolist()
    stack: list[tuple[dict[int, int], float]] = [({}, 1.0)]
    while stack:
        known, weight = stack.pop()
        try:
            yield rule(_Coins(known, len(rows))), weight
        except _NeedsCoin as needed:
            stack += [
                ({**known, needed.row: y}, weight * value) for y, value in enumerate(rows[needed.row]) if value > 0
            ]


def match_law(tree: Tree, verifier: Verifier, prefix: tuple[int, ...]) -> Law:
    tokens = tree.tokens_N.tolist()
    law: Law = {}
    for verdict, weight in walk(lambda coins: match(tree, coins), p_rows(tree, verifier, prefix)):
        add(law, [*(tokens[node] for node in verdict.path), verdict.token], weight)
    return law


def cells(breakpoints: Sequence[float]) -> list[tuple[float, float]]:
    """(midpoint, width) of the intervals that the breakpoints cut (0, 1) into."""
    edges = sorted({0.0, 1.0, *(b for b in breakpoints if 0 < b < 1)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]


def leviathan_law(draft: tuple[int, ...], q_GV: Tensor, p_MV: Tensor) -> Law:
    """Integrates the production rule over its uniforms: constant between the edges p/q and the CDFs'."""
    tokens_G = torch.tensor(draft)
    ratios = [float(p_MV[i, x] / q_GV[i, x]) for i, x in enumerate(draft)]
    finals = [p_MV[-1]]
    for i in range(len(draft)):
        left_V = (p_MV[i] - q_GV[i]).clamp(min=0)
        finals.append(left_V / left_V.sum() if left_V.sum() > 1e-12 else p_MV[i])
    final_cells = cells([edge for final_V in finals for edge in final_V.cumsum(0).tolist()])
    law: Law = {}
    for uniforms in itertools.product(*(cells([ratio]) for ratio in ratios)):
        middles = torch.tensor([middle for middle, _ in uniforms], dtype=torch.float64)
        weight = 1.0
        for _, width in uniforms:
            weight *= width
        for final, width in final_cells:
            verdict = leviathan(tokens_G, q_GV, p_MV, uniforms_G=middles, final_uniform=final)
            add(law, [*(draft[node] for node in verdict.path), verdict.token], weight * width)
    return law


def expected_accepted(tree: Tree, p_MV: Tensor) -> float:
    """E[L] of Match by enumeration."""
    depth = [0, *depths(tree.parents)]
    return sum(
        weight * depth[verdict.path[-1] + 1 if verdict.path else 0]
        for verdict, weight in walk(lambda coins: match(tree, coins), p_MV)
    )
