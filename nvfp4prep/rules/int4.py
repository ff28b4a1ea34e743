"""int4 and AWQ."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP602",
        "pre-quant-scale-missing",
        "error",
        "headers",
        "some experts of a GEMM without a pre_quant_scale",
        why=(
            "pre_quant_scale multiplies the input of an expert. TensorRT-LLM takes one for all experts of a layer and "
            "refuses others; a kernel has it for all or for none."
        ),
        fix=(
            "Export the checkpoint again, so that all experts of a layer have one or none has. Where experts lack one "
            "because they need none, convert with `--impute ones`: it counts as ones then, and is a warning."
        ),
        example=(
            "error NVP602 [pre-quant-scale-missing] layer 3, expert 5, "
            "model.layers.3.mlp.experts.5.gate_proj.pre_quant_scale: model.layers.3.mlp w13: 1 of 256 linears lack "
            "pre_quant_scale; --impute ones takes ones; or export again"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP603",
        "shared-expert-folded",
        "warning",
        "headers",
        "a shared expert's pre_quant_scale folded into a shared norm",
        why=(
            "ModelOpt 0.47 folds the shared expert's factors into the norm before the block. Router and routed experts "
            "read that norm too, and compute wrong in every engine."
        ),
        fix="Export the checkpoint again without AWQ on the shared expert.",
        example=(
            "warning NVP603 [shared-expert-folded] layer 3, model.layers.3.mlp.shared_experts.gate_proj.weight, "
            "model-00001-of-00004.safetensors: no pre_quant_scale, but the routed experts have one: it was probably "
            "folded into the norm that router and routed experts read too, which then compute wrong; export again "
            "without AWQ on the shared expert"
        ),
    ),
    Rule(
        "NVP604",
        "pre-quant-scale-bad",
        "error",
        "full",
        "a pre_quant_scale that is zero, inf or NaN",
        why=(
            "The linear's input is multiplied by these factors: a zero drops an input, and inf or NaN spoils every "
            "output."
        ),
        fix="Export the checkpoint again.",
        example=(
            "error NVP604 [pre-quant-scale-bad] layer 3, expert 5, "
            "model.layers.3.mlp.experts.5.up_proj.pre_quant_scale, model-00001-of-00004.safetensors: 1 of 2048 factors "
            "are zero, inf or NaN (0.0 at 1); export again"
        ),
    ),
    Rule(
        "NVP605",
        "int4-scale-bad",
        "error",
        "full",
        "an int4 group scale that is inf or NaN",
        why="Every weight of the group becomes inf or NaN, and with it an output of the expert.",
        fix="Export these weights again.",
        example=(
            "error NVP605 [int4-scale-bad] layer 3, expert 5, model.layers.3.mlp.experts.5.up_proj.weight_scale, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp up_proj: 1 of 1,572,864 block scales are inf or NaN "
            "(the first in row 0, block 1); export these weights again"
        ),
    ),
    Rule(
        "NVP606",
        "int4-gate-up-identical",
        "warning",
        "full",
        "gate and up have identical int4 scales",
        why=(
            "Different weights have different scales: one of the two was quantised with the other's. ModelOpt 0.47 "
            "does so with Qwen3, whose gates then have twice the error."
        ),
        fix="Export the checkpoint again with another version of ModelOpt.",
        example=(
            "warning NVP606 [int4-gate-up-identical] layer 3, experts 0-127, "
            "model.layers.3.mlp.experts.0.gate_proj.weight_scale, model-00001-of-00004.safetensors: "
            "model.layers.3.mlp: gate and up of 128 have the same scales, which different weights don't: one of them "
            "was quantised with the other's and lost accuracy; export again with another ModelOpt version"
        ),
    ),
    Rule(
        "NVP607",
        "pre-quant-scale-shape",
        "error",
        "headers",
        "a pre_quant_scale that is not one float for each input",
        why=(
            "pre_quant_scale multiplies the linear's inputs one by one. Of another size or dtype it belongs to another "
            "linear, or to a rank's part of it: engines stop, or scale the wrong inputs."
        ),
        fix="Export the checkpoint again.",
        example=(
            "error NVP607 [pre-quant-scale-shape] layer 3, expert 5, "
            "model.layers.3.mlp.experts.5.up_proj.pre_quant_scale, model-00001-of-00004.safetensors: BF16 [1024] where "
            "a float for each of 2048 inputs belongs; export again"
        ),
    ),
)
