"""The coins of many rows without a float32 copy of their logits: the noisy arg max by chunks of the vocabulary.

    y_m = argmax_v  logits[m, v] / T + g(position of m, v)

The Gumbel noise g is kernels.sampling's (METHOD.md section 3): a function of (seed, prompt, position, v) alone, so any
range of words can be made on its own, and the rows of one depth share it. On the same device the coins equal those of
kernels.sampling.keyed_choice bit for bit; the device is asked nothing, what keyed_choice would raise the caller reads
from the rows' maxima.

Shapes: M rows, V vocabulary, C words of a chunk, P positions (depths 0 .. max_depth).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling import (
    _GOLDEN,
    _GUMBEL_STREAM,
    _MASK64,
    _MIX_1,
    _MIX_2,
    KeyedNoise,
    _counters,
    _key,
    _shift_right,
    _signed,
    is_greedy,
)

CHUNK = 8192  # words; changes memory and time, never the coins


class Coins(NamedTuple):
    ids_M: Tensor  # int64, the lowest id on ties
    maxima_M: Tensor  # of the raw logits; not finite where a row is bad


def noisy_argmax(
    logits_MV: Tensor,
    depth_M: Tensor,
    noise: KeyedNoise,
    *,
    position: int,
    max_depth: int,
    temperature: float,
    chunk: int = CHUNK,
) -> Coins:
    """The coins of all rows; the noise of a position is made once for all rows of its depth, `chunk` words a time."""
    if is_greedy(temperature):
        ids_M = logits_MV.argmax(dim=-1)
        return Coins(ids_M, logits_MV.gather(-1, ids_M[:, None])[:, 0])  # arg max lands on a NaN if there is one
    num_rows, vocab = logits_MV.shape
    keys_P = gumbel_keys(noise, position=position, count=max_depth + 1, device=logits_MV.device)
    ids_M = torch.zeros(num_rows, dtype=torch.int64, device=logits_MV.device)
    best_M = torch.full((num_rows,), -torch.inf, device=logits_MV.device)
    maxima_M = best_M
    for start in range(0, vocab, chunk):
        scores_MC = logits_MV[:, start : start + chunk].to(torch.float32, copy=True)
        maxima_M = torch.maximum(maxima_M, scores_MC.amax(dim=-1))
        gumbel_PC = keyed_gumbel_chunk(keys_P, start=start, stop=min(start + chunk, vocab), vocab=vocab)
        scores_MC.div_(temperature).add_(gumbel_PC.index_select(0, depth_M))
        top_M, at_M = scores_MC.max(dim=-1)
        better_M = top_M > best_M  # strictly: of equals the lowest id stays
        ids_M = torch.where(better_M, at_M + start, ids_M)
        best_M = torch.maximum(best_M, top_M)
    return Coins(ids_M, maxima_M)


def gumbel_keys(noise: KeyedNoise, *, position: int, count: int, device: torch.device) -> Tensor:
    """Hash keys [count] of the positions from `position` on, 64 bits as int64.

    Made on the device: numbers sent there would wait for the pass that it is busy with.
    """
    prompt = _key(noise.seed, noise.prompt_key)
    z_P = torch.arange(position, position + count, device=device) + _signed((prompt + _GOLDEN) & _MASK64)
    return _mix_(_mix_(z_P) + _signed((_GUMBEL_STREAM + _GOLDEN) & _MASK64))


def keyed_gumbel_chunk(keys_P: Tensor, *, start: int, stop: int, vocab: int) -> Tensor:
    """Words start .. stop of kernels.sampling.keyed_gumbel for several keys, float32 [P, C]: the same operations."""
    bits_PC = _mix_(_counters(vocab, keys_P.device)[start:stop] + keys_P[:, None])
    v_PC = _shift_right(bits_PC, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v_PC.neg_().log1p_().neg_().log_().neg_()


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's finaliser in place; products wrap as in uint64."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(_MIX_1))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(_MIX_2))
    return z.bitwise_xor_(_shift_right(z, 31))
