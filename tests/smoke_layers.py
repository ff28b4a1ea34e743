"""Packed layers of every backend with inputs, and what they should give in F32.

For the tests and for scripts/smoke_kernels.py. Needs no pytest: the script runs on a machine that has torch and little
else.
"""

from __future__ import annotations

import torch
from layout_layers import OAI, RELU2, SILU, Case, Layer, make_int4_layer, make_layer
from torch import Tensor

from nvfp4prep import layouts
from nvfp4prep.layouts.logical import Activation, Expert, Matrix, Scales
from nvfp4prep.numerics import decode_e2m1, decode_e4m3, unpack_nibbles
from nvfp4prep.schema import GROUP_SIZE
from nvfp4prep.smoke.layer import PackedLayer, Routing
from nvfp4prep.targets import Target

MARLIN_LAYERS = [
    (Case("vllm-marlin", "vllm", 256, 128, True), SILU),
    (Case("vllm-marlin", "vllm", 192, 96, True), Activation("silu", limit=1.0)),
    (Case("vllm-marlin", "vllm", 128, 48, False), RELU2),
    (Case("vllm-marlin", "vllm", 128, 64, True, biased=True), OAI),
    (Case("vllm-marlin", "vllm", 128, 64, True, dtype="fp16"), SILU),
    (Case("vllm-marlin", "sglang", 128, 64, True), SILU),
    (Case("vllm-marlin", "sglang", 256, 96, False), RELU2),
]
MARLIN_INT4_LAYERS = [
    (Case("vllm-marlin-int4", "vllm", 256, 128, True, group=128), SILU),  # w2: one group
    (Case("vllm-marlin-int4", "vllm", 128, 128, True, group=128), SILU),  # both: one group
    (Case("vllm-marlin-int4", "vllm", 256, 96, True, group=32), Activation("silu", limit=1.0)),  # padded
    (Case("vllm-marlin-int4", "vllm", 384, 128, True, group=64), OAI),
    (Case("vllm-marlin-int4", "vllm", 256, 256, False, group=64), RELU2),
    (Case("vllm-marlin-int4", "vllm", 256, 64, True, dtype="fp16", group=32), SILU),
    (Case("vllm-marlin-int4", "sglang", 256, 256, True, group=128), SILU),
]
"""Groups of 32, 64 and 128."""

LAYERS = {
    "flashinfer-trtllm": [
        (Case("flashinfer-trtllm", "vllm", 448, 96, True), SILU),
        (Case("flashinfer-trtllm", "vllm", 512, 128, True, biased=True), OAI),
        (Case("flashinfer-trtllm", "vllm", 256, 160, False), RELU2),
        (Case("flashinfer-trtllm", "sglang", 384, 128, True), SILU),
    ],
    "flashinfer-cutlass": [
        (Case("flashinfer-cutlass", "vllm", 448, 96, True), SILU),
        (Case("flashinfer-cutlass", "vllm", 512, 128, True, biased=True), OAI),
        (Case("flashinfer-cutlass", "vllm", 192, 160, False), RELU2),
        (Case("flashinfer-cutlass", "sglang", 320, 64, True), SILU),
    ],
    "flashinfer-cutedsl": [
        (Case("flashinfer-cutedsl", "vllm", 448, 96, True), SILU),
        (Case("flashinfer-cutedsl", "vllm", 512, 128, True), OAI),
        (Case("flashinfer-cutedsl", "vllm", 256, 160, False), RELU2),
        (Case("flashinfer-cutedsl", "sglang", 384, 64, True), SILU),
    ],
    "marlin": [*MARLIN_LAYERS, *MARLIN_INT4_LAYERS],
}
"""Cases of each backend: padded and not, biased, not gated, both engines."""


def layer_of(case: Case, experts: int, activation: Activation) -> Layer:
    """A layer of the case's format, with block scales that Marlin can hold."""
    if case.group != GROUP_SIZE:
        return make_int4_layer(case, experts)
    return make_layer(case, experts, activation, codes=(56, 126))


def packed_layer(layer: Layer, activation: Activation, ep: int = 1, rank: int = 0) -> PackedLayer:
    """An EP rank's packed experts of a made layer."""
    case = layer.case
    share = len(layer.experts) // ep
    experts = range(rank * share, (rank + 1) * share)
    geometry, module = case.geometry(share), layouts.LAYOUTS[case.layout]
    packed = [module.pack(layer.experts[e], geometry, layer.facts[e]) for e in experts]

    def mine(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[experts.start : experts.stop]

    logical = layer.scales
    up, down = mine(logical.up), mine(logical.down)
    assert up is not None and down is not None
    scales = Scales(mine(logical.gate), up, down, mine(logical.w13_input), mine(logical.w2_input))
    return PackedLayer(
        target=Target(case.layout, case.engine, ep=ep, activation_dtype=case.dtype),
        geometry=geometry,
        activation=activation,
        facts=layer.facts[0],
        experts=experts,
        packed={name: torch.stack([tensors[name] for tensors in packed]) for name in packed[0]},
        scalars=module.scalars(scales, activation, layer.facts[0]),
        scales=scales,
    )


def inputs(case: Case, tokens: int, top_k: int, experts: int, seed: int = 1) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, case.hidden, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    return x, Routing(ids, weights / weights.sum(1, keepdim=True))


def real(matrix: Matrix, scale: Tensor) -> Tensor:
    """F32 [N, K] of an NVFP4 or int4 matrix."""
    if matrix.is_int4:
        signed = (unpack_nibbles(matrix.weight).to(torch.int16) ^ 8) - 8
        return signed.to(torch.float32) * matrix.scale.to(torch.float32).repeat_interleave(matrix.group, 1) * scale
    codes = decode_e4m3(matrix.scale)
    return decode_e2m1(unpack_nibbles(matrix.weight)) * codes.repeat_interleave(16, 1) * scale


def reference(layer: Layer, activation: Activation, x: Tensor, routing: Routing) -> Tensor:
    """The layer in F32, from its logical tensors."""
    out = torch.zeros(x.shape)
    for e, expert in enumerate(layer.experts):
        weight = (routing.weights * (routing.ids == e)).sum(1, keepdim=True)
        out += weight * expert_reference(expert, layer.scales, e, activation, x.float())
    return out


def expert_reference(expert: Expert, scales: Scales, e: int, activation: Activation, x: Tensor) -> Tensor:
    up = x @ real(expert.up, scales.up[e]).T + (0 if expert.up_bias is None else expert.up_bias)
    if expert.gate is None:
        hidden = up.relu().square()
    else:
        assert scales.gate is not None
        gate = x @ real(expert.gate, scales.gate[e]).T + (0 if expert.gate_bias is None else expert.gate_bias)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        hidden = gate * (gate * (activation.alpha or 1)).sigmoid() * (up + (activation.beta or 0))
    return hidden @ real(expert.down, scales.down[e]).T + (0 if expert.down_bias is None else expert.down_bias)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
