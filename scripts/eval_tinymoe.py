#!/usr/bin/env python3
"""Held-out loss of the tiny Qwen3-MoE under the ways in which engines read a quantised checkpoint's scales.

Reads NVFP4 and int4 as ModelOpt exports them, both as `convert --target compressed-tensors` writes them, and packed
outputs, whose experts are read from their bytes by the kernel's index formulas, as the smoke check's emulator does. The
forward pass is plain torch in F32. W4A16 dequantises all weights. W4A4 (NVFP4) and W4A8 (int4, E4M3 activations) also
quantise the inputs of both expert GEMMs, emulated; other linears stay W4A16. Several directories become columns of one
table. One small model, emulated: no substitute for an evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nvfp4prep.errors import Stop
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.numerics import (
    decode_e4m3,
    dequantize_nvfp4,
    encode_e4m3,
    quantize_dequantize_nvfp4,
    unpack_nibbles,
)
from nvfp4prep.plan import Rank
from nvfp4prep.schema import Format, MoeLayer
from nvfp4prep.smoke.emulator import read_weights
from nvfp4prep.smoke.subject import Mapped, stored_layer
from nvfp4prep.unpack import Packed, read_packed_output

WINDOW = 512
BATCH = 16
EP_RANKS = 4
DEFAULT_TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "eval.bin"

StoredScales = Sequence[Sequence[float | None]]  # for each expert, its linears' input scales; None where missing
ScalePairs = tuple[tuple[float, float], ...]  # for each expert: quantised with, dequantised with


NVFP4, INT4, UNQUANTIZED = "NVFP4", "int4", "unquantised"


@dataclass(frozen=True)
class Linear:
    """A linear: weight · (smoothing · x), the weight dequantised to F32 [out, in]. None is what is not stored."""

    weight: Tensor
    smoothing: Tensor | None
    input_scale: float | None

    def merged(self) -> Tensor:
        """The weight with the smoothing in its columns."""
        return self.weight if self.smoothing is None else self.weight * self.smoothing


@dataclass(frozen=True)
class Gemm:
    """One expert GEMM of a layer: for each expert a weight [out, in], its smoothing, and the input scales as stored."""

    weights: tuple[Tensor, ...]
    smoothing: tuple[Tensor | None, ...]
    input_scales: StoredScales


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    norms: Mapping[str, Tensor]
    attention: Mapping[str, Tensor]
    router: Tensor
    w13: Gemm
    w2: Gemm


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, all weights dequantised to F32.

    `form` is that of the experts. `misread` holds the layers as read wrong, by row key, where that makes a difference.
    """

    config: Mapping[str, Any]
    embedding: Tensor
    layers: tuple[Layer, ...]
    misread: Mapping[str, tuple[Layer, ...]]
    norm: Tensor
    head: Tensor
    form: str


# --- Which scale each expert's input is quantised and dequantised with ---


def _is_good(scale: float | None) -> bool:
    return scale is not None and math.isfinite(scale) and scale >= torch.finfo(torch.float32).tiny


def _maximum(experts: StoredScales) -> float | None:
    return max((scale for scales in experts for scale in scales if scale is not None and _is_good(scale)), default=None)


def own(stored: StoredScales) -> list[float | None]:
    """Each expert's own scale (the larger of gate and up), None for an expert that lacks a good one."""
    return [_maximum([scales]) if all(map(_is_good, scales)) else None for scales in stored]


def layer_max(stored: StoredScales) -> list[float | None]:
    """The maximum over the good scales of all experts."""
    return [_maximum(stored)] * len(stored)


def rank_max(stored: StoredScales) -> list[float | None]:
    """The maximum over the good scales of the experts on the same rank; ranks hold contiguous experts."""
    ranks = [expert * EP_RANKS // len(stored) for expert in range(len(stored))]
    maxima = [_maximum([s for s, r in zip(stored, ranks, strict=True) if r == rank]) for rank in range(EP_RANKS)]
    return [maxima[rank] for rank in ranks]


def expert_0(stored: StoredScales) -> list[float | None]:
    """Expert 0's own scale for all experts."""
    return own(stored)[:1] * len(stored)


@dataclass(frozen=True)
class Semantics:
    """One way in which an engine reads the input scales."""

    key: str
    label: str
    quantize: Callable[[StoredScales], list[float | None]]
    dequantize: Callable[[StoredScales], list[float | None]]

    def pairs(self, stored: StoredScales) -> ScalePairs | None:
        """The scales of every expert, or None if one that is needed is missing or bad."""
        pairs = zip(self.quantize(stored), self.dequantize(stored), strict=True)
        usable = tuple((q, d) for q, d in pairs if q is not None and d is not None)
        return usable if len(usable) == len(stored) else None


BF16, W4A16, MISREAD, SCALE_BITS = "bf16", "w4a16", "up-with-gate-scale", "scale-bits"
SEMANTICS = (
    Semantics("own", "W4A4, own scale", own, own),
    Semantics("layer-max", "W4A4, layer maximum", layer_max, layer_max),
    Semantics("rank-max", f"W4A4, maximum within each of {EP_RANKS} EP ranks", rank_max, rank_max),
    Semantics("layer-max-own", "W4A4, quantised with layer maximum, dequantised with own", layer_max, own),
    Semantics("expert-0-own", "W4A4, quantised with expert 0's, dequantised with own", expert_0, own),
)
INT4_SEMANTICS = (
    Semantics("w4a8-layer-max", "W4A8, layer maximum", layer_max, layer_max),
    Semantics("w4a8-own", "W4A8, own scale", own, own),
)
LABELS = {
    BF16: "reference: BF16",
    W4A16: "reference: W4A16",
    **{row.key: row.label for row in SEMANTICS},
    MISREAD: "W4A4, layer maximum, up half with gate's weight_scale_2",
    **{row.key: row.label for row in INT4_SEMANTICS},
    SCALE_BITS: "W4A16, F16/BF16 bits read as F32",
}
ROWS = {
    NVFP4: (BF16, W4A16, *(row.key for row in SEMANTICS), MISREAD),
    INT4: (BF16, W4A16, *(row.key for row in INT4_SEMANTICS), SCALE_BITS),
}


# --- Loading ---

Tensors = Mapping[str, Tensor]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def load(directory: str | Path) -> Model:
    """Loads a Qwen3-MoE checkpoint, quantised or not, from all the safetensors files of a directory.

    Raises:
      ValueError: not a checkpoint that the forward pass here supports.
      OSError: a file can't be read.
    """
    root = Path(directory)
    tensors: dict[str, Tensor] = {}
    try:
        config = json.loads((root / "config.json").read_text())
        _require_supported(config)
        for file in sorted([*root.glob("*.safetensors"), *root.glob("common/*.safetensors")]):
            tensors |= load_file(file)
        packed = config.get("quantization_config", {}).get("quant_method") == "nvfp4prep"
        return _model(config, tensors, packed_experts(root) if packed else {})
    except KeyError as error:
        raise ValueError(f"{root}: no {error}; a Qwen3-MoE with one linear per expert is needed") from error
    except (ValueError, SafetensorError, Stop) as error:
        raise ValueError(f"{root}: {error}") from error


def packed_experts(root: Path) -> dict[str, Linear]:
    """The routed experts' linears of a packed output, by module: code · scale as the kernel reads it.

    Raises:
      Stop: it can't be read, or not all of its ranks are there.
    """
    packed = read_packed_output(root)
    read = Mapped(packed.source)
    linears: dict[str, Linear] = {}
    for moe in packed.layers:
        for e in range(moe.expert_count):
            parts = [_packed_part(packed, moe, e, tp, read) for tp in range(packed.target.tp)]
            for projection, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
                shares = [part[projection] for part in parts]
                smoothing = shares[0].smoothing
                if axis == 1 and smoothing is not None:
                    smoothing = torch.cat([share.smoothing for share in shares if share.smoothing is not None])
                weight = torch.cat([share.weight for share in shares], axis)
                linears[f"{moe.container}.{e}.{projection}"] = Linear(weight, smoothing, shares[0].input_scale)
    return linears


def _packed_part(packed: Packed, moe: MoeLayer, e: int, tp: int, read: Mapped) -> dict[str, Linear]:
    """A TP rank's share of one expert."""
    target = packed.target
    ep, position = divmod(e, moe.expert_count // target.ep)
    layer = stored_layer(moe, Rank(tp, ep), target, packed.config, packed.source, read)
    if layer is None:
        raise ValueError(f"{moe.path}: rank {tp}, {ep} is not there")
    weights, scales, inner = read_weights(layer, position), layer.scales, layer.geometry.intermediate
    assert weights.gate is not None and scales.gate is not None
    first, second = (None if scale is None else scale[position].item() for scale in (scales.w13_input, scales.w2_input))
    hidden = moe.hidden
    return {
        "gate_proj": Linear(weights.gate[:inner, :hidden] * scales.gate[position], scales.w13_factors, first),
        "up_proj": Linear(weights.up[:inner, :hidden] * scales.up[position], scales.w13_factors, first),
        "down_proj": Linear(weights.down[:hidden, :inner] * scales.down[position], scales.w2_factors, second),
    }


def _model(config: Mapping[str, Any], tensors: Tensors, packed: Mapping[str, Linear]) -> Model:
    form = _form_of_packed(config) if packed else _form_of_experts(tensors)
    embedding = tensors["model.embed_tokens.weight"].float()

    def layers(misread: str | None = None) -> tuple[Layer, ...]:
        paths = [f"model.layers.{n}" for n in range(config["num_hidden_layers"])]
        return tuple(_layer(config, tensors, packed, path, misread) for path in paths)

    return Model(
        config=config,
        embedding=embedding,
        layers=layers(),
        misread={} if packed else {key: layers(key) for key in _misreadings(tensors, form)},
        norm=tensors["model.norm.weight"].float(),
        head=embedding if config.get("tie_word_embeddings") else _linear(tensors, "lm_head").merged(),
        form=form,
    )


def _require_supported(config: Mapping[str, Any]) -> None:
    needed = {"model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1}
    needed |= {"mlp_only_layers": [], "use_sliding_window": False}
    for key, value in needed.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json: {key} is {config[key]!r}; this forward pass has only {value!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type is {rope['rope_type']!r}; this forward pass has only 'default'")


def _form_of_packed(config: Mapping[str, Any]) -> str:
    layout = config["quantization_config"]["layout"].partition("/")[0]
    return INT4 if LAYOUTS[layout].REQUIRES.format is Format.INT4 else NVFP4


def _form_of_experts(tensors: Tensors) -> str:
    weights = [name for name in tensors if ".experts." in name and name.endswith((".weight", ".weight_packed"))]
    forms = {_form(tensors, name.rpartition(".")[0]) for name in weights}
    if len(forms) != 1:
        raise ValueError(f"its experts are {' and '.join(sorted(forms)) or 'missing'}; one form is needed")
    return forms.pop()


def _misreadings(tensors: Tensors, form: str) -> list[str]:
    """Row keys of the misreadings that make a difference to this checkpoint's weights."""
    if form == NVFP4:
        gates = {name.rpartition(".")[0] for name in tensors if ".experts." in name and ".gate_proj." in name}
        split = any(_scale_2(tensors, m) != _scale_2(tensors, m.replace("gate_proj", "up_proj")) for m in gates)
        return [MISREAD] if split else []
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.endswith(".weight_scale")}
    return [SCALE_BITS] if form == INT4 and dtypes & {torch.float16, torch.bfloat16} else []


def _layer(
    config: Mapping[str, Any], tensors: Tensors, packed: Mapping[str, Linear], path: str, misread: str | None
) -> Layer:
    experts = config.get("num_experts") or config["num_local_experts"]
    modules = [f"{path}.mlp.experts.{expert}" for expert in range(experts)]
    return Layer(
        norms={
            "attention": tensors[f"{path}.input_layernorm.weight"].float(),
            "mlp": tensors[f"{path}.post_attention_layernorm.weight"].float(),
            "q": tensors[f"{path}.self_attn.q_norm.weight"].float(),
            "k": tensors[f"{path}.self_attn.k_norm.weight"].float(),
        },
        attention={p: _linear(tensors, f"{path}.self_attn.{p}_proj", misread).merged() for p in "qkvo"},
        router=_linear(tensors, f"{path}.mlp.gate").merged(),
        w13=_gemm(tensors, packed, modules, misread, "gate_proj", "up_proj"),
        w2=_gemm(tensors, packed, modules, misread, "down_proj"),
    )


def _gemm(
    tensors: Tensors, packed: Mapping[str, Linear], modules: Sequence[str], misread: str | None, *projections: str
) -> Gemm:
    names = [[f"{module}.{p}" for p in projections] for module in modules]
    experts = [[packed.get(name) or _linear(tensors, name, misread) for name in row] for row in names]
    for module, linears in zip(modules, experts, strict=True):
        smoothing = [one.smoothing for one in linears if one.smoothing is not None]
        if len(smoothing) not in (0, len(linears)) or not all(torch.equal(smoothing[0], s) for s in smoothing):
            raise ValueError(f"{module}: gate and up have different pre_quant_scale; one GEMM has one input")
    return Gemm(
        weights=tuple(torch.cat([one.weight for one in linears]) for linears in experts),
        smoothing=tuple(linears[0].smoothing for linears in experts),
        input_scales=[[one.input_scale for one in linears] for linears in experts],
    )


def _stored(tensors: Tensors, module: str) -> Tensor:
    packed = f"{module}.weight_packed"
    return tensors[packed if packed in tensors else f"{module}.weight"]


def _form(tensors: Tensors, module: str) -> str:
    dtype = _stored(tensors, module).dtype
    if dtype in _FLOATS:
        return UNQUANTIZED
    if dtype not in (torch.uint8, torch.int32):
        raise ValueError(f"{module}.weight is {dtype}; NVFP4, int4 or unquantised is needed")
    return INT4 if tensors[f"{module}.weight_scale"].dtype in _FLOATS else NVFP4


def _linear(tensors: Tensors, module: str, misread: str | None = None) -> Linear:
    """A linear of any form, with what `misread` says read wrong."""
    form, weight = _form(tensors, module), _stored(tensors, module)
    smoothing = tensors.get(f"{module}.pre_quant_scale")
    try:
        if form == NVFP4:
            scale_2 = _scale_2(tensors, module.replace("up_proj", "gate_proj") if misread == MISREAD else module)
            weight = dequantize_nvfp4(weight, tensors[f"{module}.weight_scale"], scale_2)
        elif form == INT4:
            scale = tensors[f"{module}.weight_scale"]
            if misread == SCALE_BITS and scale.dtype != torch.float32:
                scale = bits_as_f32(scale)
            shape = tensors[f"{module}.weight_shape"].tolist() if weight.dtype == torch.int32 else None
            weight = dequantize_int4(weight, scale, shape)
        return Linear(
            weight=weight.float(),
            smoothing=None if smoothing is None else smoothing.float(),
            input_scale=_scalar(tensors, module, "input_scale", "input_global_scale"),
        )
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from error


def _scale_2(tensors: Tensors, module: str) -> float:
    scale_2 = _scalar(tensors, module, "weight_scale_2", "weight_global_scale")
    if scale_2 is None:
        raise KeyError(f"{module}.weight_scale_2")
    return scale_2


def _scalar(tensors: Tensors, module: str, direct: str, reciprocal: str) -> float | None:
    """A scale, stored as it is (ModelOpt) or as its reciprocal (compressed-tensors)."""
    name = next((name for name in (direct, reciprocal) if f"{module}.{name}" in tensors), None)
    if name is None:
        return None
    stored = tensors[f"{module}.{name}"].float()
    if stored.numel() != 1:
        raise ValueError(f"{name}: one element expected, shape is {list(stored.shape)}")
    return stored.item() if name == direct else stored.reciprocal().item()


# --- int4: decoded here and not by nvfp4prep's own functions, so that what those get wrong is seen ---


def dequantize_int4(weight: Tensor, scale: Tensor, shape: Sequence[int] | None) -> Tensor:
    """code · group scale, F32 [N, K].

    Args:
      weight: ModelOpt's U8 [N/2, K], row 2r in the low nibble, two's complement; or compressed-tensors' I32 [N, K/8],
        code + 8, the first in the lowest nibble.
      scale: floating [N, groups].
      shape: [N, K] as stored beside I32, None for U8.

    Raises:
      ValueError: shapes that differ from these.
    """
    if shape is None:
        codes = (unpack_nibbles(weight, 0).int() ^ 8) - 8
    else:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((weight[..., None] >> shifts) & 15).flatten(1) - 8
        if list(codes.shape) != list(shape):
            raise ValueError(f"weight_shape: {list(shape)}, but weight_packed holds {list(codes.shape)}")
    rows, columns = codes.shape
    if scale.dim() != 2 or len(scale) != rows or columns % scale.shape[1]:
        raise ValueError(f"weight_scale: [{rows}, groups of {columns}] expected, shape is {list(scale.shape)}")
    return codes * scale.float().repeat_interleave(columns // scale.shape[1], 1)


def bits_as_f32(scale: Tensor) -> Tensor:
    """What a reader that takes 16-bit scales for F32 has: half as many numbers, repeated here to fill the shape."""
    bits = scale.flatten().clone()
    if bits.numel() % 2:
        raise ValueError(f"weight_scale: {bits.numel()} values of 16 bits can't be read as F32")
    return bits.view(torch.float32).repeat(2).view(scale.shape)


def quantize_dequantize_e4m3(x: Tensor, quantize_scale: float, dequantize_scale: float) -> Tensor:
    """What a W4A8 GEMM sees of `x`: E4M3 codes of x / quantize_scale, saturated, times dequantize_scale."""
    return decode_e4m3(encode_e4m3(x / quantize_scale)) * dequantize_scale


# --- The forward pass ---


def forward(
    model: Model,
    tokens: Tensor,
    scales: Sequence[tuple[ScalePairs, ScalePairs]] | None = None,
    misread: str | None = None,
) -> Tensor:
    """Logits [batch, length, vocab] of `tokens` [batch, length].

    Args:
      model: the model.
      tokens: integers.
      scales: for each layer, the scale pairs of w13 and w2; None leaves activations unquantised.
      misread: a key of `model.misread`: take these layers.
    """
    eps = model.config["rms_norm_eps"]
    rotation = _rotation(model.config, tokens.shape[1])
    x = model.embedding[tokens]
    for n, layer in enumerate(model.misread[misread] if misread else model.layers):
        x = x + _attention(model.config, layer, _rms_norm(x, layer.norms["attention"], eps), rotation)
        hidden = _rms_norm(x, layer.norms["mlp"], eps).flatten(0, 1)
        x = x + _experts(model, layer, hidden, scales[n] if scales else None).view_as(x)
    return F.linear(_rms_norm(x, model.norm, eps), model.head)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotation(config: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the rotary embedding."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    head_dim = config["head_dim"]
    frequencies = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _attention(config: Mapping[str, Any], layer: Layer, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    q, k, v = (F.linear(x, layer.attention[p]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in "qkv")
    q = _rotate(_rms_norm(q, layer.norms["q"], eps), rotation)
    k = _rotate(_rms_norm(k, layer.norms["k"], eps), rotation)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(attended.transpose(1, 2).flatten(2), layer.attention["o"])


def _experts(model: Model, layer: Layer, x: Tensor, scales: tuple[ScalePairs, ScalePairs] | None) -> Tensor:
    """The MoE block on x [tokens, hidden]: tokens are sorted by expert, each expert runs on its own rows."""
    quantize = quantize_dequantize_nvfp4 if model.form == NVFP4 else quantize_dequantize_e4m3

    def gemm(which: Gemm, pairs: ScalePairs | None, expert: int, hidden: Tensor) -> Tensor:
        smoothing = which.smoothing[expert]
        if smoothing is not None:
            hidden = hidden * smoothing
        if pairs is not None:
            hidden = quantize(hidden, *pairs[expert])
        return F.linear(hidden, which.weights[expert])

    w13_pairs, w2_pairs = scales or (None, None)
    top_k = model.config["num_experts_per_tok"]
    weights, chosen = F.linear(x, layer.router).softmax(-1).topk(top_k, -1)
    if model.config.get("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(layer.w2.weights)).tolist()
    out = torch.zeros_like(x)
    for expert, slots in enumerate(order.split(counts)):
        rows = slots // top_k
        gate, up = gemm(layer.w13, w13_pairs, expert, x[rows]).chunk(2, -1)
        hidden = gemm(layer.w2, w2_pairs, expert, F.silu(gate) * up)
        out.index_add_(0, rows, hidden * weights.flatten()[slots, None])
    return out


# --- Losses ---


def losses(model: Model, text: bytes) -> dict[str, float]:
    """Held-out loss in nats per byte, by row key (see LABELS).

    Rows that don't apply are left out: those that quantise activations and need a scale that is missing or bad, the
    misread up half where all halves are equal, the misread bits where all group scales are F32. An unquantised model
    has the one row "bf16". Rows whose scales are the same numbers are one computation, done once.

    Args:
      model: from `load`.
      text: a multiple of 512 bytes; each window of 512 is one sequence, a byte is a token.

    Raises:
      ValueError: `text` is empty or not a multiple of 512 bytes.
    """
    if not text or len(text) % WINDOW:
        raise ValueError(f"the text has {len(text)} bytes; a multiple of {WINDOW} is needed")
    if model.form == UNQUANTIZED:
        return {BF16: _loss(model, text)}
    result = {W4A16: _loss(model, text)}
    done: dict[tuple[tuple[ScalePairs, ScalePairs], ...], float] = {}
    for row in SEMANTICS if model.form == NVFP4 else INT4_SEMANTICS:
        pairs = [(row.pairs(layer.w13.input_scales), row.pairs(layer.w2.input_scales)) for layer in model.layers]
        scales = tuple((w13, w2) for w13, w2 in pairs if w13 and w2)
        if len(scales) < len(pairs):
            continue
        if scales not in done:
            done[scales] = _loss(model, text, scales)
        result[row.key] = done[scales]
        if row.key == "layer-max" and MISREAD in model.misread:
            result[MISREAD] = _loss(model, text, scales, MISREAD)
    if SCALE_BITS in model.misread:
        result[SCALE_BITS] = _loss(model, text, None, SCALE_BITS)
    return result


@torch.inference_mode()
def _loss(
    model: Model,
    text: bytes,
    scales: Sequence[tuple[ScalePairs, ScalePairs]] | None = None,
    misread: str | None = None,
) -> float:
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, WINDOW)
    total = 0.0
    for tokens in windows.split(BATCH):
        logits = forward(model, tokens[:, :-1], scales, misread)
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item() * len(tokens)
    return total / len(windows)


def spread(rows: Mapping[str, float]) -> float | None:
    """Largest minus smallest of the five W4A4 rows, None unless all five are there."""
    values = [rows[row.key] for row in SEMANTICS if row.key in rows]
    return max(values) - min(values) if len(values) == len(SEMANTICS) else None


@dataclass(frozen=True)
class Column:
    """The losses of one directory, by row key."""

    source: Path
    form: str
    rows: Mapping[str, float]

    def to_json(self, text_bytes: int) -> dict[str, Any]:
        """One JSON object; a loss that is not finite becomes a string, null is a row that doesn't apply."""
        loss = {key: _jsonable(self.rows.get(key)) for key in LABELS}
        spread_ = _jsonable(spread(self.rows))
        return {"source": str(self.source), "bytes": text_bytes, "loss": loss, "spread": spread_}


def _jsonable(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


_ABSENT = {
    **{row.key: "n/a: input scales missing or bad" for row in (*SEMANTICS, *INT4_SEMANTICS)},
    BF16: "not given (--reference)",
    MISREAD: "not applicable: equal halves",
    SCALE_BITS: "not applicable: F32 group scales",
}


def _table(columns: Sequence[Column]) -> str:
    """Rows of the columns' forms. Several columns have a heading, and "-" for the reason why a row is not there."""
    alone = len(columns) == 1
    keys = [key for key in LABELS if any(key in ROWS[column.form] for column in columns)]
    lines = [
        [LABELS[key], *(f"{c.rows[key]:.4f}" if key in c.rows else _ABSENT[key] if alone else "-" for c in columns)]
        for key in keys
    ]
    spreads = [spread(column.rows) for column in columns]
    if any(value is not None for value in spreads):
        shown = ("-" if value is None else f"{value:.4f}" for value in spreads)
        lines.append(["spread of the five W4A4 rows", *shown])
    if not alone:
        names = [column.source.resolve().name for column in columns]
        distinct = len(set(names)) == len(names)
        lines.insert(0, ["", *(names if distinct else (str(column.source) for column in columns))])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded = ("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sources", metavar="SRC", type=Path, nargs="+", help="checkpoint directories, NVFP4 or int4; each is a column"
    )
    parser.add_argument("--reference", type=Path, metavar="DIR", help="the BF16 checkpoint, for its row")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE", help="held-out bytes")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table, an array of them for several SRC"
    )
    options = parser.parse_args(arguments)
    try:
        text = options.text.read_bytes()
        columns = [_column(source, text) for source in options.sources]
        if options.reference:
            reference = losses(load(options.reference), text)
            if BF16 not in reference:
                raise ValueError(f"{options.reference}: quantised; --reference takes the unquantised model")
            columns = [replace(column, rows={**column.rows, **reference}) for column in columns]
    except (OSError, ValueError) as error:
        print(f"eval_tinymoe: {error}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 4
    if options.json:
        objects = [column.to_json(len(text)) for column in columns]
        print(json.dumps(objects[0] if len(objects) == 1 else objects))
    else:
        source = f"{columns[0].source}: " if len(columns) == 1 else ""
        print(f"{source}loss in nats per byte, {len(text)} bytes\n{_table(columns)}")
    return 0


def _column(source: Path, text: bytes) -> Column:
    model = load(source)
    if model.form == UNQUANTIZED:
        raise ValueError(f"{source}: its experts are not quantised; --reference takes the unquantised model")
    return Column(source, model.form, losses(model, text))


if __name__ == "__main__":
    sys.exit(main())
