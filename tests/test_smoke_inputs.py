"""Hidden states: calibrated magnitude, block statistics, the same bits everywhere."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from nvfp4prep.smoke.inputs import CALIBRATED_PEAK, PEAK_TO_RMS, hidden_states


@pytest.mark.parametrize("scale", [1e-5, 0.0013, 0.5, 37.0])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_peak_is_the_calibrated_one(scale: float, tokens: int) -> None:
    x = hidden_states(tokens, 256, 1, scale)
    assert x.dtype is torch.bfloat16
    assert x.shape == (tokens, 256)
    peak = x.float().abs().max().item()
    assert 1 - 2**-7 < peak / (CALIBRATED_PEAK * scale) <= 1
    assert x[0].float().abs().max().item() == peak


@pytest.mark.parametrize("scale", [0.0013, None])
def test_statistics(scale: float | None) -> None:
    x = hidden_states(256, 2048, 0, scale).double()
    rms = x.square().mean().sqrt().item()
    expected = 1.0 if scale is None else scale * CALIBRATED_PEAK / PEAK_TO_RMS
    assert rms == pytest.approx(expected, rel=0.02)
    assert abs(x.mean().item()) < 0.01 * rms
    assert (x / rms).pow(4).mean().item() > 6, "heavier tails than a normal distribution's 3"
    channels = x.square().mean(0).sqrt() / rms
    assert channels.min().item() > 0.7, "a channel quiet for all tokens would hide its weights"
    assert int((channels > 2.5).sum()) == 2048 // 128
    blocks = x.reshape(256, -1, 16).abs().amax(-1) / rms
    assert (blocks == 0).double().mean().item() == pytest.approx(1 / 64, abs=0.004)
    assert ((blocks > 0) & (blocks < 0.02)).double().mean().item() == pytest.approx(1 / 16, abs=0.008)
    # E4M3 scales of the others: a factor of 10 and more between blocks, all of them normal (448 / 2^-6 = 28672).
    loud = blocks[blocks > 0.02]
    assert (loud.max() / loud.min()).item() > 10
    assert (PEAK_TO_RMS / blocks[blocks > 0].min()).item() < 448 / 2**-9


def test_same_bits_everywhere() -> None:
    """A digest taken once: another CPU, thread count or torch version must give it too."""
    x = hidden_states(33, 384, 12, 0.0021)
    digest = hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest == "8c3ae792149edd5642ef2d82b5d0508b3212f6f9f9e6f0622b7bc0c56aa19392"
    assert torch.equal(x, hidden_states(33, 384, 12, 0.0021))
    assert not torch.equal(x, hidden_states(33, 384, 13, 0.0021))


@pytest.mark.parametrize("scale", [0.0021, None])
def test_a_longer_run_begins_like_a_shorter_one(scale: float | None) -> None:
    long = hidden_states(64, 256, 5, scale)
    for tokens in (0, 1, 7):
        assert torch.equal(hidden_states(tokens, 256, 5, scale), long[:tokens])


def test_norm_weight_of_weight_only_checkpoints() -> None:
    weight = torch.linspace(0.25, 4, 256)
    plain, scaled = (hidden_states(512, 256, 0, None, norm).double() for norm in (None, weight))
    ratio = scaled.square().mean(0).sqrt() / plain.square().mean(0).sqrt()
    assert torch.allclose(ratio, weight.double(), rtol=0.01)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-45, 1e38])
def test_unusable_scales(scale: float) -> None:
    with pytest.raises(ValueError, match="input scale"):
        hidden_states(1, 256, 0, scale)


def test_unusable_sizes() -> None:
    for tokens, hidden, seed in ((-1, 256, 0), (1, 0, 0), (1, 250, 0), (1, 256, -1)):
        with pytest.raises(ValueError, match="multiple of 16"):
            hidden_states(tokens, hidden, seed, 0.1)
