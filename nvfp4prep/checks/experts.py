"""MoE blocks beyond their quantised linears: 16-bit experts, shared experts, routers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding, counted, named, ranges
from nvfp4prep.header import TensorInfo, short
from nvfp4prep.model_config import sections
from nvfp4prep.schema import SCALAR_PARAMS, Format, MoeLayer, odd_ones

_OWN_RULES = frozenset({"weight", "weight_scale", *SCALAR_PARAMS, "pre_quant_scale", "bias"})
"""Parameters whose absence is told by `schema`, `scales` and `awq`."""
_ROUTERS = ("gate", "router", "router.layer", "router.classifier")
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
        message = f"the shared experts of {named('layer', layers)} are 16-bit; engines can't fuse them with the routed"
        yield Finding("shared-expert-unquantized", "info", message, tensor.file, tensor.name)


def uneven(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP326: parameters that only some of a layer's experts have, but those that rules of their own are for."""
    for moe in checkpoint.schema.moe_layers:
        for projection in ("gate", "up", "down"):
            linears = [linear for linear in (getattr(expert, projection) for expert in moe.experts) if linear]
            for param in sorted({param for linear in linears for param in linear.params} - _OWN_RULES):
                found = odd_ones(linears, param)
                if found is None:
                    continue
                odd, what = found[0], "lack" if found[1] else "have"
                yield Finding(
                    "expert-parameter-uneven",
                    "warning",
                    f"{moe.path} {projection}: {len(odd)} of {len(linears)} experts {what} {param}; kernels take "
                    "one for all or for none; export again, or remove it",
                    odd[0].params["weight"].file,
                    odd[0].tensor_name(param),
                    moe.layer,
                    tuple(sorted(linear.expert for linear in odd if linear.expert is not None)),
                )


def router_shape(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP321: rows of the router, and its biases, against the experts stored.

    More are possible: LongCat's router also scores experts without weights, which config.json counts.
    """
    tensors = checkpoint.source.tensors
    without_weights = _zero_experts(checkpoint.config)
    for moe in checkpoint.schema.moe_layers:
        fitting = {moe.expert_count, moe.expert_count + without_weights}
        routers = [tensors[name] for name in (f"{moe.path}.{router}.weight" for router in _ROUTERS) if name in tensors]
        for tensor in routers:
            if len(tensor.shape) == 2 and tensor.shape[0] not in fitting:
                yield _misfit(moe, tensor)
        fitting |= {tensor.shape[0] for tensor in routers if tensor.shape}
        for name in (f"{moe.path}.{part}" for part in (*_plain_biases(), *(f"{router}.bias" for router in _ROUTERS))):
            bias = tensors.get(name)
            if bias is not None and bias.shape not in {(count,) for count in fitting}:
                message = f"a bias {short(list(bias.shape))} for {moe.expert_count} experts; fetch the router again"
                yield Finding("router-shape", "error", message, bias.file, bias.name, moe.layer)


def _misfit(moe: MoeLayer, router: TensorInfo) -> Finding:
    rows = router.shape[0]
    message = f"scores {rows} experts, {moe.expert_count} are stored; "
    if rows < moe.expert_count:
        message += "fetch the whole checkpoint"
        return Finding("router-shape", "error", message, router.file, router.name, moe.layer)
    message += "a token may be sent to one that is not there: look whether router and experts belong together"
    return Finding("router-shape", "warning", message, router.file, router.name, moe.layer)


def _zero_experts(config: Mapping[str, object]) -> int:
    """How many experts without weights config.json counts (LongCat: zero_expert_num); 0 without any."""
    for section in sections(config):
        for key, value in section.items():
            if "zero_expert" in key and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


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
            f"{found[0].dtype} in {counted(len(found), 'layer')}: nearby scores become equal and other experts are "
            "chosen; copied as it is: take the F32 one from the original model"
        )
        yield Finding("router-bias-dtype", "warning", message, found[0].file, found[0].name)


def _plain_biases() -> Iterable[str]:
    """Those of one value for each expert; ERNIE's moe_statics has another dimension."""
    return (name for name in _bias_names() if "moe_statics" not in name)


def _bias_names() -> Iterable[str]:
    for name in _BIASES:
        yield name
        for router in ("gate", "router"):
            yield f"{router}.{name}"
