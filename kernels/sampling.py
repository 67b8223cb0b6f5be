"""From logits to tokens: one temperature rule, position-keyed noise, inverse-CDF draws, the residual.

The coin of absolute position i is a function of (seed, prompt, i) alone, so every lossless method answers
with vanilla's own text (METHOD.md section 3). Sampling is the Gumbel arg max, argmax(logits / T + g_i) ~
softmax(logits / T), with g_i from a counter-based generator: SplitMix64 (Steele, Lea and Flood 2014) as a
hash of (key, index).

Shapes: X any leading shape, N rows, V vocabulary.
"""

import hashlib
from collections import OrderedDict
from functools import lru_cache

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_GUMBEL_STREAM = -1  # apart from every stream of keyed_uniform: a draft must not depend on the coins
_ROWS_KEPT = 128  # cycles overlap: a position drawn past a rejection is asked for again


def is_greedy(temperature: float) -> bool:
    """The only temperature threshold there is: drafter, verifier and vanilla all ask here."""
    return temperature <= GREEDY_BELOW


def process_logits(
    logits_XV: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Float32 log-domain scores [.., V], a fresh tensor: logits / T, -inf outside allowed, top-k and top-p.

    A greedy temperature leaves the logits undivided and unfiltered (arg max needs neither). Ids that tie with
    the k-th score all stay. Top-p keeps the shortest sorted prefix whose mass reaches top_p, after
    temperature and top-k. Raises ValueError on NaN, +inf, or a row with nothing allowed.
    """
    scores = logits_XV.to(torch.float32, copy=True)
    _check_rows(scores)
    if allowed_V is not None:
        scores.masked_fill_(~allowed_V, -torch.inf)
        _check_rows(scores)
    if is_greedy(temperature):
        return scores
    scores.div_(temperature)
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[..., -1:]
        scores.masked_fill_(scores < kth, -torch.inf)
    if top_p < 1.0:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        drop_sorted = mass_before >= top_p
        drop_sorted[..., 0] = False
        drop = torch.zeros_like(drop_sorted).scatter_(-1, ids, drop_sorted)
        scores.masked_fill_(drop, -torch.inf)
    return scores


def probabilities(
    logits_XV: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    allowed_V: Tensor | None = None,
) -> Tensor:
    """Float32 probabilities [.., V]; one-hot at the arg max (lowest id on ties) for a greedy temperature."""
    scores = process_logits(logits_XV, temperature=temperature, top_k=top_k, top_p=top_p, allowed_V=allowed_V)
    if is_greedy(temperature):
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return scores.softmax(dim=-1)


def prompt_key(prompt_id: str) -> int:
    """63-bit key of a prompt, the same in every process (Python's own hash() is salted)."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big") >> 1


def keyed_uniform(count: int, *, seed: int, prompt_key: int, position: int, stream: int = 0) -> Tensor:
    """Float64 uniforms in (0, 1) [count], ends excluded; streams keep a position's uses independent."""
    assert stream >= 0, stream
    bits = _hash(count, _key(seed, prompt_key, position, stream), torch.device("cpu"))
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def keyed_gumbel(
    vocab: int, *, seed: int, prompt_key: int, position: int, device: torch.device | str | None = None
) -> Tensor:
    """Float32 standard Gumbel noise [V]: -log(-log1p(-v)), v = (32 hashed bits + 1/2) / 2^32.

    The bits agree on every device; the two logarithms are the device's own, and may differ in their last
    place between devices. With 1 - v as the uniform, the large values (small v), which decide the arg max,
    are finely resolved.
    """
    bits = _hash(vocab, _key(seed, prompt_key, position, _GUMBEL_STREAM), torch.device(device or "cpu"))
    v = _shift_right(bits, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


class KeyedNoise:
    """The Gumbel rows of one prompt, by absolute position."""

    def __init__(self, *, seed: int, prompt_key: int, vocab: int, device: torch.device | str = "cpu"):
        self.seed, self.prompt_key, self.vocab, self.device = seed, prompt_key, vocab, device
        self._rows: OrderedDict[int, Tensor] = OrderedDict()

    def row(self, position: int) -> Tensor:
        """Noise [V] of an absolute position. Read only: the tensor is shared."""
        if position not in self._rows:
            if len(self._rows) >= _ROWS_KEPT:
                self._rows.popitem(last=False)
            self._rows[position] = keyed_gumbel(
                self.vocab, seed=self.seed, prompt_key=self.prompt_key, position=position, device=self.device
            )
        return self._rows[position]


def keyed_choice(
    logits_NV: Tensor,
    positions: list[int],
    noise: KeyedNoise,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """One token a row, LongTensor [N]: the Gumbel arg max with its position's coin; plain arg max if greedy.

    Ties go to the lowest id. Greedy reads the logits in place, whatever their dtype: no float32 copy of N x
    V.
    """
    assert logits_NV.shape[0] == len(positions), (logits_NV.shape, positions)
    if is_greedy(temperature):
        ids_N = logits_NV.argmax(dim=-1)
        _check_maxima(logits_NV.gather(-1, ids_N[:, None]))  # arg max lands on a NaN if there is one
        return ids_N
    scores_NV = process_logits(logits_NV, temperature=temperature, top_k=top_k, top_p=top_p)
    for scores_V, position in zip(scores_NV, positions, strict=True):
        scores_V.add_(noise.row(position))
    return scores_NV.argmax(dim=-1)


def noisy_top2(
    logits_V: Tensor,
    position: int,
    noise: KeyedNoise,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> float:
    """Gap of the two best noisy scores of a row, in logit units (times T when sampling); inf if one is left.

    A rounding difference d between two passes can change the token only if the gap is below 2 d. It says
    nothing of an id that rounding moves across a top-k or top-p boundary.
    """
    scores_V = process_logits(logits_V, temperature=temperature, top_k=top_k, top_p=top_p)
    if not is_greedy(temperature):
        scores_V.add_(noise.row(position)).mul_(temperature)
    first, second = scores_V.topk(2).values.tolist()
    return first - second


def sample_rows(probs_XV: Tensor, uniforms_X: Tensor) -> Tensor:
    """Inverse-CDF draws in float64, LongTensor [..]: the first id of positive probability whose CDF exceeds
    u.

    An id of probability zero is never returned, whatever the rounding of the cumulative sum.
    """
    probs = probs_XV.double()
    cdf = probs.cumsum(dim=-1)
    total = cdf[..., -1:]
    if not bool((torch.isfinite(total) & (total > 0)).all()) or bool((probs < 0).any()):
        raise ValueError("sample_rows: a row is negative, NaN, infinite or all zero; check the model's logits for NaN")
    positive = probs > 0
    over = (cdf > uniforms_X.to(probs)[..., None] * total) & positive
    first_over = over.int().argmax(dim=-1)
    last_positive = probs.shape[-1] - 1 - positive.flip(-1).int().argmax(dim=-1)
    return torch.where(over.any(dim=-1), first_over, last_positive)


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(0, p - q)), float64 [V]; p itself if nothing is left (p = q). No mass where p = 0."""
    p_V = p_V.double()
    left_V = (p_V - q_V.double()).clamp_(min=0)
    total = left_V.sum()
    if bool(torch.isnan(total)):
        raise ValueError("residual: NaN in p or q; check the model's logits")
    return left_V / total if float(total) > 1e-12 else p_V / p_V.sum()


def _check_rows(scores_XV: Tensor) -> None:
    _check_maxima(scores_XV.amax(dim=-1))


def _check_maxima(maxima: Tensor) -> None:
    """A row's maximum is finite unless the row holds NaN or +inf, or is -inf throughout."""
    if not bool(torch.isfinite(maxima).all()):
        raise ValueError("logits hold NaN or +inf, or a row has no allowed id; check the weights, dtype and masks")


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key + part + _GOLDEN) & _MASK64)
    return key


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return z ^ (z >> 31)


def _hash(count: int, key: int, device: torch.device) -> Tensor:
    """64 bits [count] as int64: the finaliser of key + index * golden; products wrap as in uint64."""
    z = _counters(count, device) + _signed(key)
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(_MIX_1))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(_MIX_2))
    return z.bitwise_xor_(_shift_right(z, 31))


@lru_cache(maxsize=16)
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic, so the copies of the sign bit are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
