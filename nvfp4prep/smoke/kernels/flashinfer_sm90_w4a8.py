"""flashinfer-sm90-w4a8: FlashInfer's `cutlass_fused_moe` with int4 weights and E4M3 activations (SM90).

x goes in as BF16: the kernel multiplies it by `fc1_act_scale`, quantises, and does the same between the GEMMs. No
tactic is chosen, so its default runs. It reads one factor per input column for all experts, and alphas per expert.
Source: FlashInfer 0.7.2.post1 `fused_moe/core.py`, `flashinfer_cutlass_fused_moe_binding.cu` (`isInt4Quant`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import flashinfer_sm90_w4a8 as layout
from nvfp4prep.layouts.logical import Activation, Expert, LayerFacts, Matrix, Scales, plan_geometry
from nvfp4prep.smoke.kernels import common
from nvfp4prep.smoke.kernels.golden import case_of, difference, read
from nvfp4prep.smoke.layer import PackedLayer, Routing
from nvfp4prep.targets import Target

NAME = "flashinfer-sm90-w4a8"
LAYOUTS: tuple[str, ...] = (layout.NAME,)


def available() -> str | None:
    """None if the kernel can run here, else why not and what to install."""
    return common.flashinfer_problem(layout.REQUIRES.kernel, layout.REQUIRES.gpus, common.FLASHINFER)


def VERSIONS() -> dict[str, str]:
    """The GPU and the libraries."""
    return common.gpu_versions("flashinfer-python")


def run(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """F32 [T, H], the weighted sum over the rank's experts, on x's device."""
    common.require(available())
    result = _kernel("flashinfer.fused_moe")(**arguments(layer, x, routing, common.device()))
    return common.cropped_output(layer, common.only_output(result), x)


def arguments(layer: PackedLayer, x: Tensor, routing: Routing, where: torch.device) -> dict[str, Any]:
    """Every argument of the call, by name."""
    activations = {
        "input": common.padded_input(layer, x, where, torch.bfloat16),
        "token_selected_experts": common.expert_ids(routing, where),
        "token_final_scales": common.expert_weights(routing, where),
        "output_dtype": torch.bfloat16,
        "tp_size": 1,
        "tp_rank": 0,
        "ep_size": layer.target.ep,
        "ep_rank": layer.experts.start // len(layer.experts),
        "activation_type": common.activation_type(layer),
    }
    return layout.kernel_args(common.moved(layer.packed, where), common.moved(layer.scalars, where), activations)


def _kernel(module: str) -> Any:
    return importlib.import_module(module).cutlass_fused_moe


# --- golden vectors ---------------------------------------------------------------------------------------------------


def golden_layer(golden: Mapping[str, Tensor]) -> tuple[PackedLayer, Tensor, Routing]:
    """The golden layer, packed from its logical tensors ([up; gate], signed) by this project, its x and its routing.

    Its multipliers are the golden ones: they were divided by scales that had been rounded to BF16, and half a step of
    BF16 moves many E4M3 codes.
    """
    q13, s13, q2, s2 = (golden[name] for name in ("q13", "s13", "q2", "s2"))
    count, half, group = len(q13), q13.shape[1] // 2, 128
    hidden = 2 * q13.shape[2]
    target, activation, facts = Target(layout.NAME, "flashinfer"), Activation("silu"), LayerFacts("flashinfer")
    geometry = plan_geometry(
        layout.REQUIRES,
        "flashinfer",
        experts=count,
        hidden=hidden,
        intermediate=half,
        gated=True,
        biased=False,
        group=group,
    )
    packed = []
    for e in range(count):
        up, gate = (Matrix(q13[e, rows], s13[e, rows], group) for rows in (slice(half), slice(half, None)))
        packed.append(layout.pack(Expert(gate, up, Matrix(q2[e], s2[e], group)), geometry, facts))
    ones = torch.ones(count, dtype=torch.float32)
    inputs = (golden[name].expand(count).clone() for name in ("a1", "a2"))
    factors = (golden[name].to(torch.float32) for name in ("pre_quant13", "pre_quant2"))
    scales = Scales(ones, ones, ones, *inputs, *factors)
    layer = PackedLayer(
        target=target,
        geometry=geometry,
        activation=activation,
        facts=facts,
        experts=range(count),
        packed={name: torch.stack([tensors[name] for tensors in packed]) for name in packed[0]},
        scalars=layout.scalars(scales, activation, facts),
        scales=scales,
    )
    multipliers = {f"{gemm}_act_scale": golden[f"{gemm}_act_scales"] for gemm in ("fc1", "fc2")}
    layer = replace(layer, scalars={**layer.scalars, **multipliers})
    return layer, golden["x"], Routing(golden["topk_ids"].long(), golden["topk_weights"])


def reproduce_golden(path: Path) -> dict[str, Any]:
    """This project's packed bytes on the kernel, against what the kernel once gave for FlashInfer's own packing.

    `ok`: no further than 1e-3 from it (weights that are not interleaved give 1.4).
    """
    golden = case_of(read(path), "layer")
    result = run(*golden_layer(golden))
    found = {
        "out": difference(result, golden["out"]),
        "out to E4M3 emulated": difference(result, golden["ref_fp8"]),
        "out to F32 reference": difference(result, golden["ref"]),
    }
    return {"file": path.name, "ok": found["out"]["relative_l2"] < 1e-3, **found}
