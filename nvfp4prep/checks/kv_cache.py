"""k_scale and v_scale of a quantised KV cache."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.dialects import layer_number
from nvfp4prep.findings import Finding, named
from nvfp4prep.header import TensorInfo, short
from nvfp4prep.quant_config import CONFIG
from nvfp4prep.scales import fault
from nvfp4prep.schema import FLOAT_DTYPES
from nvfp4prep.survey import read_values

_SCALES = {"k_scale": "k", "v_scale": "v"}
_ATTENTION_KEYS = ("k_proj", "kv_b_proj", "qkv_proj", "wk")


def stored(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, TensorInfo]]:
    """k and v scales by attention module: `self_attn.k_proj.k_scale` and `self_attn.k_scale` both count."""
    found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for tensor in checkpoint.source.tensors.values():
        module, _, param = tensor.name.rpartition(".")
        if param in _SCALES:
            parent, _, last = module.rpartition(".")
            found[parent if last in ("k_proj", "v_proj") else module][_SCALES[param]] = tensor
    return found


def unpaired(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP413: one of the two."""
    for module, pair in stored(checkpoint).items():
        if len(pair) == 1:
            ((kind, tensor),) = pair.items()
            other = "v" if kind == "k" else "k"
            message = f"{kind}_scale without {other}_scale: engines take 1.0 for the other; export the KV cache again"
            yield Finding("kv-scale-unpaired", "warning", message, tensor.file, tensor.name, layer_number(module))


def missing(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP415: an FP8 KV cache by the configuration, and attention layers without scales."""
    if checkpoint.quant is None or (checkpoint.quant.kv_cache or "").upper() != "FP8":
        return
    with_scales = set(stored(checkpoint))
    attention = {
        module.rpartition(".")[0]
        for module in checkpoint.schema.linears
        if module.rpartition(".")[2] in _ATTENTION_KEYS and layer_number(module) is not None
    }
    without = sorted(layer_number(module) or 0 for module in attention - with_scales)
    if without:
        where = f"{named('layer', without)} {'has' if len(set(without)) == 1 else 'have'} no"
        where = where if with_scales else "no layer has"
        message = f"the KV cache is FP8 by the configuration, but {where} k_scale and v_scale: engines take 1.0"
        yield Finding("kv-scale-missing", "warning", message, CONFIG)


def values(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP412: what is not one float, and unusable values. NVP414: all exactly 1, which no calibration gives."""
    tensors = []
    for tensor in (tensor for pair in stored(checkpoint).values() for tensor in pair.values()):
        if tensor.dtype in FLOAT_DTYPES and math.prod(tensor.shape) == 1:
            tensors.append(tensor)
        else:
            form = f"{tensor.dtype} {short(list(tensor.shape))}"
            message = f"{form} where one float belongs; calibrate the KV cache again"
            yield Finding("kv-scale-bad", "error", message, tensor.file, tensor.name, layer_number(tensor.name))
    if not tensors:
        return
    read = read_values(checkpoint.source, tensors)
    for tensor in tensors:
        bad = next((value for value in read[tensor.name] if fault(value)), None)
        if bad is not None:
            message = f"{tensor.name.rpartition('.')[2]} is {fault(bad)} ({bad}); calibrate the KV cache again"
            yield Finding(
                "kv-scale-bad",
                "error",
                message,
                tensor.file,
                tensor.name,
                layer_number(tensor.name),
                values={"value": bad},
            )
    if {value for tensor in tensors for value in read[tensor.name]} == {1.0}:
        message = f"all {len(tensors)} k_scale and v_scale are exactly 1: the KV cache was probably not calibrated"
        yield Finding("kv-scale-one", "info", message, tensors[0].file, tensors[0].name, values={"value": 1.0})
