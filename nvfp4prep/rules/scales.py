"""Values of scalar scales."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP401",
        "input-scale-missing",
        "error",
        "scales",
        "experts or linears without an input_scale",
        why=(
            "Mostly these are experts that saw no token in calibration. vLLM uses uninitialised memory for them, "
            "SGLang 1.0 for the whole layer, and TensorRT-LLM stops with a KeyError."
        ),
        fix=(
            "Convert with `--impute layer-max`, which takes the maximum of the layer's other experts, or calibrate "
            "again with more tokens. Where the message says that none is left to impute from, only the latter helps."
        ),
        example=(
            "error NVP401 [input-scale-missing] layer 3, experts 5-7, "
            "model.layers.3.mlp.experts.5.down_proj.input_scale, model-00001-of-00004.safetensors: model.layers.3.mlp "
            "w2: 3 of 128 input_scale missing; --impute layer-max replaces them by the maximum of the others; or "
            "calibrate again with more tokens"
        ),
    ),
    Rule(
        "NVP402",
        "input-scale-bad",
        "error",
        "scales",
        "an input_scale that is zero, negative, subnormal, inf or NaN",
        why=(
            "Engines take a layer's maximum and its reciprocal: one inf or NaN spoils all experts. A zero becomes 1/0 "
            "where each expert keeps its own, as in vLLM's CUTLASS and SGLang's CuteDSL."
        ),
        fix=(
            "Convert with `--impute layer-max`, which takes the maximum of the layer's usable ones, or calibrate "
            "again. Where the message says that none is left to impute from, only the latter helps."
        ),
        example=(
            "error NVP402 [input-scale-bad] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.input_scale, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp w13: 2 of 256 input_scale zero; --impute layer-max "
            "replaces them by the maximum of the others; or calibrate again with more tokens"
        ),
    ),
    Rule(
        "NVP403",
        "input-scale-imputed",
        "warning",
        "scales",
        "an input_scale that `--impute` replaced",
        why=(
            "Nobody measured the activations of these experts. The maximum of the others may be coarser than needed, "
            "or too small."
        ),
        fix="Calibrate again with more tokens if these experts matter for your prompts.",
        example=(
            "warning NVP403 [input-scale-imputed] layer 3, experts 5-7: model.layers.3.mlp w2: 3 missing input_scale "
            "replaced by the maximum of the others, 0.0188802"
        ),
    ),
    Rule(
        "NVP404",
        "input-scale-differs",
        "warning",
        "scales",
        "input scales of one GEMM differ",
        why=(
            "Most kernels get the layer's maximum; vLLM's CUTLASS and, for w2, SGLang's CuteDSL get each expert's own. "
            "Where gate and up differ, SGLang keeps the one loaded last and TensorRT-LLM refuses."
        ),
        fix="Run `nvfp4prep convert`, which writes the layer's maximum for all its experts.",
        example=(
            "warning NVP404 [input-scale-differs] layer 3, expert 41: model.layers.3.mlp w2: 128 input_scale from "
            "0.000549316 to 0.0094401 (17.2x apart); engines take the largest, a rank's largest or each its own: "
            "convert makes them one"
        ),
    ),
    Rule(
        "NVP405",
        "input-scales-kept",
        "warning",
        "scales",
        "`--input-scale keep` leaves differing input scales",
        why="The output still gives other results from one engine or backend to the next.",
        fix="Leave `--input-scale keep` out, unless the output is for a backend that takes each expert's own.",
        example=(
            "warning NVP405 [input-scales-kept] layer 0: 96 of 96 GEMMs keep differing input_scales (up to 17.2x "
            "apart): engines and backends take the layer's maximum, a rank's, or each expert's own"
        ),
    ),
    Rule(
        "NVP406",
        "global-scale-bad",
        "error",
        "scales",
        "a weight_scale_2 that is zero, negative, subnormal, inf or NaN",
        why=(
            "Every value of the weight is multiplied by it: the expert computes zero, inf or NaN, or with the wrong "
            "sign."
        ),
        fix="Export the checkpoint again.",
        example=(
            "error NVP406 [global-scale-bad] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight_scale_2, "
            "model-00001-of-00004.safetensors: weight_scale_2 is NaN (nan); the weight can't be dequantised, export it "
            "again"
        ),
    ),
    Rule(
        "NVP407",
        "global-scale-ratio",
        "error",
        "scales",
        "global scales too far apart to be made one",
        why=(
            "Engines need one scale for these linears. Made one, block scales of the smaller become subnormal or zero "
            "in E4M3, and its weights are lost."
        ),
        fix="Export again with one weight_scale_2 for the linears that engines fuse.",
        example=(
            "error NVP407 [global-scale-ratio] layer 3, expert 5, "
            "model.layers.3.mlp.experts.0.gate_proj.weight_scale_2, model-00001-of-00004.safetensors: "
            "model.layers.3.mlp: 1 sets of weight_scale_2 that engines need to be one differ by up to 1.05e+06x; "
            "unified, all block scales of the smaller would vanish; export again"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP408",
        "gate-up-scale-differs",
        "warning",
        "scales",
        "gate and up have two different weight_scale_2",
        why=(
            "vLLM reads up with the gate's scale on every backend, and TensorRT-LLM both halves with the larger. "
            "SGLang is right on flashinfer-trtllm; its CUTLASS, CuteDSL and Marlin take the gate's."
        ),
        fix="Run `nvfp4prep convert`, which makes the two one and rescales the smaller half's block scales.",
        example=(
            "warning NVP408 [gate-up-scale-differs] layer 3, experts 2, 17, 40-44, 90, 101: model.layers.3.mlp: 9 of "
            "128 gate/up pairs have two weight_scale_2, up to 1.92x apart (expert 17): vLLM reads up with the gate's; "
            "convert makes them one or keeps both where the kernel can"
        ),
    ),
    Rule(
        "NVP409",
        "gate-up-split",
        "warning",
        "scales",
        "`--w13-scale split` leaves two weight_scale_2",
        why="The output keeps what vLLM and TensorRT-LLM read wrong, and SGLang on all backends but one.",
        fix="Leave `--w13-scale split` out.",
        example=(
            "warning NVP409 [gate-up-split] layer 3: model.layers.3.mlp: 9 gate/up pairs keep two weight_scale_2 (up "
            "to 1.92x apart): vLLM reads the up half with the gate's, TensorRT-LLM both with the larger, SGLang is "
            "right on flashinfer-trtllm only"
        ),
    ),
    Rule(
        "NVP410",
        "fused-linear-scale-differs",
        "warning",
        "scales",
        "linears that engines fuse have different scales",
        why=(
            "Engines fuse q/k/v, gate/up and q_a/kv_a into one GEMM. vLLM and SGLang read all members with the larger "
            "weight_scale_2 (SGLang kv_a with q_a's), and TensorRT-LLM refuses."
        ),
        fix="Run `nvfp4prep convert`, which gives the group one scale and rescales the block scales of the others.",
        example=(
            "warning NVP410 [fused-linear-scale-differs] layer 3, model.layers.3.self_attn.q_proj.weight_scale_2: "
            "model.layers.3.self_attn.{q_proj,k_proj,v_proj}: weight_scale_2 from 6.10352e-05 to 0.00012207 (2x "
            "apart), but engines fuse these linears and take one; convert makes them one"
        ),
    ),
    Rule(
        "NVP411",
        "scale-reciprocal",
        "error",
        "scales",
        "scales stored as their reciprocals",
        why=(
            "ModelOpt stores amax / 2688, compressed-tensors the reciprocal. Taken for the other the weights are wrong "
            "by many orders of magnitude in every engine."
        ),
        fix="Write 1 / scale for each of them, or export the checkpoint again with NVIDIA ModelOpt.",
        example=(
            "error NVP411 [scale-reciprocal] model.layers.0.mlp.experts.0.down_proj.weight_scale_2, "
            "model-00001-of-00004.safetensors: 18624 of 18624 weight_scale_2 are above 1 (13169.9 here; the largest "
            "value would be 3.54e+07): these are reciprocals, as compressed-tensors stores them; write 1 / scale"
        ),
    ),
    Rule(
        "NVP412",
        "kv-scale-bad",
        "error",
        "scales",
        "a k_scale or v_scale that is zero, negative, inf, NaN or not one float",
        why=(
            "Keys and values are divided by their scale before they go into the KV cache: zero gives inf, and inf or "
            "NaN spoils all that the layer attends to."
        ),
        fix="Calibrate the KV cache again.",
        example=(
            "error NVP412 [kv-scale-bad] layer 3, model.layers.3.self_attn.k_proj.k_scale, "
            "model-00001-of-00004.safetensors: k_scale is zero (0.0); calibrate the KV cache again"
        ),
    ),
    Rule(
        "NVP413",
        "kv-scale-unpaired",
        "warning",
        "headers",
        "a layer with a k_scale and no v_scale, or the reverse",
        why=(
            "Engines take 1.0 for the one that is missing, which nobody measured: values above 448 are clipped in an "
            "FP8 cache."
        ),
        fix="Export the KV cache's scales again, for keys and values.",
        example=(
            "warning NVP413 [kv-scale-unpaired] layer 3, model.layers.3.self_attn.k_proj.k_scale, "
            "model-00001-of-00004.safetensors: k_scale without v_scale: engines take 1.0 for the other; export the KV "
            "cache again"
        ),
    ),
    Rule(
        "NVP414",
        "kv-scale-one",
        "info",
        "scales",
        "all k_scale and v_scale are exactly 1",
        why=(
            "No calibration gives exactly 1 everywhere: it is a default. In an FP8 cache values above 448 would be "
            "clipped."
        ),
        fix="Calibrate the KV cache if you serve with an FP8 one.",
        example=(
            "info NVP414 [kv-scale-one] model.layers.0.self_attn.k_proj.k_scale, model-00001-of-00004.safetensors: all "
            "96 k_scale and v_scale are exactly 1: the KV cache was probably not calibrated"
        ),
    ),
    Rule(
        "NVP415",
        "kv-scale-missing",
        "warning",
        "headers",
        "an FP8 KV cache by the configuration, but layers without scales",
        why="Engines quantise the keys and values of these layers with 1.0, which nobody measured.",
        fix="Export the KV cache's scales again, or take the FP8 KV cache out of the configuration.",
        example=(
            "warning NVP415 [kv-scale-missing] config.json: the KV cache is FP8 by the configuration, but layers 40-47 "
            "have no k_scale and v_scale: engines take 1.0"
        ),
    ),
    Rule(
        "NVP416",
        "fp8-scale-bad",
        "error",
        "scales",
        "an FP8 linear's scale that is zero, negative, inf or NaN",
        why=(
            "Weights are multiplied by weight_scale and activations divided by input_scale: the linear's outputs "
            "become zero, inf or NaN, and with them the answer."
        ),
        fix="Export the checkpoint again; calibrate again if it is an input_scale.",
        example=(
            "error NVP416 [fp8-scale-bad] layer 3, model.layers.3.self_attn.q_proj.input_scale, "
            "model-00001-of-00004.safetensors: the scale of an FP8 linear is zero (0.0); export it again"
        ),
    ),
    Rule(
        "NVP417",
        "input-scale-outlier",
        "error",
        "scales",
        "an input_scale far from those of the other experts",
        why=(
            "Where experts share the largest input_scale, one that is a reciprocal or garbage becomes that of the "
            "whole layer, and the activations of every other expert vanish."
        ),
        fix="Calibrate again, or write the right value: input_scale is the largest activation / 2688.",
        example=(
            "error NVP417 [input-scale-outlier] layer 3, expert 41, "
            "model.layers.3.mlp.experts.41.gate_proj.input_scale, model-00001-of-00004.safetensors: "
            "model.layers.3.mlp w13: 2 of 256 input_scale lie more than 16,384x from the median "
            "0.00179 (558.545 here): a reciprocal, or a fault; calibrate again"
        ),
    ),
)
