"""MoE blocks beyond their quantised linears: 16-bit experts, shared experts, routers."""

from __future__ import annotations

from collections.abc import Iterable

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding, ranges
from nvfp4prep.schema import Format, MoeLayer

_ROUTERS = ("gate.weight", "router.weight", "router.layer.weight")
_SHARED = ("shared_expert", "shared_experts")
_BIASES = ("e_score_correction_bias", "expert_bias", "moe_statics.e_score_correction_bias")


def unquantized(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP226: the share of expert bytes that are packed; a warning below one half."""
    if checkpoint.quant is None:
        return
    packed = whole = 0
    plain: list[MoeLayer] = []
    for moe in checkpoint.schema.moe_layers:
        nbytes = sum(tensor.nbytes for linear in (*moe.w13, *moe.w2) for tensor in linear.params.values())
        whole += nbytes
        if moe.format is Format.UNQUANTIZED:
            plain.append(moe)
        else:
            packed += nbytes
    if plain:
        layers = [moe.layer for moe in plain if moe.layer is not None]
        yield Finding(
            "experts-unquantized",
            "warning" if packed * 2 < whole else "info",
            f"{packed / whole:.0%} of the expert bytes are packed; {len(plain)} of "
            f"{len(checkpoint.schema.moe_layers)} MoE layers are 16-bit ({ranges(layers) or plain[0].path})",
            plain[0].w2[0].params["weight"].file,
            plain[0].w2[0].params["weight"].name,
        )


def shared_unquantized(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP227: 16-bit shared experts beside quantised routed ones; engines must not fuse the two."""
    linears = checkpoint.schema.linears
    found = []
    for moe in checkpoint.schema.moe_layers:
        if moe.format is Format.UNQUANTIZED:
            continue
        for name in _SHARED:
            linear = linears.get(f"{moe.path}.{name}.down_proj")
            if linear is not None and linear.format is Format.UNQUANTIZED:
                found.append((moe, linear))
    if found:
        layers = [moe.layer for moe, _ in found if moe.layer is not None]
        tensor = found[0][1].params["weight"]
        message = f"the shared experts of layers {ranges(layers)} are 16-bit; engines can't fuse them with the routed"
        yield Finding("shared-expert-unquantized", "info", message, tensor.file, tensor.name)


def router_shape(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP321: rows of the router against the experts stored; more are possible (LongCat's experts without weights)."""
    for moe in checkpoint.schema.moe_layers:
        for name in _ROUTERS:
            tensor = checkpoint.source.tensors.get(f"{moe.path}.{name}")
            if tensor is None or len(tensor.shape) != 2 or tensor.shape[0] == moe.expert_count:
                continue
            severity = "error" if tensor.shape[0] < moe.expert_count else "warning"
            message = f"scores {tensor.shape[0]} experts, {moe.expert_count} are stored; fetch the whole checkpoint"
            yield Finding("router-shape", severity, message, tensor.file, tensor.name, moe.layer)  # type: ignore[arg-type]


def router_bias(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP322: e_score_correction_bias in 16 bits, which changes the routing."""
    names = {f"{moe.path}.{part}" for moe in checkpoint.schema.moe_layers for part in _bias_names()}
    found = [
        tensor
        for name, tensor in checkpoint.source.tensors.items()
        if name in names and tensor.dtype in ("BF16", "F16")
    ]
    if found:
        message = (
            f"{found[0].dtype} in {len(found)} layers: nearby scores become equal and other experts are chosen; "
            "copied as it is: take the F32 one from the original model"
        )
        yield Finding("router-bias-dtype", "warning", message, found[0].file, found[0].name)


def _bias_names() -> Iterable[str]:
    for name in _BIASES:
        yield name
        for router in ("gate", "router"):
            yield f"{router}.{name}"
