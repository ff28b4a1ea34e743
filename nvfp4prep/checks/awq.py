"""pre_quant_scale: AWQ's factors on the inputs of quantised linears."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.header import short
from nvfp4prep.scales import ImputePolicy
from nvfp4prep.schema import FLOAT_DTYPES, Format, lacking_factors

_SHARED_W13 = ("gate_proj", "up_proj", "w1", "w3")
_REMEDY = "--impute ones takes ones; or export again"


def missing(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP602: an error when only some experts of a GEMM have a pre_quant_scale; see `imputed`."""
    for moe in checkpoint.schema.moe_layers:
        for gemm, (without, _) in lacking_factors(moe).items():
            total = len(moe.w13 if gemm == "w13" else moe.w2)
            yield Finding(
                "pre-quant-scale-missing",
                "error",
                f"{moe.path} {gemm}: {len(without)} of {total} linears lack pre_quant_scale; {_REMEDY}",
                tensor=without[0].tensor_name("pre_quant_scale"),
                layer=moe.layer,
                experts=tuple(sorted({linear.expert for linear in without if linear.expert is not None})),
                projection=gemm,
            )


def imputed(findings: Iterable[Finding], impute: ImputePolicy) -> list[Finding]:
    """The findings, with those of `missing` as warnings that say what is done where ones are imputed."""
    if impute != "ones":
        return list(findings)
    return [
        replace(finding, severity="warning", message=finding.message.replace(_REMEDY, "it counts as ones"))
        if finding.rule == "pre-quant-scale-missing"
        else finding
        for finding in findings
    ]


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


def shapes(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP607: a pre_quant_scale that is not one float for each input; fused experts may have a row for each."""
    for linear in checkpoint.schema.linears.values():
        tensor = linear.params.get("pre_quant_scale")
        if tensor is None or linear.format not in (Format.NVFP4, Format.INT4):
            continue
        allowed: list[tuple[int, ...]] = [(linear.columns,)]
        if linear.experts is not None:
            allowed += [(linear.experts, linear.columns), (linear.experts, 1, linear.columns)]
        if tensor.dtype in FLOAT_DTYPES and tensor.shape in allowed:
            continue
        yield Finding(
            "pre-quant-scale-shape",
            "error",
            f"{tensor.dtype} {short(list(tensor.shape))} where a float for each of {linear.columns} inputs belongs; "
            "export again",
            tensor.file,
            tensor.name,
            linear.layer,
            () if linear.expert is None else (linear.expert,),
        )
