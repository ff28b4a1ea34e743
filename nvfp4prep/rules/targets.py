"""What a packed target, or its kernel, has no form for."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP701",
        "target-refused",
        "error",
        "headers",
        "the checkpoint can't be packed for a target",
        why=(
            "The kernel has no place for something in the experts: a size, an activation, biases, factors. Packed all "
            "the same they would compute wrong."
        ),
        fix="Take the target, engine or TP size that the message names, or `--target hf`.",
        example=(
            "error NVP701 [target-refused] layer 3: flashinfer-trtllm/vllm: model.layers.3.mlp: intermediate size 24 "
            "per rank cuts NVFP4's groups of 16; --tp 1, 2, 4, 8, 16 works"
        ),
    ),
    Rule(
        "NVP702",
        "block-scale-bad",
        "error",
        "full",
        "block scales that a layout can't store",
        why="Marlin's form of block scales has neither sign nor NaN, so that such a scale would become another number.",
        fix="Export these weights again.",
        example=(
            "error NVP702 [block-scale-bad] layer 3, expert 5: vllm-marlin/vllm: model.layers.3.mlp: 1 negative block "
            "scales, which Marlin's form has no code for; use another target"
        ),
    ),
    Rule(
        "NVP703",
        "kernel-scale-bad",
        "error",
        "full",
        "a kernel's scale that F32 can't hold",
        why=(
            "Kernels take products and quotients of scales. One that becomes zero, inf or subnormal makes its experts "
            "compute zero or NaN, though each scale alone is fine."
        ),
        fix="Export these weights again: their scales lie outside any usual range.",
        example=(
            "error NVP703 [kernel-scale-bad] layer 3, experts 0-127: flashinfer-trtllm/vllm: model.layers.3.mlp: "
            "g1_scale_c would be zero; the product or quotient of its scales does not fit its dtype"
        ),
    ),
)
