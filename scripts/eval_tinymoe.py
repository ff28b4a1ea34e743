#!/usr/bin/env python3
"""Held-out loss of the tiny Qwen3-MoE under the ways in which engines read an NVFP4 checkpoint's scales.

The forward pass is plain torch in F32. W4A16 dequantises all weights. W4A4 also quantises the inputs of both expert
GEMMs, emulated; other linears stay W4A16. One small model, emulated: no substitute for an evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nvfp4prep.numerics import dequantize_nvfp4, quantize_dequantize_nvfp4

WINDOW = 512
BATCH = 16
EP_RANKS = 4
DEFAULT_TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "eval.bin"

StoredScales = Sequence[Sequence[float | None]]  # for each expert, its linears' input scales; None where missing
ScalePairs = tuple[tuple[float, float], ...]  # for each expert: quantised with, dequantised with


@dataclass(frozen=True)
class Gemm:
    """One expert GEMM of a layer: a weight [out, in] for each expert, and the input scales as stored."""

    weights: tuple[Tensor, ...]
    input_scales: StoredScales


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `w13_misread` is w13 with the up half dequantised with the gate's weight_scale_2."""

    norms: Mapping[str, Tensor]
    attention: Mapping[str, Tensor]
    router: Tensor
    w13: Gemm
    w13_misread: Gemm
    w2: Gemm


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, all weights dequantised to F32."""

    config: Mapping[str, Any]
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    quantized: bool  # the experts are NVFP4
    split: bool  # some gate and up have different weight_scale_2


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


BF16, W4A16, MISREAD = "bf16", "w4a16", "up-with-gate-scale"
SEMANTICS = (
    Semantics("own", "W4A4, own scale", own, own),
    Semantics("layer-max", "W4A4, layer maximum", layer_max, layer_max),
    Semantics("rank-max", f"W4A4, maximum within each of {EP_RANKS} EP ranks", rank_max, rank_max),
    Semantics("layer-max-own", "W4A4, quantised with layer maximum, dequantised with own", layer_max, own),
    Semantics("expert-0-own", "W4A4, quantised with expert 0's, dequantised with own", expert_0, own),
)
LABELS = {
    BF16: "reference: BF16",
    W4A16: "reference: W4A16",
    **{row.key: row.label for row in SEMANTICS},
    MISREAD: "W4A4, layer maximum, up half with gate's weight_scale_2",
}


# --- Loading ---


def load(directory: str | Path) -> Model:
    """Loads a Qwen3-MoE checkpoint, NVFP4 or unquantised, from all the safetensors files of a directory.

    Raises:
      ValueError: not a checkpoint that the forward pass here supports.
      OSError: a file can't be read.
    """
    root = Path(directory)
    config = json.loads((root / "config.json").read_text())
    _require_supported(config)
    tensors: dict[str, Tensor] = {}
    for file in sorted(root.glob("*.safetensors")):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}") from error
    try:
        layers = tuple(_layer(config, tensors, f"model.layers.{n}") for n in range(config["num_hidden_layers"]))
        names = [name for name in tensors if ".experts." in name and name.endswith("gate_proj.weight_scale_2")]
        embedding = tensors["model.embed_tokens.weight"].float()
        return Model(
            config=config,
            embedding=embedding,
            layers=layers,
            norm=tensors["model.norm.weight"].float(),
            head=embedding if config.get("tie_word_embeddings") else _weight(tensors, "lm_head"),
            quantized=bool(names),
            split=any(_scalar(tensors, n) != _scalar(tensors, n.replace("gate_proj", "up_proj")) for n in names),
        )
    except KeyError as error:
        raise ValueError(f"{root}: no tensor {error}; a Qwen3-MoE with one linear per expert is needed") from error


def _require_supported(config: Mapping[str, Any]) -> None:
    needed = {"model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1}
    needed |= {"mlp_only_layers": [], "use_sliding_window": False}
    for key, value in needed.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json: {key} is {config[key]!r}; this forward pass has only {value!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type is {rope['rope_type']!r}; this forward pass has only 'default'")


def _layer(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> Layer:
    experts = config.get("num_experts") or config["num_local_experts"]
    modules = [f"{path}.mlp.experts.{expert}" for expert in range(experts)]

    def input_scales(*projections: str) -> StoredScales:
        return [[_scalar(tensors, f"{m}.{p}_proj.input_scale", None) for p in projections] for m in modules]

    gates = [_weight(tensors, f"{m}.gate_proj") for m in modules]
    ups = [_weight(tensors, f"{m}.up_proj") for m in modules]
    misread = [_weight(tensors, f"{m}.up_proj", f"{m}.gate_proj") for m in modules]
    w13_scales = input_scales("gate", "up")
    return Layer(
        norms={
            "attention": tensors[f"{path}.input_layernorm.weight"].float(),
            "mlp": tensors[f"{path}.post_attention_layernorm.weight"].float(),
            "q": tensors[f"{path}.self_attn.q_norm.weight"].float(),
            "k": tensors[f"{path}.self_attn.k_norm.weight"].float(),
        },
        attention={p: _weight(tensors, f"{path}.self_attn.{p}_proj") for p in "qkvo"},
        router=_weight(tensors, f"{path}.mlp.gate"),
        w13=Gemm(tuple(map(torch.cat, zip(gates, ups, strict=True))), w13_scales),
        w13_misread=Gemm(tuple(map(torch.cat, zip(gates, misread, strict=True))), w13_scales),
        w2=Gemm(tuple(_weight(tensors, f"{m}.down_proj") for m in modules), input_scales("down")),
    )


def _weight(tensors: Mapping[str, Tensor], module: str, scale_2_of: str | None = None) -> Tensor:
    """A linear's weight in F32, dequantised if it is NVFP4, with the weight_scale_2 of `scale_2_of` if given."""
    weight = tensors[f"{module}.weight"]
    if weight.dtype == torch.uint8:
        scale_2 = tensors[f"{scale_2_of or module}.weight_scale_2"]
        scale = tensors[f"{module}.weight_scale"]
        try:
            return dequantize_nvfp4(weight, scale, scale_2)
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from error
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{module}.weight is {weight.dtype}; NVFP4 or unquantised is needed")
    return weight.float()


def _scalar(tensors: Mapping[str, Tensor], name: str, *default: None) -> float | None:
    return None if default and name not in tensors else tensors[name].item()


# --- The forward pass ---


def forward(
    model: Model, tokens: Tensor, scales: Sequence[tuple[ScalePairs, ScalePairs]] | None, misread: bool
) -> Tensor:
    """Logits [batch, length, vocab] of `tokens` [batch, length].

    Args:
      model: the model.
      tokens: integers.
      scales: for each layer, the scale pairs of w13 and w2; None leaves activations unquantised.
      misread: take the up halves dequantised with the gate's weight_scale_2.
    """
    eps = model.config["rms_norm_eps"]
    rotation = _rotation(model.config, tokens.shape[1])
    x = model.embedding[tokens]
    for n, layer in enumerate(model.layers):
        x = x + _attention(model.config, layer, _rms_norm(x, layer.norms["attention"], eps), rotation)
        hidden = _rms_norm(x, layer.norms["mlp"], eps).flatten(0, 1)
        x = x + _experts(model.config, layer, hidden, scales[n] if scales else None, misread).view_as(x)
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


def _experts(
    config: Mapping[str, Any], layer: Layer, x: Tensor, scales: tuple[ScalePairs, ScalePairs] | None, misread: bool
) -> Tensor:
    """The MoE block on x [tokens, hidden]: tokens are sorted by expert, each expert runs on its own rows."""
    top_k = config["num_experts_per_tok"]
    weights, chosen = F.linear(x, layer.router).softmax(-1).topk(top_k, -1)
    if config.get("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(layer.w2.weights)).tolist()
    w13 = layer.w13_misread if misread else layer.w13
    out = torch.zeros_like(x)
    for expert, slots in enumerate(order.split(counts)):
        rows = slots // top_k
        hidden = x[rows]
        if scales:
            hidden = quantize_dequantize_nvfp4(hidden, *scales[0][expert])
        gate, up = F.linear(hidden, w13.weights[expert]).chunk(2, -1)
        hidden = F.silu(gate) * up
        if scales:
            hidden = quantize_dequantize_nvfp4(hidden, *scales[1][expert])
        hidden = F.linear(hidden, layer.w2.weights[expert])
        out.index_add_(0, rows, hidden * weights.flatten()[slots, None])
    return out


# --- Losses ---


def losses(model: Model, text: bytes) -> dict[str, float]:
    """Held-out loss in nats per byte, by row key (see LABELS).

    Rows that don't apply are left out: W4A4 rows that need a scale that is missing or bad, and the misread up half
    where all halves are equal. An unquantised model has the one row "bf16". Rows whose scales are the same numbers
    are one computation, done once.

    Args:
      model: from `load`.
      text: a multiple of 512 bytes; each window of 512 is one sequence, a byte is a token.

    Raises:
      ValueError: `text` is empty or not a multiple of 512 bytes.
    """
    if not text or len(text) % WINDOW:
        raise ValueError(f"the text has {len(text)} bytes; a multiple of {WINDOW} is needed")
    if not model.quantized:
        return {BF16: _loss(model, text)}
    result = {W4A16: _loss(model, text)}
    done: dict[tuple[tuple[ScalePairs, ScalePairs], ...], float] = {}
    for row in SEMANTICS:
        pairs = [(row.pairs(layer.w13.input_scales), row.pairs(layer.w2.input_scales)) for layer in model.layers]
        scales = tuple((w13, w2) for w13, w2 in pairs if w13 and w2)
        if len(scales) < len(pairs):
            continue
        if scales not in done:
            done[scales] = _loss(model, text, scales)
        result[row.key] = done[scales]
        if row.key == "layer-max" and model.split:
            result[MISREAD] = _loss(model, text, scales, misread=True)
    return result


@torch.inference_mode()
def _loss(
    model: Model, text: bytes, scales: Sequence[tuple[ScalePairs, ScalePairs]] | None = None, misread: bool = False
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


def _table(rows: Mapping[str, float], split: bool) -> str:
    absent = dict.fromkeys(LABELS, "n/a: input scales missing or bad")
    absent[BF16] = "not given (--reference)"
    if not split:
        absent[MISREAD] = "not applicable: equal halves"
    width = max(map(len, LABELS.values()))
    lines = [f"{label:{width}}  " + (f"{rows[k]:.4f}" if k in rows else absent[k]) for k, label in LABELS.items()]
    difference = spread(rows)
    if difference is not None:
        lines.append(f"{'spread of the five W4A4 rows':{width}}  {difference:.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint directory, ModelOpt NVFP4")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="the BF16 checkpoint, for its row")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE", help="held-out bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    try:
        text = options.text.read_bytes()
        model = load(options.source)
        if not model.quantized:
            raise ValueError(f"{options.source}: its experts are not NVFP4")
        rows = losses(model, text)
        if options.reference:
            reference = losses(load(options.reference), text)
            if BF16 not in reference:
                raise ValueError(f"{options.reference}: quantised; --reference takes the unquantised model")
            rows |= reference
    except (OSError, ValueError) as error:
        print(f"eval_tinymoe: {error}", file=sys.stderr)
        return 3 if isinstance(error, ValueError) else 4
    if options.json:
        loss = {key: rows.get(key) for key in LABELS}
        print(json.dumps({"source": str(options.source), "bytes": len(text), "loss": loss, "spread": spread(rows)}))
    else:
        print(f"{options.source}: loss in nats per byte, {len(text)} bytes\n{_table(rows, model.split)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
