"""Temperature, filters, keyed noise, draws and the residual."""

import math
import time

import pytest
import torch

from kernels.sampling import (
    GREEDY_BELOW,
    KeyedNoise,
    is_greedy,
    keyed_choice,
    keyed_gumbel,
    keyed_uniform,
    noisy_top2,
    probabilities,
    process_logits,
    prompt_key,
    residual,
    sample_rows,
)

NAN, INF = float("nan"), float("inf")
KEY = prompt_key("gsm_symbolic/17")


def noise_for(vocab, seed=0):
    return KeyedNoise(seed=seed, prompt_key=KEY, vocab=vocab)


# temperature and filters


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-4, 0.05, 0.1, 5.0])
def test_any_temperature_is_finite(temperature):
    logits_NV = torch.tensor([[80.0, -80.0, 79.0, 0.0], [-80.0, -80.0, -79.0, -80.0]])
    p_NV = probabilities(logits_NV, temperature=temperature)
    assert torch.isfinite(p_NV).all()
    torch.testing.assert_close(p_NV.sum(-1), torch.ones(2))
    if temperature <= 1e-4:
        assert p_NV.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
        assert keyed_choice(logits_NV, [5, 6], noise_for(4), temperature=temperature).tolist() == [0, 2]
    assert is_greedy(temperature) == (temperature <= GREEDY_BELOW)


def test_greedy_ties_go_to_the_lowest_id():
    logits_NV = torch.tensor([[1.0, 3, 3, 3], [2, 2, 2, 2]])
    for dtype in (torch.float32, torch.bfloat16):
        assert probabilities(logits_NV.to(dtype), temperature=0.0).argmax(-1).tolist() == [1, 0]
        assert keyed_choice(logits_NV.to(dtype), [0, 1], noise_for(4), temperature=0.0).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[NAN, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF]])
def test_bad_rows_raise(bad, temperature):
    logits_NV = torch.tensor([[0.0, 1.0, 2.0], bad])
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="NaN"):
            probabilities(logits_NV.to(dtype), temperature=temperature)
        with pytest.raises(ValueError, match="NaN"):
            keyed_choice(logits_NV.to(dtype), [0, 1], noise_for(3), temperature=temperature)


def test_forbidden_ids_leave_before_the_softmax():
    allowed_V = torch.tensor([True, False, True])
    p_V = probabilities(torch.tensor([1.0, 50.0, 2.0]), temperature=1.0, allowed_V=allowed_V)
    torch.testing.assert_close(p_V, torch.tensor([1 / (1 + math.e), 0.0, math.e / (1 + math.e)]))
    assert probabilities(torch.tensor([1.0, 50, 2]), temperature=0.0, allowed_V=allowed_V).tolist() == [
        0,
        0,
        1,
    ]
    with pytest.raises(ValueError, match="allowed"):
        probabilities(torch.tensor([1.0, -INF, -INF]), temperature=1.0, allowed_V=~allowed_V)
    with pytest.raises(ValueError, match="NaN"):
        probabilities(torch.tensor([1.0, NAN, 2.0]), temperature=1.0, allowed_V=allowed_V)


def test_top_k_and_top_p():
    logits_V = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    torch.testing.assert_close(probabilities(logits_V, temperature=1.0, top_k=2), torch.tensor([0, 0.625, 0, 0.375]))
    for top_p, kept in [(1e-6, [1]), (0.49, [1]), (0.6, [1, 3]), (0.9, [0, 1, 3]), (0.999, [0, 1, 2, 3])]:
        p_V = probabilities(logits_V, temperature=1.0, top_p=top_p)
        assert p_V.nonzero()[:, 0].tolist() == kept
        assert float(p_V.sum()) == pytest.approx(1)
    sharp_V = probabilities(logits_V, temperature=0.5, top_p=0.6)  # top-p acts after the temperature
    assert sharp_V.nonzero()[:, 0].tolist() == [1]
    assert torch.equal(process_logits(logits_V, temperature=0.0, top_k=1, top_p=0.1), logits_V)


def test_one_row_equals_many_rows_and_inputs_survive():
    logits_NV = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    before = logits_NV.clone()
    settings = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    noise = noise_for(300)
    together_N = keyed_choice(logits_NV, [3, 4, 5, 5, 6], noise, **settings)
    for n, position in enumerate([3, 4, 5, 5, 6]):
        assert torch.equal(
            process_logits(logits_NV, **settings)[n], process_logits(logits_NV[n : n + 1], **settings)[0]
        )
        assert together_N[n] == keyed_choice(logits_NV[n : n + 1], [position], noise_for(300), **settings)[0]
    assert torch.equal(logits_NV, before)
    assert torch.equal(noise.row(3), keyed_gumbel(300, seed=0, prompt_key=KEY, position=3))


# keyed noise


def test_uniforms_match_the_published_generator():
    """SplitMix64 in Python's own integers; its first output for seed 1234567 is 6457827717110365317."""
    from kernels.sampling import _GOLDEN, _MASK64, _hash, _mix

    assert _mix((1234567 + _GOLDEN) & _MASK64) == 6457827717110365317
    key = 0xFEDCBA9876543210
    expected = [_mix((key + i * _GOLDEN) & _MASK64) for i in range(1, 200)]
    assert [word & _MASK64 for word in _hash(199, key, torch.device("cpu")).tolist()] == expected


def test_noise_is_a_function_of_its_arguments():
    arguments = {"seed": 3, "prompt_key": KEY, "position": 11}
    first_X = keyed_uniform(1000, **arguments)
    torch.manual_seed(5)
    assert torch.equal(first_X, keyed_uniform(1000, **arguments))
    for change in ({"seed": 4}, {"prompt_key": KEY + 1}, {"position": 12}, {"stream": 1}):
        assert not torch.isin(keyed_uniform(1000, **{**arguments, **change}), first_X).any()
    swapped = keyed_uniform(1000, seed=11, prompt_key=KEY, position=3)
    assert not torch.isin(swapped, first_X).any()
    assert torch.equal(keyed_uniform(1500, **arguments)[:1000], first_X)
    gumbel_V = keyed_gumbel(49152, **arguments)
    for shorter in (1, 7, 1000, 49149):
        assert torch.equal(keyed_gumbel(shorter, **arguments), gumbel_V[:shorter])


def test_prompt_keys():
    assert prompt_key("a") == prompt_key("a") != prompt_key("b")
    assert prompt_key("a") == 0xCA978112CA1BBDCA >> 1  # the head of sha256("a")
    assert all(0 <= prompt_key(str(i)) < 2**63 for i in range(100))


def ks_distance(values, cdf):
    ordered = values.double().sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    law = cdf(ordered)
    return float(torch.maximum((law - steps[:-1]).abs().max(), (law - steps[1:]).abs().max()))


def test_uniformity():
    count = 200_000
    uniforms = keyed_uniform(count, seed=0, prompt_key=KEY, position=0)
    gumbel = keyed_gumbel(count, seed=0, prompt_key=KEY, position=0)
    across = torch.stack([keyed_uniform(1, seed=0, prompt_key=KEY, position=i)[0] for i in range(5000)])
    limit = 2.0  # P(sqrt(n) D > 2) = 7e-4, and the values are fixed by their keys
    assert math.sqrt(count) * ks_distance(uniforms, lambda x: x) < limit
    assert math.sqrt(count) * ks_distance(gumbel, lambda x: (-(-x).exp()).exp()) < limit
    assert math.sqrt(5000) * ks_distance(across, lambda x: x) < limit
    cells = torch.histc(uniforms.float(), 256, 0, 1)
    chi_square = float(((cells - count / 256) ** 2).sum() / (count / 256))
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)
    assert uniforms.min() > 0
    assert uniforms.max() < 1
    assert torch.isfinite(gumbel).all()


def test_extreme_hashes_stay_inside(monkeypatch):
    for word in (0, -1):
        monkeypatch.setattr("kernels.sampling._hash", lambda count, key, device, word=word: torch.full((count,), word))
        uniform = float(keyed_uniform(1, seed=0, prompt_key=0, position=0))
        assert 0 < uniform < 1
        assert math.isfinite(float(keyed_gumbel(1, seed=0, prompt_key=0, position=0)))


@pytest.mark.parametrize("neighbour", [{"position": 8}, {"seed": 1}, {"prompt_key": KEY + 1}, {"stream": 1}])
def test_neighbours_are_independent(neighbour):
    count = 100_000
    here = {"seed": 0, "prompt_key": KEY, "position": 7, "stream": 0}
    one, two = keyed_uniform(count, **here), keyed_uniform(count, **{**here, **neighbour})
    correlation = float(torch.corrcoef(torch.stack([one, two]))[0, 1])
    assert abs(correlation) < 4 / math.sqrt(count)
    cells = torch.bincount((one * 16).long() * 16 + (two * 16).long(), minlength=256).double()
    chi_square = float(((cells - count / 256) ** 2).sum() / (count / 256))
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_gumbel_shares_no_bits_with_any_stream():
    """A draft drawn with the coins' own bits would know the coins, and Match would no longer be lossless."""
    gumbel = keyed_gumbel(50_000, seed=0, prompt_key=KEY, position=7)
    for stream in range(3):
        uniform = keyed_uniform(50_000, seed=0, prompt_key=KEY, position=7, stream=stream)
        assert abs(float(torch.corrcoef(torch.stack([gumbel.double(), uniform]))[0, 1])) < 4 / math.sqrt(50_000)
    with pytest.raises(AssertionError):
        keyed_uniform(1, seed=0, prompt_key=KEY, position=0, stream=-1)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_choices_follow_the_law(temperature):
    logits_V = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0])
    p_V = probabilities(logits_V, temperature=temperature, top_k=4)
    count = 6_000
    ids_N = keyed_choice(logits_V.expand(count, 5), list(range(count)), noise_for(5), temperature=temperature, top_k=4)
    counts_V = torch.bincount(ids_N, minlength=5)
    assert counts_V[1] == 0
    kept = p_V > 0
    chi_square = float(((counts_V - count * p_V)[kept] ** 2 / (count * p_V)[kept]).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, 1e-3


def test_noise_is_cheap():
    seconds = []
    for position in range(40):
        start = time.perf_counter()
        keyed_gumbel(49152, seed=0, prompt_key=KEY, position=position)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3


def test_noise_rows_are_kept_and_bounded():
    noise = noise_for(8)
    assert noise.row(3) is noise.row(3)
    first = noise.row(0).clone()
    for position in range(500):
        noise.row(position)
    assert len(noise._rows) <= 128
    assert torch.equal(noise.row(0), first)


def test_top2_gap_is_in_logit_units():
    logits_V = torch.tensor([1.0, 4.0, 3.5, -2.0])
    noise = noise_for(4)
    assert noisy_top2(logits_V, 9, noise, temperature=0.0) == pytest.approx(0.5)
    for temperature in (0.3, 2.0):
        gap = noisy_top2(logits_V, 9, noise, temperature=temperature)
        best = int(keyed_choice(logits_V[None], [9], noise, temperature=temperature))
        for change, same in (
            (gap * 0.98, True),
            (gap * 1.02, False),
        ):  # lowering the winner's logit by the gap flips it
            lowered_V = logits_V.clone()
            lowered_V[best] -= change
            assert (int(keyed_choice(lowered_V[None], [9], noise, temperature=temperature)) == best) is same
    assert noisy_top2(logits_V, 9, noise, temperature=1.0, top_k=1) == INF


# draws and residual


def test_draws_invert_the_cdf():
    p_V = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    draws = sample_rows(p_V.expand(6, 6), torch.tensor([1e-300, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]).double())
    assert draws.tolist() == [1, 1, 3, 3, 4, 4]
    assert sample_rows(p_V, torch.tensor(0.3)).item() == 3
    assert sample_rows(p_V.expand(2, 3, 6), torch.full((2, 3), 0.9)).tolist() == [[4] * 3] * 2


def test_draws_never_land_on_zero():
    generator = torch.Generator().manual_seed(0)
    p_NV = torch.rand(200, 50, generator=generator) ** 8 * (torch.rand(200, 50, generator=generator) < 0.3)
    p_NV[:, 7] += 1e-30
    for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0):
        ids_N = sample_rows(p_NV, torch.full((200,), uniform, dtype=torch.float64))
        assert (p_NV.gather(1, ids_N[:, None]) > 0).all()
    edge = torch.full((1000,), 1 - 2.0**-53).double()
    rounded = torch.full((1000, 3), 1 / 3)
    rounded[:, 2] = 0
    assert (sample_rows(rounded, edge) == 1).all()


@pytest.mark.parametrize("row", [[NAN, 1.0], [0.0, 0.0], [-0.5, 1.5], [INF, 1.0]])
def test_draws_refuse_bad_rows(row):
    with pytest.raises(ValueError, match="sample_rows"):
        sample_rows(torch.tensor([row]), torch.tensor([0.5]))


def test_residual():
    p_V, q_V = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.3, 0.45, 0.05, 0.2])
    torch.testing.assert_close(residual(p_V, q_V), torch.tensor([2 / 3, 0, 1 / 3, 0]).double())
    torch.testing.assert_close(residual(p_V, p_V), p_V.double())
    hot_V = torch.tensor([0.0, 1.0, 0.0])
    assert residual(hot_V, torch.tensor([1.0, 0, 0])).tolist() == [0, 1, 0]
    assert residual(hot_V, hot_V).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="NaN"):
        residual(torch.tensor([NAN, 1.0]), torch.tensor([0.5, 0.5]))
