"""marlin: the op `torch.ops._moe_C.moe_wna16_marlin_gemm` of an installed vLLM, on SM75 and newer.

Only vLLM's compiled library is loaded: the file that NVFP4PREP_MOE_LIBRARY names, else `_moe_C*.so` in the folder of
the package `vllm`, which is not imported. Two calls make a layer, as vLLM's `fused_marlin_moe` makes them: GEMM1 gives
one row per token and choice, the activation is torch's, GEMM2 multiplies by the routing weight, the sum is made in F32
and rounded to 16 bits. The op's arguments are passed by name, by the schema that the library registers: it differs
between versions.

With biases the routing weight is applied here, after GEMM2, not by the kernel: told to multiply, it adds the bias to
the raw accumulator and multiplies both by weight · global scale (vLLM's `marlin_template.h`, `write_result`), so that
the bias comes out about 2^106 times too large. Without biases the two orders mean the same.

int4 goes through the same op with another type id and without a global scale. The op takes the size of a group from
the shape of the scales, [E, K/g, N]; one group for all of K is a scale per column.
Sources: vLLM 0.24.0 `marlin_moe.py` and the op's schema, checks and kernel in `csrc/.../marlin_moe_wna16`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.layouts import int4, vllm_marlin, vllm_marlin_int4
from nvfp4prep.layouts.logical import Activation, Engine, Expert, LayerFacts, Matrix, Scales, plan_geometry
from nvfp4prep.smoke.kernels import common
from nvfp4prep.smoke.kernels.golden import case_of, difference, read
from nvfp4prep.smoke.layer import PackedLayer, Routing
from nvfp4prep.targets import Target

NAME = "marlin"
LAYOUTS: tuple[str, ...] = (vllm_marlin.NAME, vllm_marlin_int4.NAME)
LIBRARY_VARIABLE = "NVFP4PREP_MOE_LIBRARY"
TESTED = "vLLM 0.24.0"

_TYPE_IDS: Mapping[str, int] = {vllm_marlin.NAME: 562949953487106, vllm_marlin_int4.NAME: 1125899907892224}
"""vLLM's ScalarType ids of float4_e2m1f and uint4b8, by layout."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# --- the library ------------------------------------------------------------------------------------------------------


def _registered() -> Any:
    """The op if a library has registered it, else None."""
    return getattr(torch.ops._moe_C, "moe_wna16_marlin_gemm", None)


def libraries() -> tuple[Path, ...]:
    """Files to load, in order of preference; none if no vLLM is installed and the variable is not set."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return (Path(named),)
    spec = importlib.util.find_spec("vllm")  # a top-level name: nothing is imported
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    return tuple(path for folder in folders for path in sorted(Path(folder).glob("_moe_C*.so")))


def _load() -> str | None:
    """Load the op; None if it is there, else why not."""
    if _registered() is not None:
        return None
    files = libraries()
    if not files:
        return f"no vLLM is installed: pip install vllm, or let {LIBRARY_VARIABLE} name its _moe_C*.so"
    problems = []
    for path in files:
        if not path.is_file():
            problems.append(f"{path} is no file")
            continue
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            problems.append(f"{path} does not load with torch {torch.__version__}: {error}")
            continue
        if _registered() is not None:
            return None
        problems.append(f"{path} has no moe_wna16_marlin_gemm")
    return "; ".join(problems)


def available() -> str | None:
    """None if the kernel can run here, else why not and what to install. Loads the library."""
    present = common.capability()
    if present is None or int(present[2:]) < 75:
        return f"{vllm_marlin.REQUIRES.kernel} needs a GPU of SM75 or newer; {common.found_instead(present)}"
    return _load()


def VERSIONS() -> dict[str, str]:
    """The GPU, the libraries, and the file the op came from."""
    table = common.gpu_versions("vllm")
    files = libraries()
    return table | ({"library": str(files[0])} if files else {})


# --- routing as the kernel reads it -----------------------------------------------------------------------------------


def moe_align(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices sorted by expert, each expert's run filled up to whole blocks.

    Args:
        ids: [T, k] local expert ids, -1 for a choice that another rank serves.
        experts: how many are local.
        block: rows per block.

    Returns:
        sorted_token_ids I32 [P]: positions in the flat [T·k], T·k for filling; expert_ids I32 [P / block];
        num_tokens_post_padded I32 [1] = P.
    """
    flat = ids.flatten()
    chosen = torch.nonzero(flat >= 0).flatten()
    chosen = chosen[torch.argsort(flat[chosen], stable=True)]
    owners = flat[chosen].long()
    counts = torch.bincount(owners, minlength=experts)
    filled = (counts + block - 1) // block * block
    total = int(filled.sum())
    first, start = counts.cumsum(0) - counts, filled.cumsum(0) - filled
    places = start[owners] + torch.arange(len(owners), device=ids.device) - first[owners]
    sorted_ids = torch.full((total,), flat.numel(), dtype=torch.int32, device=ids.device)
    sorted_ids[places] = chosen.to(torch.int32)
    blocks = torch.arange(experts, dtype=torch.int32, device=ids.device).repeat_interleave(filled // block)
    return sorted_ids, blocks, torch.tensor([total], dtype=torch.int32, device=ids.device)


def block_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows per block as vLLM chooses: the first size that an average expert fills to less than 90 %, at most 64."""
    sizes = (8, 16, 32, 48, 64)
    return next((size for size in sizes if tokens * top_k / experts / size < 0.9), sizes[-1])


# --- the call ---------------------------------------------------------------------------------------------------------

_SPELLINGS = {"is_k_full": "is_full_k", "b_q_type_id": "b_type_id", "b_q_type": "b_type_id"}


def call_arguments(schema: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that this schema names, out of all that any version takes. Names go without "_or_none".

    Raises:
        EnvironmentFault: the schema has an argument that this project does not know.
    """
    arguments, unknown = {}, []
    for argument in schema.arguments:
        name = argument.name.removesuffix("_or_none")
        name = _SPELLINGS.get(name, name)
        if name in values:
            arguments[argument.name] = values[name]
        elif not argument.has_default_value():
            unknown.append(argument.name)
    if unknown:
        raise EnvironmentFault(
            f"moe_wna16_marlin_gemm of this vLLM takes {', '.join(unknown)}, unknown to nvfp4prep (tested: {TESTED})"
        )
    return arguments


def _gemm(values: Mapping[str, Any]) -> None:
    op = _registered().default
    op(**call_arguments(op._schema, values))


@dataclass(frozen=True)
class Stages:
    """What a layer's two calls gave, in the activations' dtype: one row per token and choice, in that order.

    Rows of choices that other ranks serve are 0 in `gemm2` and NaN in `gemm1`; so would be one that a kernel skipped.
    """

    gemm1: Tensor
    activated: Tensor
    gemm2: Tensor


def stages(
    layer: PackedLayer,
    x: Tensor,
    routing: Routing,
    where: torch.device,
    block: int | None = None,
    kernel_weighs: bool | None = None,
) -> Stages:
    """Both GEMMs of a layer. `kernel_weighs`: GEMM2 multiplies by the routing weights (default: unless biased)."""
    dtype = _DTYPES[layer.facts.activation_dtype]
    packed, scalars = common.moved(layer.packed, where), common.moved(layer.scalars, where)
    tensors = layer.target.module.kernel_args(packed, scalars, {})
    hidden_states = common.padded_input(layer, x, where, dtype)
    weights = common.expert_weights(routing, where)
    tokens, top_k = weights.shape
    geometry = layer.geometry
    local = _local_ids(layer, routing).to(where)
    block = block or block_rows(tokens, top_k, len(layer.experts))
    sorted_ids, expert_ids, total = moe_align(local, len(layer.experts), block)
    if kernel_weighs is None:
        kernel_weighs = tensors.get("bias2") is None
    shared = {
        "a_scales": None,
        "b_zeros": None,
        "g_idx": None,
        "perm": None,
        "sorted_token_ids": sorted_ids,
        "expert_ids": expert_ids,
        "num_tokens_past_padded": total,
        "topk_weights": weights,
        "moe_block_size": block,
        "b_type_id": _TYPE_IDS[layer.target.layout],
        "is_full_k": True,
        "use_atomic_add": False,
        "use_fp32_reduce": True,
        "is_zp_float": False,
        "thread_k": -1,
        "thread_n": -1,
        "blocks_per_sm": -1,
    }

    def gemm(number: int, a: Tensor, columns: int, top_k: int, mul_topk_weights: bool) -> Tensor:
        bias = tensors.get(f"bias{number}")
        output = torch.full((tokens * weights.shape[1], columns), torch.nan, dtype=dtype, device=where)
        if len(sorted_ids) == 0:  # nothing for this rank: the kernel is not made for no blocks
            return output
        values = {
            "a": a,
            "c": output,
            "b_q_weight": tensors[f"w{number}"],
            "b_bias": None if bias is None else bias.to(dtype),
            "b_scales": tensors[f"w{number}_scale"],
            "global_scale": tensors.get(f"global_scale{number}"),
            "workspace": _workspace(where),
            "top_k": top_k,
            "mul_topk_weights": mul_topk_weights,
            "size_m": a.shape[0],
            "size_n": columns,
            "size_k": a.shape[1],
        }
        _gemm(shared | values)
        return output

    gemm1 = gemm(1, hidden_states, geometry.w13_rows, top_k, False)
    activated = activate(gemm1, layer.activation, geometry.gated, layer.target.engine)
    gemm2 = gemm(2, activated, geometry.padded_hidden, 1, kernel_weighs)
    if not kernel_weighs:
        gemm2 = gemm2 * weights.view(-1, 1)
    gemm2[local.flatten() < 0] = 0
    return Stages(gemm1, activated, gemm2)


def _local_ids(layer: PackedLayer, routing: Routing) -> Tensor:
    ids = routing.ids.to(torch.int32) - layer.experts.start
    return ids.masked_fill((ids < 0) | (ids >= len(layer.experts)), -1)


def _workspace(where: torch.device) -> Tensor:
    """Zeroed locks, as many as the op asks at most: four per multiprocessor."""
    processors = torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 1
    return torch.zeros(4 * processors, dtype=torch.int32, device=where)


def activate(rows: Tensor, activation: Activation, gated: bool, engine: Engine = "vllm") -> Tensor:
    """The function between the GEMMs, gate half first, in the rows' dtype.

    vLLM's plain silu rounds silu(gate) before it multiplies; its clamped forms and SGLang's silu round once, at the
    end.
    """
    if not gated:
        return torch.relu(rows).square()
    gate, up = rows.chunk(2, 1)
    if engine == "vllm" and activation.kind == "silu" and activation.limit is None:
        return (silu(gate) * up).contiguous()
    gate, up = gate.to(torch.float32), up.to(torch.float32)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    alpha = 1.0 if activation.alpha is None else activation.alpha
    beta = 0.0 if activation.beta is None else activation.beta
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(rows.dtype).contiguous()


def run(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """F32 [T, H], the weighted sum over the rank's experts, on x's device: summed in F32, rounded to 16 bits once."""
    common.require(available())
    if common.capability() == "sm75" and layer.facts.activation_dtype == "bf16":
        raise EnvironmentFault("SM75 GPUs have no BF16: this layer is packed for BF16 activations")
    rows = stages(layer, x, routing, common.device()).gemm2
    total = rows.view(*routing.ids.shape, -1).to(torch.float32).sum(1)
    return common.cropped_output(layer, total.to(_DTYPES[layer.facts.activation_dtype]), x)


# --- golden vectors ---------------------------------------------------------------------------------------------------

GOLDEN_CASES = ("nvfp4", "nvfp4_rescaled", "int4_g128", "int4_g128_single")


def golden_layer(golden: Mapping[str, Tensor]) -> tuple[PackedLayer, Tensor, Routing]:
    """A golden case's layer, packed from its logical tensors by this project, its x and its routing.

    NVFP4 has E4M3 codes and a global scale, int4 BF16 group scales and codes stored + 8.
    """
    is_int4 = golden["w13_scale"].is_floating_point()
    nibbles13, scale13 = golden["w13_packed_nibbles"], golden["w13_scale"]
    nibbles2, scale2 = golden["w2_packed_nibbles"], golden["w2_scale"]
    count, half, hidden = len(nibbles13), nibbles13.shape[1] // 2, 2 * nibbles13.shape[2]
    group = hidden // scale13.shape[2]
    target = Target(vllm_marlin_int4.NAME if is_int4 else vllm_marlin.NAME)
    facts, ones = LayerFacts(), torch.ones(count, dtype=torch.float32)
    scales = Scales(ones, ones, ones, None, None)
    if not is_int4:
        facts = vllm_marlin.with_factors(facts, int(scale13.max()), int(scale2.max()))
        scales = Scales(golden["w13_global_scale"], golden["w13_global_scale"], golden["w2_global_scale"], None, None)
    geometry = plan_geometry(
        target.module.REQUIRES,
        "vllm",
        experts=count,
        hidden=hidden,
        intermediate=half,
        gated=True,
        biased=False,
        group=group,
    )
    packed = []
    for e in range(count):
        gate = Matrix(nibbles13[e, :half], scale13[e, :half], group)
        up = Matrix(nibbles13[e, half:], scale13[e, half:], group)
        expert = Expert(gate, up, Matrix(nibbles2[e], scale2[e], group))
        packed.append(target.module.pack(int4.with_offset(expert) if is_int4 else expert, geometry, facts))
    activation = Activation("silu")
    layer = PackedLayer(
        target=target,
        geometry=geometry,
        activation=activation,
        facts=facts,
        experts=range(count),
        packed={name: torch.stack([tensors[name] for tensors in packed]) for name in packed[0]},
        scalars=target.module.scalars(scales, activation, facts),
        scales=scales,
    )
    return layer, golden["x"], Routing(golden["topk_ids"].long(), golden["topk_weights"])


def reproduce_golden(path: Path, where: torch.device | None = None) -> dict[str, Any]:
    """This project's packed bytes on the kernel, against what the kernel once gave for vLLM's own packing.

    Per case, at the block size that vLLM would choose and at all others: how many elements of each stage differ, and
    relative L2. `ok`: at vLLM's block size no stage is further than 1e-3 from the golden one (BF16 rounds to 2^-9 at
    most; a layout error gives about 1), and the result is as far from the F32 reference as golden's.
    """
    where = where or common.device()
    tensors = read(path)
    report: dict[str, Any] = {"file": path.name, "cases": {}, "ok": True}
    for case in GOLDEN_CASES:
        golden = case_of(tensors, case)
        layer, x, routing = golden_layer(golden)
        chosen = block_rows(len(x), routing.ids.shape[1], len(layer.experts))
        blocks = {}
        for block in (8, 16, 32, 48, 64):
            result = stages(layer, x, routing, where, block)
            total = result.gemm2.view(*routing.ids.shape, -1).to(torch.float32).sum(1)
            blocks[block] = {
                "gemm1": difference(result.gemm1, golden["gemm1_out"]),
                "activated": difference(result.activated, golden["act_out"]),
                "gemm2": difference(result.gemm2, golden["gemm2_out"]),
                "sum": difference(total.to(torch.bfloat16), golden["out"]),
                "sum to F32 reference": difference(total, golden["ref"]),
            }
        distance = difference(golden["out"], golden["ref"])["relative_l2"]
        mine = blocks[chosen]
        ok = all(mine[stage]["relative_l2"] < 1e-3 for stage in ("gemm1", "activated", "gemm2", "sum"))
        ok = ok and mine["sum to F32 reference"]["relative_l2"] < 1.1 * distance
        report["cases"][case] = {"ok": ok, "block": chosen, "golden to F32 reference": distance, "blocks": blocks}
        report["ok"] &= ok
    return report
