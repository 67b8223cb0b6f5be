"""Triton twin of kernels/walk.py, for CUDA: the coins of all rows and the walk of Match in three launches.

    depths   parents followed upwards, all rows side by side
    coins    a program a tile of words and a position: its noise is hashed once, and added to every row of that depth
    walk     one program: the best of each row's tiles, the checks, and from the root the child that carries the coin

Hash and uniforms are kernels.sampling's, integer for integer. Logarithms and the division by T may differ from torch's
in their last place, so where the two best noisy scores are that close the coin may be the other one: one text, and the
vanilla that it is compared with, must take all of their coins here or none. Ties, NaN and bad trees are as there.

Shapes: N nodes, M = N + 1 rows, V vocabulary, P positions (depths 0 .. max_depth), S tiles of words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coins import gumbel_keys
from kernels.sampling import _GOLDEN, _MIX_1, _MIX_2, KeyedNoise, is_greedy, process_logits
from kernels.walk import _BAD_LOGITS, _BAD_TREE

CHUNK = 1024  # words of a tile: a power of two; changes time, never the coins
TABLE = 8192  # numbers of [M, S] that the walk reads at a time

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(word) for word in (_GOLDEN, _MIX_1, _MIX_2))
BAD_LOGITS, BAD_TREE = tl.constexpr(_BAD_LOGITS), tl.constexpr(_BAD_TREE)


def match_walk(
    logits_MV: Tensor,
    tokens_N: Tensor,
    parents_N: Tensor,
    noise: KeyedNoise,
    *,
    position: int,
    max_depth: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """As kernels.walk.match_walk, for `kernels.walk.read`; top-k and top-p fall back to process_logits here too."""
    (num_rows, vocab), device = logits_MV.shape, logits_MV.device
    assert (num_rows, vocab) == (len(tokens_N) + 1, noise.vocab), (logits_MV.shape, len(tokens_N), noise.vocab)
    assert tokens_N.shape == parents_N.shape, (tokens_N.shape, parents_N.shape)
    assert tokens_N.dtype == parents_N.dtype == torch.int64, (tokens_N.dtype, parents_N.dtype)
    assert logits_MV.dtype != torch.float64, "rows are read as float32"
    if chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}: a tile of the fused walk takes a power of two")
    if not is_greedy(temperature) and (0 < top_k < vocab or top_p < 1.0):
        logits_MV = process_logits(logits_MV, temperature=temperature, top_k=top_k, top_p=top_p)
        temperature = 1.0  # x / 1 is x
    if logits_MV.stride(1) != 1:
        logits_MV = logits_MV.contiguous()
    assert num_rows * logits_MV.stride(0) < 2**31, "places of logits are int32"
    tokens_N, parents_N = tokens_N.contiguous(), parents_N.contiguous()
    tiles, rows = triton.cdiv(vocab, chunk), triton.next_power_of_2(num_rows)
    greedy = is_greedy(temperature)
    # Greedy coins ask for no noise, so that one "position" serves all depths.
    keys_P = gumbel_keys(noise, position=position, count=1 if greedy else max_depth + 1, device=device)
    depth_M = torch.empty(num_rows, dtype=torch.int32, device=device)
    best_MS, top_MS = (torch.empty(num_rows, tiles, device=device) for _ in range(2))
    ids_MS = torch.empty(num_rows, tiles, dtype=torch.int32, device=device)
    result = torch.empty(3 + max_depth, dtype=torch.int64, device=device)
    _depths[(1,)](  # pyright: ignore[reportIndexIssue]
        parents_N, depth_M, num_rows, max_depth, ROWS=rows
    )
    _coins[(tiles, len(keys_P))](  # pyright: ignore[reportIndexIssue]
        *(logits_MV, keys_P, depth_M, best_MS, ids_MS, top_MS),
        *(num_rows, vocab, logits_MV.stride(0), tiles, temperature),
        GREEDY=greedy, WORDS=chunk,
    )  # fmt: skip
    _walk[(1,)](  # pyright: ignore[reportIndexIssue]
        *(best_MS, ids_MS, top_MS, tokens_N, parents_N, depth_M, result),
        *(num_rows, tiles, max_depth),
        ROWS=rows, TILES=min(triton.next_power_of_2(tiles), max(1, TABLE // rows)),
    )  # fmt: skip
    return result


@triton.jit
def keyed_bits(key, word):
    """64 bits of a word under a key: kernels.sampling's SplitMix64; key and result uint64."""
    z = key + (word.to(tl.uint64) + 1) * GOLDEN
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def gumbel(bits):
    """-log(-log1p(-v)), v = (upper 32 bits + 1/2) / 2^32.

    1 - v rounds, and for a small v its logarithm is mostly the rounding; v / (1 - (1 - v)) takes that out again.
    """
    v = tl.minimum(((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    rest = 1.0 - v
    lost = 1.0 - rest
    log1p = tl.where(lost == 0.0, -v, tl.log(rest) * (v / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(-log1p)


@triton.jit
def _depths(parents, depth, num_rows, max_depth, ROWS: tl.constexpr):
    """A row deeper than max_depth gets max_depth + 1."""
    row = tl.arange(0, ROWS)
    at = tl.where(row < num_rows, row, 0).to(tl.int64)
    steps = tl.zeros([ROWS], dtype=tl.int32)
    for _ in range(max_depth + 1):
        below = at > 0
        steps += below.to(tl.int32)
        at = tl.load(parents + at - 1, mask=below, other=-1) + 1
    tl.store(depth + row, steps, mask=row < num_rows)


@triton.jit
def _coins(
    logits, keys, depth, best, ids, top, num_rows, vocab, stride, tiles, temperature,
    GREEDY: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Of one tile, for the rows of one depth: the best noisy score, its lowest id, and the largest raw logit."""
    tile, place = tl.program_id(0), tl.program_id(1)
    word = tile * WORDS + tl.arange(0, WORDS)
    inside = word < vocab
    noise = tl.zeros([WORDS], dtype=tl.float32)
    if not GREEDY:
        noise = gumbel(keyed_bits(tl.load(keys + place).to(tl.uint64, bitcast=True), word))
    for row in range(num_rows):
        if GREEDY or tl.load(depth + row) == place:
            raw = tl.load(logits + row * stride + word, mask=inside, other=float("-inf")).to(tl.float32)
            raw = tl.where(raw != raw, float("inf"), raw)  # a maximum may pass over a NaN, never over an infinity
            score = raw
            if not GREEDY:
                score = tl.where(inside, raw / temperature + noise, float("-inf"))
            high = tl.max(score, 0)
            to = row * tiles + tile
            tl.store(best + to, high)
            tl.store(ids + to, tl.min(tl.where(score == high, word, vocab), 0))
            tl.store(top + to, tl.max(raw, 0))


@triton.jit
def _walk(
    best, ids, top, tokens, parents, depth, result, num_rows, tiles, max_depth, ROWS: tl.constexpr, TILES: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, TILES)
    is_row, is_node = row < num_rows, (row > 0) & (row < num_rows)
    token = tl.load(tokens + row - 1, mask=is_node, other=-1)
    above = tl.load(parents + row - 1, mask=is_node, other=-2) + 1
    level = tl.load(depth + row, mask=is_row, other=0)

    high, high_top = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    coin = tl.zeros([ROWS], dtype=tl.int64)
    for start in range(0, tiles, TILES):
        at = row[:, None] * tiles + start + column[None, :]
        there = is_row[:, None] & (start + column < tiles)[None, :]
        score = tl.load(best + at, mask=there, other=float("-inf"))
        first = tl.load(ids + at, mask=there, other=2147483647)
        part = tl.max(score, 1)
        here = tl.min(tl.where(score == part[:, None], first, 2147483647), 1)
        coin = tl.where(part > high, here.to(tl.int64), coin)  # strictly: of equals the lowest id stays
        high = tl.maximum(high, part)
        high_top = tl.maximum(high_top, tl.max(tl.load(top + at, mask=there, other=float("-inf")), 1))

    # A row that lies too deep has no coin: its tree is refused, its logits were not looked at.
    bad_row = is_row & (level <= max_depth) & ((high_top == float("inf")) | (high_top == float("-inf")))
    bad_node = is_node & ((above < 0) | (above >= row) | (level > max_depth))
    for other in range(1, num_rows):
        twin = (above == tl.load(parents + other - 1) + 1) & (token == tl.load(tokens + other - 1))
        bad_node = bad_node | (is_node & twin & (row > other))
    bad_logits, bad_tree = tl.max(bad_row.to(tl.int32), 0), tl.max(bad_node.to(tl.int32), 0)
    tl.store(result, tl.where(bad_logits > 0, BAD_LOGITS, tl.where(bad_tree > 0, BAD_TREE, 0)).to(tl.int64))

    now, accepted = tl.min(row, 0), tl.min(row, 0)
    for step in range(max_depth):
        said = tl.sum(tl.where(row == now, coin, 0), 0)
        child = tl.min(tl.where(is_node & (above == now) & (token == said), row, ROWS), 0)
        found = child < ROWS
        now = tl.where(found, child, now)  # a walk that has ended finds nothing again
        accepted += found.to(tl.int32)
        tl.store(result + 3 + step, tl.where(found, child - 1, -1).to(tl.int64))
    tl.store(result + 1, accepted.to(tl.int64))
    tl.store(result + 2, tl.sum(tl.where(row == now, coin, 0), 0))
