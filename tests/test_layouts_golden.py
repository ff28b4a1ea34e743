"""Layouts against the outputs of real kernels (tests/data/golden) and against FlashInfer's own row orders."""

from __future__ import annotations

import re
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from checkpoints import DATA
from quietly import import_quietly
from safetensors.torch import load_file
from torch import Tensor

from nvfp4prep.layouts import flashinfer_cutedsl, vllm_marlin
from nvfp4prep.layouts.logical import Activation, Expert, LayerFacts, Matrix, Scales, plan_geometry
from nvfp4prep.layouts.permutations import gated_row_shuffle, row_shuffle, swizzle, unswizzle

SWIZZLED = load_file(DATA / "golden/block_scale_interleave.safetensors")
MARLIN = load_file(DATA / "golden/marlin_moe_sm90.safetensors")
SWIZZLE_CASES = sorted({name.split(".")[0] for name in SWIZZLED})
MARLIN_CASES = ("nvfp4", "nvfp4_rescaled")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# --- the 128x4 swizzle ---


def test_swizzle_cases_are_all_here() -> None:
    kinds = {re.sub(r"_\d.*", "", case) for case in SWIZZLE_CASES}
    assert kinds == {"interleave_u8", "interleave_bf16"}
    assert len(SWIZZLE_CASES) == 12


@pytest.mark.parametrize("case", SWIZZLE_CASES)
def test_swizzle_gives_the_kernels_bytes(case: str) -> None:
    logical, golden = SWIZZLED[f"{case}.in"], SWIZZLED[f"{case}.out"]
    matrices = logical if logical.dim() == 3 else logical[None]
    ours = torch.cat([swizzle(matrix).flatten() for matrix in matrices])
    assert torch.equal(as_bytes(ours), as_bytes(golden))


@pytest.mark.parametrize("case", SWIZZLE_CASES)
def test_unswizzle_restores_the_kernels_input(case: str) -> None:
    logical, golden = SWIZZLED[f"{case}.in"], SWIZZLED[f"{case}.out"]
    matrices = logical if logical.dim() == 3 else logical[None]
    rows, columns = matrices.shape[1:]
    stacked = golden.view(len(matrices), -(-rows // 128) * 128, -(-columns // 4) * 4)
    for matrix, swizzled in zip(matrices, stacked, strict=True):
        assert torch.equal(as_bytes(unswizzle(swizzled, rows, columns)), as_bytes(matrix))


# --- Marlin ---


def marlin_layer(case: str) -> tuple[list[Expert], Scales, LayerFacts]:
    """The golden layer's logical experts and scales (gate first), and the facts that packing it needs."""
    w13, s13 = MARLIN[f"{case}.w13_packed_nibbles"], MARLIN[f"{case}.w13_scale"].view(torch.uint8)
    w2, s2 = MARLIN[f"{case}.w2_packed_nibbles"], MARLIN[f"{case}.w2_scale"].view(torch.uint8)
    half = w13.shape[1] // 2
    experts = [
        Expert(
            Matrix(w13[e, :half], s13[e, :half]),
            Matrix(w13[e, half:], s13[e, half:]),
            Matrix(w2[e], s2[e]),
        )
        for e in range(len(w13))
    ]
    w13_global, w2_global = MARLIN[f"{case}.w13_global_scale"], MARLIN[f"{case}.w2_global_scale"]
    facts = LayerFacts(
        w13_factor=vllm_marlin.scale_factor(int(s13.max()), LayerFacts()),
        w2_factor=vllm_marlin.scale_factor(int(s2.max()), LayerFacts()),
    )
    return experts, Scales(w13_global, w13_global, w2_global, None, None), facts


@pytest.mark.parametrize("case", MARLIN_CASES)
def test_marlin_scale_factor(case: str) -> None:
    _, _, facts = marlin_layer(case)
    assert facts.w13_factor == float(MARLIN[f"{case}.w13_sf"])
    assert facts.w2_factor == float(MARLIN[f"{case}.w2_sf"])


def test_marlin_rescaled_case_has_large_factors() -> None:
    _, _, facts = marlin_layer("nvfp4_rescaled")
    assert {facts.w13_factor, facts.w2_factor} == {128.0, 512.0}


@pytest.mark.parametrize("case", MARLIN_CASES)
def test_marlin_pack_gives_the_kernels_bytes(case: str) -> None:
    experts, scales, facts = marlin_layer(case)
    geometry = plan_geometry(
        vllm_marlin.REQUIRES, "vllm", experts=4, hidden=256, intermediate=128, gated=True, biased=False
    )
    packed = [vllm_marlin.pack(expert, geometry, facts) for expert in experts]
    for ours, golden in (
        ("w13_weight", "marlin_w13"),
        ("w2_weight", "marlin_w2"),
        ("w13_weight_scale", "marlin_w13_scale"),
        ("w2_weight_scale", "marlin_w2_scale"),
    ):
        stacked = torch.stack([tensors[ours] for tensors in packed])
        assert stacked.shape == MARLIN[f"{case}.{golden}"].shape, ours
        assert torch.equal(as_bytes(stacked), as_bytes(MARLIN[f"{case}.{golden}"])), ours

    small = vllm_marlin.parameters(scales, vllm_marlin.scalars(scales, Activation("silu"), facts), facts)
    assert torch.equal(as_bytes(small["w13_weight_scale_2"]), as_bytes(MARLIN[f"{case}.marlin_w13_global_scale"]))
    assert torch.equal(as_bytes(small["w2_weight_scale_2"]), as_bytes(MARLIN[f"{case}.marlin_w2_global_scale"]))


@pytest.mark.parametrize("case", MARLIN_CASES)
def test_marlin_unpack_restores_the_kernels_input(case: str) -> None:
    experts, _, facts = marlin_layer(case)
    geometry = plan_geometry(
        vllm_marlin.REQUIRES, "vllm", experts=4, hidden=256, intermediate=128, gated=True, biased=False
    )
    for e, expert in enumerate(experts):
        back = vllm_marlin.unpack(
            {
                "w13_weight": MARLIN[f"{case}.marlin_w13"][e],
                "w13_weight_scale": MARLIN[f"{case}.marlin_w13_scale"][e].view(torch.uint8),
                "w2_weight": MARLIN[f"{case}.marlin_w2"][e],
                "w2_weight_scale": MARLIN[f"{case}.marlin_w2_scale"][e].view(torch.uint8),
            },
            geometry,
            facts,
        )
        for ours, golden, factor in (
            (back.gate, expert.gate, facts.w13_factor),
            (back.up, expert.up, facts.w13_factor),
            (back.down, expert.down, facts.w2_factor),
        ):
            assert ours is not None and golden is not None
            assert torch.equal(ours.weight, golden.weight)
            lost = torch.isin(golden.scale, torch.tensor(vllm_marlin.lost_codes(factor, True)))
            assert torch.equal(ours.scale, golden.scale.masked_fill(lost, 0))
            assert (golden.scale[lost] < 8).all()  # subnormals: the kernel has them as 0


NEGATIVE_OR_NAN = {127, *range(128, 256)}


@pytest.mark.parametrize(
    ("factor", "flush", "lost"),
    [
        (1.0, True, set(range(1, 8))),  # subnormals stay below 2 after · 2^7
        (2.0, True, set(range(1, 4))),
        (4.0, True, {1}),
        (8.0, True, set()),
        (1.0, False, set()),
    ],
)
def test_marlin_lost_codes(factor: float, flush: bool, lost: set[int]) -> None:
    """Of the codes that occur under a factor (value · factor <= 448), subnormals that flush; and negative ones."""
    ours = set(vllm_marlin.lost_codes(factor, flush))
    assert {code for code in ours if code < 127 and e4m3(code) * factor <= 448} == lost
    assert ours >= NEGATIVE_OR_NAN - {127} if flush else ours >= NEGATIVE_OR_NAN - {127, 128}


def e4m3(code: int) -> float:
    return float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64))


@pytest.mark.parametrize("factor", [2.0**n for n in range(18)])
def test_marlin_recoding_is_lossless_from_two_up(factor: float) -> None:
    """Every code whose value · factor · 2^7 is between 2 and 448 · 2^7 has a byte of its own, in order."""
    table = vllm_marlin.recode_table(factor, True)
    kept = [code for code in range(1, 127) if 2 / 128 <= e4m3(code) * factor <= 448]
    recoded = [int(table[code]) for code in kept]
    assert all(low < high for low, high in pairwise(recoded))
    assert all(byte >= 0x80 for byte in recoded)  # the kernel takes the top bit for granted
    assert not set(kept) & set(vllm_marlin.lost_codes(factor, True))


@pytest.mark.parametrize("code", range(1, 127))
def test_marlin_scale_factor_is_vllms(code: int) -> None:
    """vLLM 0.33: in F32, of value · 2^7."""
    largest = torch.tensor(e4m3(code), dtype=torch.float32) * 2**7
    expected = (448 * 2**7 / largest).log2().floor().exp2().item() if largest < 448 * 2**7 else 1.0
    assert vllm_marlin.scale_factor(code, LayerFacts()) == expected
    assert vllm_marlin.scale_factor(code, LayerFacts(activation_dtype="fp16")) == 1.0
    assert vllm_marlin.scale_factor(code, LayerFacts(engine="sglang")) == 1.0


def test_marlin_scale_factor_of_zeros() -> None:
    assert vllm_marlin.scale_factor(0, LayerFacts()) == 1.0


# --- row orders: FlashInfer's own functions. No skip: flashinfer-python is one of the dev packages ---

EPILOGUE_TILE = 128


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    return import_quietly("flashinfer.fused_moe.core")


@pytest.mark.parametrize("columns", [64, 128, 448])
@pytest.mark.parametrize("rows", [128, 256, 384, 512, 768, 1408, 2048, 5760, 14336])
def test_row_orders_are_flashinfers(flashinfer: ModuleType, rows: int, columns: int) -> None:
    weight = torch.zeros(rows, columns, dtype=torch.uint8)
    scale = torch.zeros(rows, columns // 8, dtype=torch.uint8)
    cache: dict[object, Tensor] = {}
    for tensor, group in ((weight, None), (scale, 16)):
        for gated, ours in ((True, gated_row_shuffle(rows)), (False, row_shuffle(rows))):
            theirs = flashinfer._maybe_get_cached_w3_w1_permute_indices(
                cache, tensor, EPILOGUE_TILE, num_elts_per_sf=group, is_gated_act_gemm=gated
            )
            assert torch.equal(ours, theirs)
        theirs = flashinfer.get_w2_permute_indices_with_cache(cache, tensor, EPILOGUE_TILE, num_elts_per_sf=group)
        assert torch.equal(row_shuffle(rows), theirs)


@pytest.mark.parametrize("rows", [32, 64, 96, 192, 320])
def test_row_orders_need_what_flashinfer_needs(flashinfer: ModuleType, rows: int) -> None:
    """Both refuse rows that are no multiple of 128 (FlashInfer: of block scales)."""
    with pytest.raises(ValueError, match="multiple of 128"):
        row_shuffle(rows)
    with pytest.raises(AssertionError):
        flashinfer.get_w2_permute_indices_with_cache({}, torch.zeros(rows, 8, dtype=torch.uint8), EPILOGUE_TILE, 16)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (256, 12), (384, 32)])
def test_mma_view_is_flashinfers(rows: int, columns: int) -> None:
    utils = import_quietly("flashinfer.cute_dsl.utils")
    scale = torch.randint(0, 256, (3, rows, columns), dtype=torch.uint8)
    theirs = utils.convert_sf_to_mma_layout(
        scale.reshape(3 * rows, columns), m=rows, k=columns * 16, num_groups=3, sf_vec_size=16
    )
    ours = flashinfer_cutedsl.mma_view(scale)
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)
