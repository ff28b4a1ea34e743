"""What a layer should give, from logical tensors: with the kernels' quantisation (`exact`) and without (`plain`).

Nothing here knows a kernel's layout. `numerics` holds the arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.blockscales import half_of
from nvfp4prep.experts import Read
from nvfp4prep.layouts.logical import Activation, Expert, Matrix, Scales
from nvfp4prep.numerics import dequantize_int4, dequantize_nvfp4, encode_e4m3, floats, quantize_dequantize_nvfp4
from nvfp4prep.packing import reader
from nvfp4prep.schema import FLOAT_DTYPES, GateUpOrder, Linear, MoeLayer, build_schema, gate_up_order
from nvfp4prep.smoke.layer import LogicalLayer, Routing, Weights
from nvfp4prep.smoke.rounding import FOLDED, NO_ROUNDING, Rounding, weighted_sum
from nvfp4prep.source import Source, read_tensor, refuse
from nvfp4prep.targets import Activations, Target

_Columns = tuple[Tensor | None, Tensor | None, Tensor | None]
_NO_COLUMNS: _Columns = (None, None, None)

# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(expert: Expert, scales: Scales | None, e: int = 0) -> Weights:
    """An expert dequantised, F32: e2m1 · block scale · weight_scale_2; int4: code · group scale.

    Args:
      expert: logical tensors.
      scales: of all experts, this one's at index `e`; None leaves weight_scale_2 out (what `emulator.read_weights`
        reads, exactly).
      e: index into `scales`.
    """

    def dequantise(matrix: Matrix, scale: Tensor | None) -> Tensor:
        if matrix.is_int4:
            values = dequantize_int4(matrix.weight, matrix.scale, 1)
            return values if scale is None else values * scale[e]
        return dequantize_nvfp4(matrix.weight, matrix.scale, 1.0 if scale is None else scale[e])

    gate = None if expert.gate is None else dequantise(expert.gate, None if scales is None else scales.gate)
    up = dequantise(expert.up, None if scales is None else scales.up)
    down = dequantise(expert.down, None if scales is None else scales.down)
    return Weights(gate, up, down, expert.gate_bias, expert.up_bias, expert.down_bias)


def engine_scales(scales: Scales, target: Target) -> Scales:
    """The global scales as the target's engine has them: SGLang's Marlin rounds them to the activations' dtype."""
    if target.layout != "vllm-marlin" or target.engine != "sglang":
        return scales
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[target.activation_dtype]

    def rounded(scale: Tensor) -> Tensor:
        return scale.to(dtype).to(torch.float32)

    gate = None if scales.gate is None else rounded(scales.gate)
    return replace(scales, gate=gate, up=rounded(scales.up), down=rounded(scales.down))


def scale_change(scales: Scales, engine: Scales) -> float:
    """The most that the engine's global scales change an expert's output, relative: the sum over its matrices."""
    pairs = [(engine.up, scales.up), (engine.down, scales.down)]
    if scales.gate is not None and engine.gate is not None:
        pairs.append((engine.gate, scales.gate))
    return float(torch.stack([(mine / given - 1).abs() for mine, given in pairs]).sum(0).max())


# --- the layer --------------------------------------------------------------------------------------------------------


def exact(
    layer: LogicalLayer, x: Tensor, routing: Routing, activations: Activations, rounding: Rounding | None = None
) -> Tensor:
    """What a right kernel gives: F32 throughout, and NVFP4 or E4M3 where it quantises.

    Args:
      layer: the whole layer.
      x: BF16 [T, H].
      routing: over all experts.
      activations: what enters each GEMM.
      rounding: also rounds to 16 bits where a kernel does (`rounding.rounding_of`). Without, a W4A4 kernel that writes
        16 bits before it requantises differs by some 2 %.

    Returns:
      F32 [T, H].
    """
    scales, points = layer.scales, rounding or NO_ROUNDING

    def expert(e: int, token: Tensor) -> tuple[Tensor, Tensor | None]:
        logical = layer.expert(e)
        folded = points.folded and logical.down_bias is None
        logical, columns = _column_scales(logical) if points.column else (logical, _NO_COLUMNS)
        weights = weights_of(
            logical, replace(scales, down=torch.full_like(scales.down, 1 / FOLDED)) if folded else scales, e
        )
        quantisers: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = (_identity, _identity)
        if activations != "16-bit":
            first, second = scales.w13_input, scales.w2_input
            assert first is not None and second is not None
            if activations == "NVFP4":
                quantisers = _quantiser(first[e]), _quantiser(second[e])
            else:
                quantisers = _to_e4m3(first[e], scales.w13_factors), _to_e4m3(second[e], scales.w2_factors)
        out = _expert(weights, layer.activation, x[token], quantisers, points, columns)
        return out, scales.down[e].to(x.device) * FOLDED if folded else None

    return weighted_sum(routing, range(layer.expert_count), x.shape[0], layer.hidden, expert, rounding)


def plain(weights: Callable[[int], Weights], activation: Activation, x: Tensor, routing: Routing) -> Tensor:
    """The layer unquantised, F32.

    Args:
      weights: the real weights of an expert by its global id.
      activation: the function between the GEMMs.
      x: BF16 [T, H].
      routing: over all experts.

    Returns:
      F32 [T, H].
    """
    experts = range(int(routing.ids.max()) + 1) if routing.ids.numel() else range(0)

    def expert(e: int, token: Tensor) -> tuple[Tensor, Tensor | None]:
        return _expert(weights(e), activation, x[token], (_identity, _identity), NO_ROUNDING), None

    return weighted_sum(routing, experts, x.shape[0], x.shape[1], expert, None)


def _identity(x: Tensor) -> Tensor:
    return x


def _quantiser(scale: Tensor) -> Callable[[Tensor], Tensor]:
    """Engines hand kernels 1/a in F32, whose reciprocal may be a step of F32 from a; near a tie that matters."""
    stored = 1 / (1 / scale)
    return lambda x: quantize_dequantize_nvfp4(x, stored, scale)


def _to_e4m3(scale: Tensor, factors: Tensor | None) -> Callable[[Tensor], Tensor]:
    """E4M3(x / a) · a; where the kernel multiplies by factors, E4M3(x · (factors / a)) · a with both in BF16."""
    if factors is None:
        return lambda x: encode_e4m3(x / scale.to(x.device)).to(torch.float32) * scale.to(x.device)
    multiplier = (factors / scale).to(torch.bfloat16)
    return lambda x: encode_e4m3(x.to(torch.bfloat16) * multiplier.to(x.device)).to(torch.float32) * scale.to(x.device)


def _column_scales(expert: Expert) -> tuple[Expert, _Columns]:
    """int4 matrices with one group along K without their scale, and that scale of gate, up and down, [N]."""

    def without(matrix: Matrix) -> tuple[Matrix, Tensor | None]:
        if not matrix.is_int4 or matrix.scale.shape[1] > 1:
            return matrix, None
        return replace(matrix, scale=torch.ones_like(matrix.scale)), matrix.scale[:, 0].to(torch.float32)

    gate, gate_column = (None, None) if expert.gate is None else without(expert.gate)
    (up, up_column), (down, down_column) = without(expert.up), without(expert.down)
    return replace(expert, gate=gate, up=up, down=down), (gate_column, up_column, down_column)


def _expert(
    weights: Weights,
    activation: Activation,
    x: Tensor,
    quantisers: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
    rounding: Rounding,
    columns: _Columns = _NO_COLUMNS,
) -> Tensor:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, point: str, column: Tensor | None) -> Tensor:
        out = x @ rounding.at("weight", weight.to(x.device)).T
        if column is not None:
            out = rounding.at(point, out) * column.to(x.device)
        if bias is None:
            return rounding.at(point, out)
        if rounding.early_bias:
            return rounding.at(point, out + bias.to(x.device))
        return rounding.at("bias", rounding.at(point, out) + bias.to(x.device))

    # 16-bit activations: no loss for BF16, an FP16 kernel's for FP16.
    entering = quantisers[0](x.to(rounding.dtype).to(torch.float32))
    gate = None if weights.gate is None else linear(entering, weights.gate, weights.gate_bias, "gemm1", columns[0])
    up = linear(entering, weights.up, weights.up_bias, "gemm1", columns[1])
    between = rounding.at("activation", activate(activation, gate, up, rounding))
    return linear(quantisers[1](between), weights.down, weights.down_bias, "gemm2", columns[2])


def activate(activation: Activation, gate: Tensor | None, up: Tensor, rounding: Rounding = NO_ROUNDING) -> Tensor:
    """The function between the GEMMs, in real units; what `Activation` says."""
    if activation.kind == "relu2":
        return torch.relu(up).square()
    assert gate is not None
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        silu = torch.nn.functional.silu(gate)
        return (rounding.at("silu", silu) if activation.limit is None else silu) * up
    alpha = 1.0 if activation.alpha is None else activation.alpha
    beta = 0.0 if activation.beta is None else activation.beta
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


# --- the original checkpoint's weights --------------------------------------------------------------------------------


def reference_weights(source: Source, config: Mapping[str, Any], moe: MoeLayer) -> Callable[[int], Weights]:
    """The routed experts of an unquantised checkpoint (BF16, F16 or F32), for a layer of the quantised one.

    Understands per-expert names (gate_proj/up_proj/down_proj, w1/w3/w2) and fused tensors: gpt-oss (interleaved
    columns) and Llama-4 (halves) with [E, H, 2I] and [E, I, H]; for other model types transformers 5's [E, 2I, H] and
    [E, H, I]. A model inside another one (`language_model.model.layers.0…`) is found by the part of the path from
    `layers` on.

    Args:
      source: the unquantised checkpoint.
      config: its config.json.
      moe: the layer as the quantised checkpoint has it.

    Returns:
      A function that reads one expert by its id when called.

    Raises:
      InputRefused: no such layer in it, or one of another size or kind.
    """
    found = _same_layer(build_schema(source.tensors, config).moe_layers, moe, source)
    _check_kind(found, moe, source)
    read = reader(lambda *part: bytearray(read_tensor(source, *part)), source.tensors)
    if found.gate_up is not None and found.down is not None:
        return _fused_reader(found.gate_up, found.down, moe, gate_up_order(config), read, source)

    def per_expert(e: int) -> Weights:
        expert = found.experts[e]
        gate, up, down = (
            None if linear is None else read(linear.params["weight"].name, None).to(torch.float32)
            for linear in (expert.gate, expert.up, expert.down)
        )
        assert up is not None and down is not None
        return Weights(gate, up, down, *(_bias(linear, read) for linear in (expert.gate, expert.up, expert.down)))

    return per_expert


def reference_norm(source: Source, config: Mapping[str, Any], moe: MoeLayer, name: str) -> Tensor | None:
    """The norm of an unquantised checkpoint that gives a layer's input, F32 [H]; None where it stores none.

    Args:
      source, config, moe: as for `reference_weights`.
      name: of the norm's weight, below the module that holds the MoE block.

    Raises:
      InputRefused: no such layer in it, or a norm of another size or kind.
    """
    found = _same_layer(build_schema(source.tensors, config).moe_layers, moe, source)
    info = source.tensors.get(f"{found.path.rpartition('.')[0]}.{name}")
    if info is None:
        return None
    if info.dtype not in FLOAT_DTYPES or info.shape != (moe.hidden,):
        message = f"{info.name} is {info.dtype} {list(info.shape)}; {moe.hidden} floats fit the checkpoint"
        refuse("reference-shape", message, file=source.spec)
    return floats(info.dtype, read_tensor(source, info)).view(info.shape)


def unevenness(factors: Tensor, group: int, *, folded: bool = False) -> float:
    """How much larger AWQ's factors make the error of a GEMM's quantised weights, at most; see `metrics`.

    Args:
      factors: [K], what columns were divided by before they were quantised; NaN for columns of zeros.
      group: the number of columns that share a scale.
      folded: inputs have the factors in them.
    """
    worst = 1.0
    for part in torch.split(factors.double().abs(), group):
        known = part[part.isfinite()]
        if known.numel():
            rms = 1 / (1 / known).square().mean().sqrt() if folded else known.square().mean().sqrt()
            worst = max(worst, float(rms / known.min()))
    return worst


def column_factors(real: Tensor, stored: Tensor) -> Tensor:
    """What columns were divided by before they were quantised, F64 [K]: the real ones' lengths over the stored ones'.

    A length is a mean over all rows, which the noise of quantising hardly moves. NaN for a column of zeros.

    Args:
      real, stored: floating [N, K].
    """
    ours, theirs = stored.norm(dim=0).double(), real.to(stored.device).norm(dim=0).double()
    return torch.where((ours > 0) & (theirs > 0), theirs / ours, torch.nan)


def _bias(linear: Linear | None, read: Read) -> Tensor | None:
    if linear is None or "bias" not in linear.params:
        return None
    return read(linear.params["bias"].name, None).to(torch.float32)


def _tail(path: str) -> str:
    """The path from the list of layers on."""
    match = re.search(r"(?:^|\.)((?:layers|blocks|h)\.\d.*)", path)
    return match[1] if match else path


def _same_layer(layers: tuple[MoeLayer, ...], moe: MoeLayer, source: Source) -> MoeLayer:
    same = [layer for layer in layers if layer.path == moe.path]
    same = same or [layer for layer in layers if _tail(layer.path) == _tail(moe.path)]
    if len(same) != 1:
        have = ", ".join(layer.path for layer in layers[:4]) or "none"
        refuse("reference-layer", f"the reference {source.spec} has no routed experts under {moe.path}; it has {have}")
    return same[0]


def _check_kind(found: MoeLayer, moe: MoeLayer, source: Source) -> None:
    """Refuses another number of experts, another size, or weights that are not plain floats."""
    for linear in (*found.w13, *found.w2):
        dtype = linear.params["weight"].dtype
        if dtype not in FLOAT_DTYPES:
            message = f"{linear.module} is {dtype}; a reference holds BF16, F16 or F32"
            refuse("reference-dtype", message, file=source.spec)
    fused = found.gate_up is not None
    if fused:
        sizes: tuple[int, ...] = (found.expert_count,)
        wanted: tuple[int, ...] = (moe.expert_count,)
    else:
        sizes = (found.expert_count, found.hidden, found.intermediate, int(found.gated))
        wanted = (moe.expert_count, moe.hidden, moe.intermediate, int(moe.gated))
    if sizes != wanted or (fused and not moe.gated):
        names = ("experts", "hidden", "intermediate", "gated")
        text = [", ".join(f"{n} {v}" for n, v in zip(names, values, strict=False)) for values in (sizes, wanted)]
        refuse("reference-shape", f"{found.path} has {text[0]}; the checkpoint has {text[1]}", file=source.spec)


def kind_of(moe: MoeLayer) -> str:
    """What a quantised layer is, for comparing it with another and for saying so."""
    sizes = f"experts {moe.expert_count}, hidden {moe.hidden}, intermediate {moe.intermediate}, gated {int(moe.gated)}"
    biases, stored = ("with biases" if moe.biased else "no biases"), ("fused" if moe.gate_up else "one by one")
    return f"{moe.format.value}, {sizes}, groups of {moe.w2[0].group_size}, {biases}, {stored}"


def _fused_reader(
    gate_up: Linear, down: Linear, moe: MoeLayer, order: GateUpOrder | None, read: Read, source: Source
) -> Callable[[int], Weights]:
    experts, hidden, inner = moe.expert_count, moe.hidden, moe.intermediate
    columns = order is not None  # gpt-oss and Llama-4 hold [inputs, outputs], others [outputs, inputs]
    wanted = (
        (gate_up, (experts, hidden, 2 * inner) if columns else (experts, 2 * inner, hidden)),
        (down, (experts, inner, hidden) if columns else (experts, hidden, inner)),
    )
    for linear, shape in wanted:
        stored = linear.params["weight"].shape
        if stored != shape:
            message = f"{linear.module} is {list(stored)}; {list(shape)} fits the checkpoint"
            refuse("reference-shape", message, file=source.spec)

    def fused(e: int) -> Weights:
        first = read(gate_up.params["weight"].name, e).to(torch.float32)
        second = read(down.params["weight"].name, e).to(torch.float32)
        first, second = (first, second.T) if columns else (first.T, second)
        gate, up = (half_of(first, half, order or "halves").T.contiguous() for half in (0, 1))
        weights = Weights(gate, up, second.contiguous())
        if "bias" not in gate_up.params or "bias" not in down.params:
            return weights
        bias = read(gate_up.params["bias"].name, e).to(torch.float32)
        gate_bias, up_bias = (half_of(bias, half, order or "halves").contiguous() for half in (0, 1))
        down_bias = read(down.params["bias"].name, e).to(torch.float32)
        return replace(weights, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)

    return fused
