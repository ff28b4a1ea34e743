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
        fix="Take the target, engine, TP size or option that the message names, or `--target hf`.",
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
        "a kernel's scale that its dtype can't hold",
        why=(
            "Kernels take products and quotients of scales. One that becomes zero, inf or subnormal makes its experts "
            "compute zero or NaN, though each scale alone is fine. The same goes for scales that factors of "
            "pre_quant_scale are folded into."
        ),
        fix=(
            "Export these weights again: their scales lie outside any usual range. Where down's pre_quant_scale does "
            "not fit into up's E4M3 block scales: export with ModelOpt 0.47 or later, which folds it before it "
            "quantises."
        ),
        example=(
            "error NVP703 [kernel-scale-bad] layer 3, experts 0-127: flashinfer-trtllm/vllm: model.layers.3.mlp: "
            "g1_scale_c would be zero; the product or quotient of its scales does not fit its dtype; use --target hf, "
            "which keeps what is stored"
        ),
    ),
    Rule(
        "NVP704",
        "activation-scales-dropped",
        "warning",
        "headers",
        "W4A8's activation scales, which a target has no place for",
        why="The model was calibrated for FP8 activations. Without their scales, activations stay in 16 bits.",
        fix="Nothing to do where W4A16 will serve; W4A8 kernels need `--target hf` and TensorRT-LLM.",
        example=(
            "warning NVP704 [activation-scales-dropped] model.layers.0.mlp.experts.0.down_proj.input_scale, "
            "model-00001-of-00003.safetensors: 208 linears have scales for FP8 activations (W4A8), which "
            "pack-quantized has no place for: activations stay 16-bit (W4A16)"
        ),
    ),
)
