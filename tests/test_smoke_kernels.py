"""The calls of real kernels, without a GPU: Marlin on a CPU model of the op, FlashInfer against the installed package.

FlashInfer's public functions and CuteDSL's wrapper are the real ones; only what they launch is replaced. The rules that
their CUDA launchers check (`data/csrc` of the package) are checked here in words of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import DATA
from layout_layers import LAYOUTS, OAI, RELU2, SILU, Case, make_layer
from quietly import import_quietly
from smoke_layers import LAYERS, distance, inputs, layer_of, packed_layer, reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nvfp4prep import layouts
from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.layouts import marlin_repack, vllm_marlin
from nvfp4prep.layouts.logical import Activation
from nvfp4prep.numerics import decode_e2m1, unpack_nibbles
from nvfp4prep.smoke.check import choose_backend
from nvfp4prep.smoke.kernels import (
    BACKENDS,
    common,
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_trtllm,
    for_layout,
    marlin,
)
from nvfp4prep.smoke.layer import PackedLayer, Routing
from nvfp4prep.targets import Target

CPU = torch.device("cpu")
GOLDEN = DATA / "golden/marlin_moe_sm90.safetensors"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


# --- registry ---


def test_every_flashinfer_layout_and_marlin_have_a_backend() -> None:
    served = [layout for backend in BACKENDS.values() for layout in backend.LAYOUTS]
    assert sorted(served) == sorted({*LAYOUTS, "vllm-marlin-int4"} - {"vllm-cutlass"})
    for layout in set(layouts.LAYOUTS) - set(served):
        assert for_layout(layout) is None
    for name, backend in BACKENDS.items():
        assert name == backend.NAME
        for layout in backend.LAYOUTS:
            assert for_layout(layout) is backend


@pytest.mark.parametrize("layout", ["vllm-marlin", "vllm-marlin-int4"])
def test_one_backend_for_two_layouts(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marlin, "available", lambda: None)
    for asked in ("auto", "marlin"):
        name, run, reason, _ = choose_backend(Target(layout), asked)
        assert (name, run, reason) == ("marlin", marlin.run, None)
    with pytest.raises(UsageFault, match="--backend marlin runs vllm-marlin and vllm-marlin-int4, not moe-wna16"):
        choose_backend(Target("moe-wna16"), "marlin")
    assert choose_backend(Target("moe-wna16"), "auto")[2] == "no kernel backend for moe-wna16"


@NO_GPU
@pytest.mark.parametrize("name", BACKENDS)
def test_without_a_gpu_a_backend_says_which_one_it_needs(name: str) -> None:
    problem = BACKENDS[name].available()
    assert problem is not None
    case = LAYERS[name][0][0]
    assert problem.startswith(LAYOUTS[case.layout].REQUIRES.kernel)
    assert "this machine has no CUDA GPU" in problem
    assert ("SM75 or newer" if name == "marlin" else "SM100 (B200)") in problem
    assert BACKENDS[name].VERSIONS()["torch"] == torch.__version__

    layer = packed_layer(make_layer(case), SILU)
    x, routing = inputs(case, 3, 1, 2)
    with pytest.raises(EnvironmentFault, match="no CUDA GPU"):
        BACKENDS[name].run(layer, x, routing)


@pytest.mark.parametrize("name", ["flashinfer-trtllm", "flashinfer-cutlass", "flashinfer-cutedsl"])
def test_on_another_gpu_a_flashinfer_backend_names_both(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "capability", lambda: "sm90")
    problem = BACKENDS[name].available()
    assert problem is not None and problem.endswith("this machine's GPU is SM90")


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "capability", lambda: "sm100")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'nvfp4prep[flashinfer]'" in (flashinfer_trtllm.available() or "")
    problem = flashinfer_cutedsl.available() or ""
    assert "pip install nvidia-cutlass-dsl" in problem and "pip install triton" in problem


# --- marlin: the library ---


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "capability", lambda: "sm90")
    monkeypatch.setattr(marlin, "_registered", lambda: None)
    monkeypatch.delenv(marlin.LIBRARY_VARIABLE, raising=False)


@pytest.mark.usefixtures("hopper")
def test_marlin_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        marlin.available() == "no vLLM is installed: pip install vllm, or let NVFP4PREP_MOE_LIBRARY name its _moe_C*.so"
    )


@pytest.mark.usefixtures("hopper")
def test_marlin_library_is_found_beside_vllm_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    library = package / "_moe_C_stable_libtorch.abi3.so"
    library.write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert marlin.libraries() == (library,)
    problem = marlin.available()
    assert problem is not None and problem.startswith(f"{library} does not load with torch {torch.__version__}")
    assert "vllm" not in sys.modules


@pytest.mark.usefixtures("hopper")
def test_marlin_variable_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(marlin.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    assert marlin.available() == f"{tmp_path / 'none.so'} is no file"


def test_marlin_refuses_gpus_before_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "capability", lambda: "sm70")
    assert (marlin.available() or "").endswith("this machine's GPU is SM70")


# --- marlin: routing ---


def slow_align(ids: list[list[int]], experts: int, block: int) -> tuple[list[int], list[int], int]:
    flat = [expert for row in ids for expert in row]
    sorted_ids: list[int] = []
    blocks: list[int] = []
    for expert in range(experts):
        mine = [place for place, owner in enumerate(flat) if owner == expert]
        while mine:
            part, mine = mine[:block], mine[block:]
            sorted_ids += part + [len(flat)] * (block - len(part))
            blocks.append(expert)
    return sorted_ids, blocks, len(sorted_ids)


@pytest.mark.parametrize("block", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 130])
@pytest.mark.parametrize("experts", [1, 5, 64])
def test_moe_align_is_the_slow_one(tokens: int, experts: int, block: int) -> None:
    generator = torch.Generator().manual_seed(tokens * 100 + experts)
    for lowest in (0, -1):  # -1: choices of other ranks
        ids = torch.randint(lowest, experts, (tokens, 3), generator=generator)
        ours = marlin.moe_align(ids, experts, block)
        assert all(tensor.dtype == torch.int32 for tensor in ours)
        assert tuple(tensor.tolist() for tensor in ours[:2]) == slow_align(ids.tolist(), experts, block)[:2]
        assert ours[2].tolist() == [slow_align(ids.tolist(), experts, block)[2]]


def test_moe_align_of_nothing_local() -> None:
    sorted_ids, blocks, total = marlin.moe_align(torch.full((5, 2), -1), 4, 16)
    assert (len(sorted_ids), len(blocks), total.tolist()) == (0, 0, [0])


def test_block_rows_grow_with_the_tokens_per_expert() -> None:
    assert marlin.block_rows(24, 2, 4) == 16  # the golden layer
    sizes = [marlin.block_rows(tokens, 4, 16) for tokens in (1, 7, 64, 128, 1024)]
    assert sizes[0] == 8 and sizes[-1] == 64
    assert all(low <= high for low, high in pairwise(sizes))


# --- marlin: a CPU model of the op, with vLLM 0.24.0's schema ---

SCHEMA = (
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none,Tensor! b_q_weight, Tensor? b_bias_or_none,"
    "Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none,"
    "Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor! workspace,Tensor sorted_token_ids,"
    "Tensor! expert_ids, Tensor! num_tokens_past_padded,Tensor! topk_weights, int moe_block_size, int top_k, "
    "bool mul_topk_weights, int b_type_id,int size_m, int size_n, int size_k,bool is_full_k, bool use_atomic_add,"
    "bool use_fp32_reduce, bool is_zp_float,int thread_k, int thread_n, int blocks_per_sm) -> Tensor"
)
"""As the compiled library registers it."""

SCHEMA_033 = (
    SCHEMA.replace("moe_wna16_marlin_gemm", "moe_wna16_marlin_gemm_033")
    .replace("Tensor? g_idx_or_none, Tensor? perm_or_none, ", "")
    .replace("bool is_full_k, ", "")
)
"""vLLM 0.33.0's, by its `_custom_ops.py`: no act-order arguments."""


def marlin_weight(words: Tensor, codes: Tensor) -> Tensor:
    """What the kernel multiplies, F32 [N, K], before the global scale: e2m1 times S0E5M3 read as half · 2^-7."""
    values = decode_e2m1(unpack_nibbles(marlin_repack.unpack(words)))
    columns = codes.view(torch.uint8).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(codes.shape)
    columns = marlin_repack.restore_columns(columns, marlin_repack.GROUPED_ORDER)
    scale = (columns.to(torch.int16) << 7).view(torch.half).to(torch.float32) / 2**7
    return values * scale.T.repeat_interleave(16, 1)


def marlin_int4_weight(words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """F32 [N, K] and what columns are multiplied by after the sum, of uint4b8 and scales [K/g, N].

    Several groups: code times scale in 16-bit registers. One group: a scale per column, after the sum is 16 bits.
    """
    codes = unpack_nibbles(marlin_repack.unpack(words)).to(torch.float32) - 8
    if scale.shape[0] == 1:
        return codes, marlin_repack.restore_columns(scale, marlin_repack.SINGLE_ORDER)[0]
    columns = marlin_repack.restore_columns(scale, marlin_repack.GROUPED_ORDER)
    product = codes * columns.T.to(torch.float32).repeat_interleave(codes.shape[1] // len(scale), 1)
    return product.to(scale.dtype).to(torch.float32), None


def marlin_op(a: Tensor, c: Tensor | None, b_q_weight: Tensor, *rest: Any) -> Tensor:
    names = [name.split("=")[0].split()[-1] for name in SCHEMA.split("(")[1].split(")")[0].split(",")]
    arg = SimpleNamespace(**dict(zip(names[3:], rest, strict=True)))
    rows, columns, depth = arg.size_m, arg.size_n, arg.size_k
    block, top_k, experts = arg.moe_block_size, arg.top_k, b_q_weight.shape[0]
    # what the op checks (ops.cu), and what it takes for granted
    assert block in (8, 16, 32, 48, 64)
    assert a.shape == (rows, depth) and a.is_contiguous() and a.dtype in (torch.bfloat16, torch.half)
    assert c is not None and c.shape == (rows * top_k, columns) and c.dtype == a.dtype and c.is_contiguous()
    assert b_q_weight.dtype == torch.int32 and b_q_weight.shape == (experts, depth // 16, 2 * columns)
    assert b_q_weight.is_contiguous() and arg.b_scales.is_contiguous() and arg.b_scales.dim() == 3
    assert arg.b_scales.shape[::2] == (experts, columns)
    is_int4 = arg.b_type_id == 1125899907892224
    if is_int4:
        groups = arg.b_scales.shape[1]
        assert arg.b_scales.dtype == a.dtype and arg.global_scale is None
        assert groups == 1 or (depth % groups == 0 and depth // groups in (32, 64, 128))
    else:
        assert arg.b_type_id == 562949953487106
        assert arg.b_scales.dtype == torch.float8_e4m3fn and arg.b_scales.shape[1] == depth // 16
        assert arg.global_scale.dtype == torch.float32 and arg.global_scale.shape == (experts,)
        assert arg.global_scale.is_contiguous()
    assert arg.b_zeros_or_none is arg.a_scales is arg.g_idx_or_none is arg.perm_or_none is None
    assert arg.topk_weights.dtype == torch.float32 and arg.topk_weights.is_contiguous()
    assert arg.topk_weights.numel() == rows * top_k
    assert arg.workspace.dtype == torch.int32 and not arg.workspace.any()
    total = int(arg.num_tokens_past_padded)
    assert 0 < total == len(arg.sorted_token_ids) == block * len(arg.expert_ids)
    assert any(columns % n == 0 and depth % k == 0 for k, n in ((128, 128), (64, 128), (128, 64)))
    assert (arg.use_atomic_add, arg.use_fp32_reduce, arg.is_zp_float) == (False, True, False)
    if arg.b_bias_or_none is not None:
        assert arg.b_bias_or_none.dtype == a.dtype and arg.b_bias_or_none.shape == (experts, columns)

    for number, expert in enumerate(arg.expert_ids.tolist()):
        places = arg.sorted_token_ids[number * block : (number + 1) * block]
        places = places[places < rows * top_k].long()
        rows_in = a[places // top_k].float()
        if is_int4:
            weight, after = marlin_int4_weight(b_q_weight[expert], arg.b_scales[expert])
            out = (rows_in @ weight.T).to(a.dtype)
            out = out if after is None else out * after
        else:
            raw = rows_in @ marlin_weight(b_q_weight[expert], arg.b_scales[expert]).T
            raw = raw * 2.0**-119 if a.dtype == torch.bfloat16 else raw * 2.0**-7
            if not arg.mul_topk_weights:
                raw = raw * arg.global_scale[expert]
            out = raw.to(a.dtype)
        if arg.b_bias_or_none is not None:  # before the global scale if the weights are multiplied in
            bias = marlin_repack.restore_columns(arg.b_bias_or_none[expert], marlin_repack.SINGLE_ORDER)
            out = out + bias
        if arg.mul_topk_weights:
            factor = arg.topk_weights.flatten()[places]
            factor = factor if is_int4 else factor * arg.global_scale[expert]
            out = out * factor.to(a.dtype)[:, None]
        c[places] = out
    return c


def marlin_op_033(*args: Any) -> Tensor:
    return marlin_op(*args[:8], None, None, *args[8:20], True, *args[20:])


@pytest.fixture(scope="module")
def op() -> Iterator[None]:
    library = torch.library.Library("_moe_C", "FRAGMENT")
    for schema, function in ((SCHEMA, marlin_op), (SCHEMA_033, marlin_op_033)):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    yield
    library._destroy()


@pytest.fixture(params=["moe_wna16_marlin_gemm", "moe_wna16_marlin_gemm_033"])
def any_op(op: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = getattr(torch.ops._moe_C, request.param)
    monkeypatch.setattr(marlin, "_registered", lambda: registered)


@pytest.fixture
def on_cpu(op: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` as on a GPU, its tensors on the CPU."""
    monkeypatch.setattr(common, "capability", lambda: "sm90")
    monkeypatch.setattr(common, "device", lambda: CPU)


@pytest.mark.usefixtures("on_cpu", "any_op")
@pytest.mark.parametrize(("case", "activation"), LAYERS["marlin"], ids=lambda value: str(getattr(value, "kind", value)))
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_marlin_layer_is_the_reference(case: Case, activation: Activation, tokens: int) -> None:
    made = layer_of(case, 6, activation)
    x, routing = inputs(case, tokens, 2, 6)
    x = x * 0.25
    ours = marlin.run(packed_layer(made, activation), x, routing)
    assert ours.dtype == torch.float32 and ours.shape == x.shape
    assert distance(ours, reference(made, activation, x, routing)) < 0.012  # BF16 rounds to 2^-9 five times


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("biased", [False, True])
def test_marlin_ranks_add_up(biased: bool) -> None:
    case = Case("vllm-marlin", "vllm", 128, 64, True, biased=biased)
    made = make_layer(case, experts=8, activation=OAI)
    x, routing = inputs(case, 9, 3, 8)
    routing.ids[0] = torch.tensor([0, 1, 2])  # a token with nothing for the last rank
    whole = marlin.run(packed_layer(made, OAI), x, routing)
    ranks = [marlin.run(packed_layer(made, OAI, ep=4, rank=rank), x, routing) for rank in range(4)]
    assert not ranks[3][0].any()
    torch.testing.assert_close(sum(ranks), whole, rtol=2**-7, atol=0.01)  # ranks are rounded to BF16 before they add up


@pytest.mark.usefixtures("on_cpu")
def test_marlin_rank_without_tokens_gives_zeros() -> None:
    case = Case("vllm-marlin", "vllm", 128, 64, True)
    layer = packed_layer(make_layer(case, experts=4), SILU, ep=2, rank=1)
    x, routing = inputs(case, 5, 2, 2)
    assert torch.equal(marlin.run(layer, x, routing), torch.zeros(x.shape))


@pytest.mark.usefixtures("op")
def test_marlin_weights_biased_rows_itself() -> None:
    """The op adds the bias to raw accumulators if it is told to multiply by the routing weights."""
    case = Case("vllm-marlin", "vllm", 128, 64, True, biased=True)
    made = make_layer(case, experts=4, activation=OAI)
    layer = packed_layer(made, OAI)
    x, routing = inputs(case, 5, 2, 4)
    by_kernel = marlin.stages(layer, x, routing, CPU, kernel_weighs=True).gemm2.float()
    assert by_kernel.abs().max() > 1e20
    ours = marlin.stages(layer, x, routing, CPU).gemm2.float()
    assert ours.abs().max() < 1e6


@pytest.mark.usefixtures("op")
def test_marlin_golden_on_the_model_of_the_op() -> None:
    """The harness for the GPU; how near it comes here says that the op's model is right."""
    report = marlin.reproduce_golden(GOLDEN, CPU)
    for case in marlin.GOLDEN_CASES:
        assert report["cases"][case]["block"] == 16
        for stages in report["cases"][case]["blocks"].values():
            distances = {stage: entry["relative_l2"] for stage, entry in stages.items()}
            assert distances.pop("sum to F32 reference") < 5.5e-3
            assert max(distances.values()) < 2e-4, case  # all bits, but for the order of F32 sums


def test_marlin_activation_is_goldens() -> None:
    tensors = marlin._read(GOLDEN)
    for case in marlin.GOLDEN_CASES:
        ours = marlin.activate(tensors[f"{case}.gemm1_out"], SILU, True)
        assert torch.equal(ours, tensors[f"{case}.act_out"])


def test_marlin_names_an_argument_it_does_not_know() -> None:
    schema = torch._C.parse_schema("gemm(Tensor a, int warp_speed, int spare=3) -> Tensor")
    with pytest.raises(EnvironmentFault, match=r"takes warp_speed, unknown to nvfp4prep \(tested: vLLM 0.24.0\)"):
        marlin.call_arguments(schema, {"a": torch.zeros(1)})
    schema = torch._C.parse_schema("gemm(Tensor a, bool is_k_full, int b_q_type_id, int spare=3) -> Tensor")
    values = {"a": torch.zeros(1), "is_full_k": True, "b_type_id": 5, "not_in_this_version": 1}
    assert set(marlin.call_arguments(schema, values)) == {"a", "is_k_full", "b_q_type_id"}


# --- FlashInfer: the installed package ---


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    return import_quietly("flashinfer")


@pytest.fixture(scope="module")
def core(flashinfer: ModuleType) -> ModuleType:
    return import_quietly("flashinfer.fused_moe.core")


def fake_quantize(
    x: Tensor,
    global_scale: Tensor,
    *,
    sf_vec_size: int,
    sf_use_ue8m0: bool,
    is_sf_swizzled_layout: bool,
    nvfp4_4over6: None,
) -> tuple[Tensor, Tensor]:
    """fp4_quantize's checks and shapes (fp4Quantize.cpp, fp4_quantization.py)."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 16 == 0
    assert global_scale.dtype == torch.float32 and global_scale.shape == (1,)
    assert (sf_vec_size, sf_use_ue8m0, nvfp4_4over6) == (16, False, None)
    rows, columns = x.shape[0], x.shape[1] // 16
    if is_sf_swizzled_layout:
        rows, columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    return torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8), torch.zeros(rows, columns, dtype=torch.uint8)


@pytest.fixture
def quantizer(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    names = inspect.signature(flashinfer.fp4_quantize).parameters
    assert set(inspect.signature(fake_quantize).parameters) - {"x"} <= set(names) and next(iter(names)) == "input"
    monkeypatch.setattr(flashinfer, "fp4_quantize", fake_quantize)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 256), (7, 448), (130, 512)])
def test_quantiser_model_has_the_shapes_of_flashinfers(
    flashinfer: ModuleType, tokens: int, hidden: int, swizzled: bool
) -> None:
    ours = fake_quantize(
        torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        torch.ones(1),
        sf_vec_size=16,
        sf_use_ue8m0=False,
        is_sf_swizzled_layout=swizzled,
        nvfp4_4over6=None,
    )
    with FakeTensorMode():
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        theirs = torch.ops.flashinfer.fp4_quantize(x, torch.empty(1), 16, False, swizzled)
    assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in theirs]


TOKENS, TOP_K, EXPERTS = 7, 3, 8


@pytest.fixture(params=[1, 2], ids=["ep1", "ep2"])
def ep(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def rank_of(case: Case, activation: Activation, ep: int) -> tuple[PackedLayer, Tensor, Routing]:
    """The last EP rank of a layer of 8 experts, and inputs."""
    layer = packed_layer(make_layer(case, experts=EXPERTS, activation=activation), activation, ep, ep - 1)
    return layer, *inputs(case, TOKENS, TOP_K, EXPERTS)


def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous() and tensor.device == CPU


def check_gated_and_plain_scalars(values: dict[str, Any], names: tuple[str, ...], experts: int) -> None:
    for name in names:
        if values[name] is not None:
            check(values[name], torch.float32, (experts,))
            assert values[name].isfinite().all()


def cases(name: str) -> Any:
    return pytest.mark.parametrize(
        ("case", "activation"), LAYERS[name], ids=lambda value: str(getattr(value, "kind", value))
    )


def bound(function: Callable[..., Any], call: Mapping[str, Any]) -> Mapping[str, Any]:
    """All arguments that the installed function gets, its defaults too."""
    found = inspect.signature(function).bind(**call)
    found.apply_defaults()
    return found.arguments


# --- flashinfer-trtllm ---


@cases("flashinfer-trtllm")
@pytest.mark.usefixtures("quantizer")
def test_trtllm_call(
    case: Case, activation: Activation, ep: int, core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, routing = rank_of(case, activation, ep)
    call = flashinfer_trtllm.arguments(layer, x, routing, CPU)
    a = bound(core.trtllm_fp4_block_scale_routed_moe, call)
    geometry, local = layer.geometry, EXPERTS // ep
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate

    # core.py's docstring; launcher: check_routing_common, FP4BlockScaleLauncher::check_routing and check_moe
    ids, weights = a["topk_ids"]
    check(ids, torch.int32, (TOKENS, TOP_K))
    check(weights, torch.float32, (TOKENS, TOP_K))
    assert torch.equal(ids.long(), routing.ids)  # global ids
    check(a["hidden_states"], torch.uint8, (TOKENS, hidden // 2))
    check(a["hidden_states_scale"], torch.float8_e4m3fn, (TOKENS, hidden // 16))
    check(a["gemm1_weights"], torch.uint8, (local, rows, hidden // 2))
    check(a["gemm1_weights_scale"], torch.float8_e4m3fn, (local, rows, hidden // 16))
    check(a["gemm2_weights"], torch.uint8, (local, hidden, inner // 2))
    check(a["gemm2_weights_scale"], torch.float8_e4m3fn, (local, hidden, inner // 16))
    scalars = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    assert all(a[name] is not None for name in scalars)  # required for E2m1 activations
    check_gated_and_plain_scalars(a, (*scalars, "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), local)
    if case.biased:
        check(a["gemm1_bias"], torch.float32, (local, rows))
        check(a["gemm2_bias"], torch.float32, (local, hidden))
    assert a["num_experts"] == EXPERTS and a["top_k"] == TOP_K
    assert (a["local_expert_offset"], a["local_num_experts"]) == (EXPERTS - local, local)
    assert a["intermediate_size"] == inner
    assert a["activation_type"] == (6 if activation is RELU2 else 3) and isinstance(a["activation_type"], int)
    assert a["routing_bias"] is a["routed_scaling_factor"] is a["per_token_scale"] is None
    assert a["do_finalize"] is True

    # what decides between NVFP4 and MXFP4, here and in the launcher
    enums = import_quietly("flashinfer.tllm_enums")
    assert a["hidden_states_scale_layout"] == enums.SfLayout.layout_linear
    for values, scale in (("hidden_states", "hidden_states_scale"), ("gemm1_weights", "gemm1_weights_scale")):
        assert enums.deduce_trtllm_gen_tensor_dtype(a[values], a[scale]) == enums.DtypeTrtllmGen.E2m1
    assert local * rows * hidden // a["gemm1_weights_scale"].numel() == 16

    # the real Python function, down to what it launches
    launched: list[tuple[Any, ...]] = []
    native = SimpleNamespace(trtllm_fp4_block_scale_moe=lambda *args: launched.append(args))
    monkeypatch.setattr(core, "get_trtllm_moe_sm100_module", lambda: native)
    core.trtllm_fp4_block_scale_routed_moe(**call)
    assert launched[0][0] == enums.RoutingInputMode.UnpackedPrecomputed
    assert launched[0][2] is ids and launched[0][3] is weights


# --- flashinfer-cutlass ---


@cases("flashinfer-cutlass")
@pytest.mark.usefixtures("quantizer")
def test_cutlass_call(
    case: Case, activation: Activation, ep: int, core: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, routing = rank_of(case, activation, ep)
    call = flashinfer_cutlass.arguments(layer, x, routing, CPU)
    a = bound(core.cutlass_fused_moe, call)
    geometry, local = layer.geometry, EXPERTS // ep
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate
    assert hidden == case.hidden

    # flashinfer_cutlass_fused_moe_binding.cu: runMoe, getQuantParams for NVFP4
    check(a["input"], torch.uint8, (TOKENS, hidden // 2))
    assert a["swizzled_input_sf"] is True
    check(a["input_sf"], torch.uint8, (128, -(-(hidden // 16) // 4) * 4))
    check(a["token_selected_experts"], torch.int32, (TOKENS, TOP_K))
    assert torch.equal(a["token_selected_experts"].long(), routing.ids)
    check(a["token_final_scales"], torch.float32, (TOKENS, TOP_K))
    check(a["fc1_expert_weights"], torch.int64, (local, rows, hidden // 16))
    check(a["fc2_expert_weights"], torch.int64, (local, hidden, inner // 16))
    assert rows == (2 if case.gated else 1) * a["fc2_expert_weights"].shape[2] * 16
    assert hidden % 16 == inner % 16 == 0
    halves = 2 if case.gated else 1
    act1, block1, alpha1, act2, block2, alpha2 = a["quant_scales"]
    for scale in (act1, alpha1, act2, alpha2):
        check(scale, torch.float32, (local,))
    align = lambda value, multiple: -(-value // multiple) * multiple  # noqa: E731
    check(block1, torch.int32, (local, halves * align(inner, 64), align(hidden, 64) // 64))
    check(block2, torch.int32, (local, align(hidden, 128), align(inner, 64) // 64))
    assert a["output_dtype"] == torch.bfloat16
    if case.biased:
        check(a["fc1_expert_biases"], torch.bfloat16, (local, rows))
        check(a["fc2_expert_biases"], torch.bfloat16, (local, hidden))
    else:
        assert a["fc1_expert_biases"] is a["fc2_expert_biases"] is None
    names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    check_gated_and_plain_scalars(a, names, local)
    assert all((a[name] is not None) == (activation is OAI) for name in names)
    assert (a["tp_size"], a["tp_rank"], a["ep_size"], a["ep_rank"]) == (1, 0, ep, ep - 1)
    assert a["activation_type"] == (6 if activation is RELU2 else 3)

    # the real Python function, down to what it launches
    launched: list[dict[str, Any]] = []
    native = SimpleNamespace(cutlass_fused_moe=lambda *args, **named: launched.append({"args": args, **named}))
    monkeypatch.setattr(core, "get_compute_capability", lambda device: (10, 0))
    monkeypatch.setattr(core, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(core, "get_cutlass_fused_moe_module", lambda arch: native)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    core.cutlass_fused_moe(**call)
    output = launched[0]["args"][0]
    check(output, torch.bfloat16, (TOKENS, hidden))


# --- flashinfer-cutedsl ---


@pytest.fixture(scope="module")
def cutedsl(flashinfer: ModuleType) -> ModuleType:
    """The real module, imported with the real nvidia-cutlass-dsl.

    Its package's __init__ also imports SM12x kernels that need triton, which CPU installations don't have; the module
    itself does not, so without triton it is imported past that __init__.
    """
    package = "flashinfer.fused_moe.cute_dsl"
    if importlib.util.find_spec("triton") is None:
        for name in [name for name in sys.modules if name.startswith(package)]:  # left by the failed import
            del sys.modules[name]
        stand_in = types.ModuleType(package)
        stand_in.__path__ = [str(Path(flashinfer.__file__).parent / "fused_moe" / "cute_dsl")]
        sys.modules[package] = stand_in
    return import_quietly(f"{package}.fused_moe")


@cases("flashinfer-cutedsl")
@pytest.mark.usefixtures("quantizer")
def test_cutedsl_call_of_the_imported_wrapper(
    case: Case, activation: Activation, ep: int, cutedsl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, routing = rank_of(case, activation, ep)
    made = flashinfer_cutedsl.wrapper_arguments(layer, routing, CPU)
    call = flashinfer_cutedsl.arguments(layer, x, routing, CPU)
    wrapper = cutedsl.CuteDslMoEWrapper(**made)  # its own checks of activation, mode and parameters
    inspect.signature(wrapper.run).bind(**call)
    geometry, local = layer.geometry, EXPERTS // ep
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate

    launched: list[dict[str, Any]] = []

    def core_impl(**named: Any) -> Tensor:
        launched.append(named)
        output: Tensor = named["moe_output"]
        return output

    inspect.signature(cutedsl._moe_core_impl)  # it takes names only from here on
    monkeypatch.setattr(cutedsl, "_moe_core_impl", core_impl)
    result = wrapper.run(**call, tactic=wrapper.get_valid_tactics()[0])
    check(result, torch.bfloat16, (TOKENS, hidden))

    a = launched[0]
    check(a["x"], torch.uint8, (TOKENS, hidden // 2))
    check(a["x_sf"], torch.uint8, (TOKENS, hidden // 16, 1))
    check(a["token_selected_experts"], torch.int32, (TOKENS, TOP_K))
    assert torch.equal(a["token_selected_experts"].long(), routing.ids)
    check(a["token_final_scales"], torch.float32, (TOKENS, TOP_K))
    check(a["w1_weight"], torch.uint8, (local, rows, hidden // 2))
    check(a["w2_weight"], torch.uint8, (local, hidden, inner // 2))
    assert rows % 128 == 0  # "GEMM1 output dim must be a multiple of 128"
    assert a["w1_weight"].shape[2] == a["x"].shape[1]
    for scale, m, k in ((a["w1_weight_sf"], rows, hidden), (a["w2_weight_sf"], hidden, inner)):
        assert scale.shape == (32, 4, -(-m // 128), 4, -(-k // 64), local)
        # a view of contiguous bytes, expert by expert, tile by tile: only its address is passed on
        assert scale.permute(5, 2, 4, 0, 1, 3).is_contiguous() and scale.dtype == torch.uint8
    for name, shape in (("w1_alpha", (local,)), ("w2_alpha", (local,)), ("fc2_input_scale", (1,))):
        check(a[name], torch.float32, shape)
    assert (a["num_experts"], a["num_local_experts"], a["local_expert_offset"]) == (EXPERTS, local, EXPERTS - local)
    assert a["top_k"] == TOP_K
    assert a["activation_type"] == (6 if activation is RELU2 else 3)
    enums = import_quietly("flashinfer.tllm_enums")
    alpha, beta, limit = (a[f"swiglu_{name}"] for name in ("alpha", "beta", "limit"))
    defaults = (enums.DEFAULT_SWIGLU_ALPHA, enums.DEFAULT_SWIGLU_BETA, enums.DEFAULT_SWIGLU_LIMIT)
    assert (alpha, beta, limit) == ((1.702, 1.0, 7.0) if activation is OAI else defaults)


# --- all three: from `run` to the cropped output ---


@pytest.mark.usefixtures("quantizer")
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "marlin"])
def test_run_crops_the_padded_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = BACKENDS[name]
    case, activation = LAYERS[name][0]
    layer, x, routing = rank_of(case, activation, 1)
    padded = torch.arange(float(layer.geometry.padded_hidden)).expand(TOKENS, -1).to(torch.bfloat16)

    class Wrapper:
        def __init__(self, **named: Any) -> None: ...

        def run(self, **named: Any) -> Tensor:
            return padded

    kernel: Any = Wrapper if name == "flashinfer-cutedsl" else lambda **named: [padded]
    monkeypatch.setattr(backend, "available", lambda: None)
    monkeypatch.setattr(common, "device", lambda: CPU)
    monkeypatch.setattr(backend, "_kernel", lambda module: kernel)
    output = backend.run(layer, x, routing)
    assert output.dtype == torch.float32
    assert torch.equal(output, padded[:, : case.hidden].float())


def test_padded_columns_are_zero() -> None:
    case = Case("flashinfer-trtllm", "vllm", 448, 96, True)
    layer, x, _ = rank_of(case, SILU, 1)
    padded = common.padded_input(layer, x, CPU, torch.bfloat16)
    assert padded.shape == (TOKENS, 512) and not padded[:, 448:].any() and torch.equal(padded[:, :448], x)
    with pytest.raises(ValueError, match=r"x must be \[tokens, 448\]"):
        common.padded_input(layer, padded, CPU, torch.bfloat16)


def test_vllm_marlin_kernel_is_the_op() -> None:
    assert vllm_marlin.REQUIRES.kernel in SCHEMA
