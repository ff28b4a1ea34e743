"""Comparisons that can't be fooled by zeros, NaN or empty inputs; tolerances against Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from nvfp4prep.numerics import encode_e4m3, quantize_dequantize_nvfp4
from nvfp4prep.schema import Format
from nvfp4prep.smoke.inputs import CALIBRATED_PEAK, hidden_states
from nvfp4prep.smoke.layer import Routing
from nvfp4prep.smoke.metrics import (
    BF16_ROUNDING,
    E4M3_NOISE,
    INT4_NOISE,
    NVFP4_NOISE,
    Tolerances,
    compare,
    exact_error,
    exact_tolerances,
    quantisation_error,
    reference_tolerances,
    verdict,
)
from nvfp4prep.smoke.routing import random_routing
from nvfp4prep.targets import Activations

LOOSE = Tolerances(0.5, 0.9)
Kind = Literal["silu", "relu2"]


def sample(tokens: int = 8, hidden: int = 32) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tokens, hidden, generator=generator), random_routing(4, 2, tokens, 0)


def test_equal() -> None:
    expected, routing = sample()
    found = compare(expected.clone(), expected, routing)
    assert (found.rel_l2, found.zeros, found.nonfinite, found.tokens) == (0.0, 0, 0, 8)
    assert found.cosine == pytest.approx(1)
    assert verdict(found, exact_tolerances("16-bit")) == []


def test_relative_l2_cosine_and_worst_token() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    out = torch.tensor([[3.0, 5.0], [1.0, 10.0]])
    found = compare(out, expected, random_routing(2, 1, 2, 0))
    assert found.rel_l2 == pytest.approx(math.sqrt(2 / 125))
    assert found.cosine == pytest.approx(129 / math.sqrt(135 * 125))
    assert found.worst_token is not None
    assert (found.worst_token.index, found.worst_token.rel) == (0, pytest.approx(0.2))


def test_worst_expert_is_the_broken_one() -> None:
    expected = torch.ones(6, 4)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 3], [3, 1], [2, 3]])
    weights = torch.full((6, 2), 0.5)
    out = expected.clone()
    out[(ids == 2).any(1)] *= 0.5  # expert 2 gave nothing
    found = compare(out, expected, Routing(ids, weights))
    assert found.worst_expert is not None
    assert found.worst_expert.index == 2
    assert found.worst_expert.rel == pytest.approx(0.5)
    assert [(entry.expert, entry.tokens) for entry in found.experts] == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_expert_weighted_by_its_share() -> None:
    """A token that an expert hardly takes part in says little about it."""
    expected = torch.ones(2, 4)
    out = torch.tensor([[1.0] * 4, [2.0] * 4])
    routing = Routing(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    rel = {entry.expert: entry.rel for entry in compare(out, expected, routing).experts}
    assert rel[0] == pytest.approx(math.sqrt(0.01 / 0.82))
    assert rel[1] == pytest.approx(math.sqrt(0.81 / 0.82))


def test_all_zeros_fail() -> None:
    expected, routing = sample()
    found = compare(torch.zeros_like(expected), expected, routing)
    assert (found.rel_l2, found.zeros, found.cosine) == (1.0, 8, 0.0)
    assert any("zeros" in reason for reason in verdict(found, Tolerances(2.0, 2.0)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["out", "expected", "both"])
def test_nonfinite_fails_and_is_located(value: float, side: str) -> None:
    expected, routing = sample()
    out = expected.clone()
    if side != "expected":
        out[3, 5] = value
    if side != "out":
        expected[3, 5] = value
    found = compare(out, expected, routing)
    assert found.nonfinite == (2 if side == "both" else 1)
    assert found.rel_l2 == math.inf
    assert found.worst_token is not None
    assert (found.worst_token.index, found.worst_token.rel) == (3, math.inf)
    assert {entry.expert for entry in found.experts if entry.rel == math.inf} == set(routing.ids[3].tolist())
    assert any("NaN" in reason for reason in verdict(found, LOOSE))
    assert not any(math.isnan(number) for number in (found.rel_l2, found.cosine))


def test_everything_nan_fails() -> None:
    expected, routing = sample()
    reasons = verdict(compare(torch.full_like(expected, math.nan), expected, routing), Tolerances(math.inf, math.inf))
    assert reasons


def test_nothing_compared_fails() -> None:
    none = compare(torch.zeros(0, 8), torch.zeros(0, 8), random_routing(4, 2, 0, 0))
    assert (none.tokens, none.worst_token, none.worst_expert, none.rel_l2) == (0, None, None, 0.0)
    zero = compare(torch.zeros(3, 8), torch.zeros(3, 8), random_routing(4, 2, 3, 0))
    assert zero.rel_l2 == 0.0
    for found in (none, zero):
        assert verdict(found, LOOSE) == ["nothing was compared: no token has an expected output other than 0"]


def test_tokens_of_other_ranks() -> None:
    """Zero rows where zeros are expected are fine; anything there is infinitely wrong. Ids of other ranks are -1."""
    expected = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    routing = Routing(torch.tensor([[0], [-1]]), torch.ones(2, 1))
    assert verdict(compare(expected.clone(), expected, routing), LOOSE) == []
    found = compare(torch.tensor([[1.0, 2.0], [0.0, 1e-3]]), expected, routing)
    assert found.worst_token is not None
    assert (found.worst_token.index, found.worst_token.rel) == (1, math.inf)
    assert verdict(found, LOOSE)


def test_shapes_are_checked() -> None:
    expected, routing = sample()
    with pytest.raises(ValueError, match="expected"):
        compare(expected[:4], expected, routing)
    with pytest.raises(ValueError, match="tokens"):
        compare(expected, expected, random_routing(4, 2, 5, 0))


def test_expert_limit_tightens_with_tokens() -> None:
    """An expert off by a tenth passes on one token and fails on a hundred."""
    limits = exact_tolerances("NVFP4")
    assert limits.over(1) > 0.1 > limits.over(100)
    expected, routing = torch.ones(200, 4), Routing((torch.arange(200) % 10)[:, None], torch.ones(200, 1))
    out = torch.where(routing.ids == 7, expected * 1.12, expected)
    assert [reason[:8] for reason in verdict(compare(out, expected, routing), limits)] == ["expert 7"]


# --- the numbers behind the tolerances -------------------------------------------------------------------------------


CALIBRATED_INNER = {"silu": 16.0, "relu2": 32.0}
"""An amax above that of the layer's intermediate: one input scale for all runs, as in a checkpoint."""


def nvfp4(x: Tensor) -> Tensor:
    scale = x.abs().max().item() / CALIBRATED_PEAK
    return quantize_dequantize_nvfp4(x, scale, scale)


def unchanged(x: Tensor) -> Tensor:
    return x


def e4m3(x: Tensor) -> Tensor:
    scale = x.abs().max() / 448
    return encode_e4m3(x / scale).float() * scale


def int4(weight: Tensor) -> Tensor:
    """Groups of 128 along K, symmetric, scale amax / 7."""
    groups = weight.view(weight.shape[0], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view(weight.shape)


WEIGHTS: Mapping[Format | None, Callable[[Tensor], Tensor]] = {None: unchanged, Format.NVFP4: nvfp4, Format.INT4: int4}


def error(out: Tensor, expected: Tensor) -> float:
    return ((out - expected).norm() / expected.norm()).item()


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def test_one_rounding_to_bf16() -> None:
    values = torch.exp2(torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 8)
    assert error(rounded(values), values) == pytest.approx(BF16_ROUNDING, rel=0.06)


def test_one_quantisation() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(256, 1024, generator=generator)
    assert error(nvfp4(weights), weights) == pytest.approx(NVFP4_NOISE, rel=0.02)
    x = hidden_states(128, 1024, 0, 0.002).float()
    assert error(nvfp4(x), x) == pytest.approx(NVFP4_NOISE, rel=0.05)
    assert error(e4m3(x), x) == pytest.approx(E4M3_NOISE, rel=0.05)
    assert error(int4(weights), weights) == pytest.approx(INT4_NOISE, rel=0.02)


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x BF16-exact [T, H], gate and up [I, H], down [H, I]; preactivations of unit size."""
    generator = torch.Generator().manual_seed(1)
    x = hidden_states(96, 768, 3, 0.002).float()
    rms = x.square().mean().sqrt()
    gate, up = (torch.randn(512, 768, generator=generator) / math.sqrt(768) / rms for _ in range(2))
    return x, gate, up, torch.randn(768, 512, generator=generator) / math.sqrt(512)


def run(
    layer: tuple[Tensor, Tensor, Tensor, Tensor],
    kind: Kind,
    weights: Format | None,
    activations: Activations,
    bf16: bool = False,
) -> Tensor:
    """One expert, quantised where asked, rounded to BF16 between the steps where asked."""
    x, *matrices = layer
    gate, up, down = (WEIGHTS[weights](matrix) for matrix in matrices)
    step = rounded if bf16 else (lambda value: value)
    x = {"16-bit": unchanged, "NVFP4": nvfp4, "E4M3": e4m3}[activations](x)
    first, second = step(x @ gate.T), step(x @ up.T)
    inner = step(silu(first) * second if kind == "silu" else second.relu().square())
    if activations == "NVFP4":
        scale = CALIBRATED_INNER[kind] / CALIBRATED_PEAK
        inner = quantize_dequantize_nvfp4(inner, scale, scale)
    elif activations == "E4M3":
        inner = e4m3(inner)
    return step(inner @ down.T)


@pytest.mark.parametrize("kind", ["silu", "relu2"])
@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        (Format.NVFP4, "NVFP4"),
        (Format.NVFP4, "16-bit"),
        (None, "NVFP4"),
        (Format.INT4, "16-bit"),
        (Format.INT4, "E4M3"),
        (None, "E4M3"),
    ],
)
def test_quantisation_error(
    layer: tuple[Tensor, Tensor, Tensor, Tensor], kind: Kind, weights: Format | None, activations: Activations
) -> None:
    """The derived error is met within 12 %, a third of the headroom; half of relu2's values are exact zeros."""
    expected = run(layer, kind, None, "16-bit")
    out = run(layer, kind, weights, activations)
    derived = quantisation_error(kind, weights=weights, activations=activations)
    assert error(out, expected) == pytest.approx(derived, rel=0.12)
    limits = reference_tolerances(kind, weights=weights, activations=activations)
    assert verdict(compare(out, expected, random_routing(1, 1, len(out), 0)), limits) == []


@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_exact_error(layer: tuple[Tensor, Tensor, Tensor, Tensor], kind: Kind) -> None:
    """Roundings to BF16 between the steps stay below the derived error, and not far below where flips dominate."""
    cases: tuple[tuple[Format, Activations, float], ...] = (
        (Format.NVFP4, "16-bit", 0.5),
        (Format.NVFP4, "NVFP4", 0.7),
        (Format.INT4, "E4M3", 0.7),
    )
    for weights, activations, least in cases:
        expected, out = (run(layer, kind, weights, activations, bf16) for bf16 in (False, True))
        assert least < error(out, expected) / exact_error(activations) < 1.1
        found = compare(out, expected, random_routing(1, 1, len(out), 0))
        assert verdict(found, exact_tolerances(activations)) == []


def test_derived_numbers() -> None:
    """The numbers that docs/smoke.md quotes."""
    assert exact_error("16-bit") == pytest.approx(0.0053, abs=5e-5)
    assert exact_error("NVFP4") == pytest.approx(0.035, abs=5e-4)
    assert exact_error("E4M3") == pytest.approx(0.015, abs=5e-4)
    assert quantisation_error("silu", weights=Format.NVFP4, activations="NVFP4") == pytest.approx(0.233, abs=5e-4)
    assert quantisation_error("relu2", weights=Format.NVFP4, activations="16-bit") == pytest.approx(0.145, abs=5e-4)
    assert quantisation_error("silu", weights=None, activations="E4M3") == pytest.approx(0.046, abs=5e-4)


def test_tolerances_that_the_documentation_gives() -> None:
    """The int4 rows of docs/smoke.md."""

    def silu(weights: Format | None, activations: Activations) -> float:
        return reference_tolerances("silu", weights=weights, activations=activations).rel_l2

    assert exact_tolerances("E4M3").rel_l2 == pytest.approx(0.023, abs=5e-4)
    assert silu(Format.INT4, "16-bit") == pytest.approx(0.307, abs=5e-4)
    assert silu(Format.INT4, "E4M3") == pytest.approx(0.315, abs=5e-4)
    assert silu(None, "E4M3") == pytest.approx(0.073, abs=5e-4)
    plain = reference_tolerances("relu2", weights=Format.INT4, activations="16-bit").rel_l2
    assert plain == pytest.approx(0.270, abs=1e-3)
