"""pre_quant_scale: AWQ's factors on the inputs of quantised linears."""

from __future__ import annotations

from collections.abc import Iterable

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.schema import Format

_SHARED_W13 = ("gate_proj", "up_proj", "w1", "w3")


def missing(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP602: an error when only some experts of a GEMM have a pre_quant_scale."""
    for moe in checkpoint.schema.moe_layers:
        for gemm, linears in (("w13", moe.w13), ("w2", moe.w2)):
            without = [linear for linear in linears if "pre_quant_scale" not in linear.params]
            if without and len(without) < len(linears):
                ids = tuple(sorted({linear.expert for linear in without if linear.expert is not None}))
                yield Finding(
                    "pre-quant-scale-missing",
                    "error",
                    f"{moe.path} {gemm}: {len(without)} of {len(linears)} linears lack pre_quant_scale; export again",
                    tensor=without[0].tensor_name("pre_quant_scale"),
                    layer=moe.layer,
                    experts=ids,
                    projection=gemm,
                )


def folded_shared_expert(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP603: a quantised shared expert without pre_quant_scale beside routed experts that have one.

    ModelOpt 0.47 folds the shared expert's into the norm before the block, which the router and the routed experts read
    too, without making up for it there.
    """
    linears = checkpoint.schema.linears
    for moe in checkpoint.schema.moe_layers:
        if not all("pre_quant_scale" in linear.params for linear in moe.w13):
            continue
        for name in (
            f"{moe.path}.{shared}.{part}" for shared in ("shared_expert", "shared_experts") for part in _SHARED_W13
        ):
            linear = linears.get(name)
            if linear is None or linear.format is Format.UNQUANTIZED or "pre_quant_scale" in linear.params:
                continue
            tensor = linear.params["weight"]
            message = (
                "no pre_quant_scale, but the routed experts have one: it was probably folded into the norm that router "
                "and routed experts read too, which then compute wrong; export again without AWQ on the shared expert"
            )
            yield Finding("shared-expert-folded", "warning", message, tensor.file, tensor.name, moe.layer)
            break
