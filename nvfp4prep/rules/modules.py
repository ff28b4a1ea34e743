"""Modules, dtypes and shapes."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP301",
        "module-named-twice",
        "error",
        "headers",
        "two tensors stand for the same parameter",
        why=(
            "Which of the two an engine uses depends on the names that it knows, or on the order in which it loads "
            "them."
        ),
        fix="Remove one of the two, or export the checkpoint again.",
        example=(
            "error NVP301 [module-named-twice] layer 0, "
            "model.layers.0.feed_forward.experts.gate_up_proj_weight_scale_2, model-00001-of-00004.safetensors: stands "
            "for the same module as model.layers.0.feed_forward.experts.gate_up_proj.weight_scale; one of the two has "
            "to go"
        ),
    ),
    Rule(
        "NVP302",
        "scale-without-weight",
        "error",
        "headers",
        "a scale that nothing uses",
        why=(
            "The weight is missing, has another name or is not quantised. Engines stop at such a scale, or drop it "
            "silently and compute without it."
        ),
        fix="Fetch or export the checkpoint again, so that each scale stands beside its weight.",
        example=(
            "error NVP302 [scale-without-weight] layer 3, expert 5, "
            "model.layers.3.mlp.experts.5.gate_proj.weight_scale, model-00001-of-00004.safetensors: no weight uses "
            "this scale; the weight is missing or has another name"
        ),
    ),
    Rule(
        "NVP303",
        "block-scale-missing",
        "error",
        "headers",
        "a packed weight without block scales",
        why="A 4-bit code means nothing without the scale of its block.",
        fix="Fetch or export the checkpoint again.",
        example=(
            "error NVP303 [block-scale-missing] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight, "
            "model-00001-of-00004.safetensors: the packed weight has no weight_scale; export or download it again"
        ),
    ),
    Rule(
        "NVP304",
        "block-scale-dtype",
        "error",
        "headers",
        "block scales of an unexpected dtype",
        why=(
            "NVFP4's block scales are E4M3. Bytes of another dtype are mostly scales swizzled for a kernel, which "
            "would be swizzled twice; floats were widened by some tool, and engines read neither."
        ),
        fix="Start from the checkpoint that ModelOpt exported.",
        example=(
            "error NVP304 [block-scale-dtype] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight_scale, "
            "model-00001-of-00004.safetensors: U8 [768, 128] where NVFP4 has F8_E4M3 and int4 a float; scales already "
            "swizzled for a kernel can't be converted: start from the logical checkpoint"
        ),
    ),
    Rule(
        "NVP305",
        "block-scale-shape",
        "error",
        "headers",
        "block scales that don't fit the weight",
        why=(
            "Each row of a weight has one scale for 16 inputs. Scales of another shape are padded or swizzled for a "
            "kernel, or belong to another weight."
        ),
        fix="Start from the checkpoint that ModelOpt exported.",
        example=(
            "error NVP305 [block-scale-shape] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight_scale, "
            "model-00001-of-00004.safetensors: [128, 128] where [96, 128] belongs to the weight [96, 1024]; padded or "
            "swizzled block scales can't be converted: start from the logical checkpoint"
        ),
    ),
    Rule(
        "NVP306",
        "global-scale-missing",
        "error",
        "headers",
        "an NVFP4 weight without weight_scale_2, or int4 experts with and without one",
        why=(
            "A value is its code times its block scale times weight_scale_2. Without the last the weight can't be "
            "dequantised. int4 has one with FP8 activations (W4A8) and none with 16-bit ones: experts of both kinds in "
            "a layer were not exported so."
        ),
        fix="Export the checkpoint again.",
        example=(
            "error NVP306 [global-scale-missing] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight, "
            "model-00001-of-00004.safetensors: no weight_scale_2; without it the weight can't be dequantised: export "
            "it again"
        ),
    ),
    Rule(
        "NVP307",
        "weight-shape",
        "error",
        "headers",
        "a packed weight of a shape that NVFP4 does not have",
        why="A byte holds two codes, and 16 inputs share a block scale. A weight that can't be cut so fits no kernel.",
        fix="Export again and leave linears unquantised whose inputs are no multiple of 16.",
        example=(
            "error NVP307 [weight-shape] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight, "
            "model-00001-of-00004.safetensors: 248 inputs are no multiple of NVFP4's group of 16"
        ),
    ),
    Rule(
        "NVP308",
        "scale-dtype",
        "error",
        "headers",
        "a scale that is no float",
        why="weight_scale_2 and input_scale are factors. The bits of an integer would be read as a wrong number.",
        fix="Export the checkpoint again with F32 scales.",
        example=(
            "error NVP308 [scale-dtype] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight_scale_2, "
            "model-00001-of-00004.safetensors: I32 where F32, BF16 or F16 was expected"
        ),
    ),
    Rule(
        "NVP309",
        "scale-shape",
        "error",
        "headers",
        "a scale of a shape that no exporter writes",
        why="Only for the shapes that exporters write is it known which value belongs to which expert or half.",
        fix="Export the checkpoint again with one value for each linear.",
        example=(
            "error NVP309 [scale-shape] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight_scale_2, "
            "model-00001-of-00004.safetensors: shape [2]; expected one of [], [1], [1, 1]"
        ),
    ),
    Rule(
        "NVP310",
        "unclassified",
        "error",
        "headers",
        "a weight in a format that nvfp4prep does not know",
        why=(
            "Nothing tells what the weight and its scales mean. One expert that is passed over would leave the scales "
            "of its whole layer as they are."
        ),
        fix=(
            "Export the checkpoint again in NVFP4, int4, FP8 or 16 bits. Outside the experts it is a warning: the "
            "weight is kept as it is."
        ),
        example=(
            "error NVP310 [unclassified] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.weight, "
            "model-00001-of-00004.safetensors: 3 of the experts' linears hold I16 [768, 1024]: a format nvfp4prep does "
            "not know"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP311",
        "expert-id",
        "error",
        "headers",
        "an expert id that is no plain number",
        why="Such an id may be taken for another expert's, or for no expert's.",
        fix="Rename the tensors, or export the checkpoint again.",
        example=(
            "error NVP311 [expert-id] layer 3, model.layers.3.mlp.experts.05.down_proj.input_scale, "
            "model-00001-of-00004.safetensors: '05' is no expert id (12 such names); ids are 0, 1, 2 and so on, "
            "without leading zeros"
        ),
    ),
    Rule(
        "NVP313",
        "expert-missing",
        "error",
        "headers",
        "not the number of experts that config.json says",
        why=(
            "The router chooses among all experts. One that is missing has no weights to compute with; engines have no "
            "place for one too many."
        ),
        fix=(
            "Fetch the missing shards, or correct the number of experts in config.json, as where more are stored than "
            "it says."
        ),
        example=(
            "error NVP313 [expert-missing] layer 3, experts 120-127: model.layers.3.mlp: 120 experts stored, 128 "
            "expected; missing: 120-127"
        ),
    ),
    Rule(
        "NVP314",
        "projection-missing",
        "error",
        "headers",
        "an expert without its gate, up or down projection",
        why="The expert can't compute without it, and a fused kernel takes all experts of a layer or none.",
        fix="Fetch or export the checkpoint again.",
        example="error NVP314 [projection-missing] layer 3, expert 5: model.layers.3.mlp: no usable up projection",
    ),
    Rule(
        "NVP315",
        "expert-shape",
        "error",
        "headers",
        "experts of one layer differ in shape",
        why="A fused kernel takes one stacked tensor for all experts of a layer, so that they must have one shape.",
        fix="Export the checkpoint again with experts of one size.",
        example=(
            "error NVP315 [expert-shape] layer 3, expert 5: model.layers.3.mlp: shapes differ from hidden 2048 and "
            "intermediate 768 of expert 0"
        ),
    ),
    Rule(
        "NVP316",
        "expert-bias",
        "error",
        "headers",
        "biases that not all experts have, or that don't fit",
        why="MoE kernels take a bias for every expert or for none, so that the layer can't be stacked.",
        fix="Export the checkpoint again with the biases of all experts, or without any.",
        example=(
            "error NVP316 [expert-bias] layer 3, expert 5, model.layers.3.mlp.experts.5.gate_proj.bias, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp: 1 of 384 linears have a bias; kernels take all or "
            "none"
        ),
    ),
    Rule(
        "NVP317",
        "mixed-dialects",
        "error",
        "headers",
        "experts of one layer are named in different ways",
        why="An engine's loader knows one naming for a model. Experts under another are skipped, or stop it.",
        fix="Rename the experts alike, or export the checkpoint again.",
        example=(
            "error NVP317 [mixed-dialects] layer 3: experts of model.layers.3.mlp use the names of per-expert and "
            "projection-first"
        ),
    ),
    Rule(
        "NVP318",
        "mixed-experts",
        "error",
        "headers",
        "experts of one layer differ in format",
        why="One fused kernel computes all experts of a layer, in one format.",
        fix="Export the checkpoint again with all experts of a layer in one format.",
        example=(
            "error NVP318 [mixed-experts] layer 3, model.layers.3.mlp.experts.5.gate_proj.weight, "
            "model-00001-of-00004.safetensors: linears of one MoE layer differ in format (383 NVFP4, 1 FP8); one fused "
            "kernel can't read them"
        ),
    ),
    Rule(
        "NVP319",
        "mixed-fusion-group",
        "error",
        "headers",
        "linears that engines fuse differ in format",
        why=(
            "Engines make one GEMM of q/k/v, gate/up or q_a/kv_a, in one format. vLLM and SGLang refuse, and "
            "TensorRT-LLM stops at the shapes."
        ),
        fix="Export the checkpoint again with the linears of a group quantised alike.",
        example=(
            "error NVP319 [mixed-fusion-group] layer 3, model.layers.3.self_attn.q_proj.weight, "
            "model-00001-of-00004.safetensors: engines fuse these linears, but their formats differ: q_proj NVFP4, "
            "k_proj unquantized, v_proj NVFP4; quantise them alike"
        ),
    ),
    Rule(
        "NVP320",
        "unknown-gate-up-order",
        "error",
        "scales",
        "fused gate and up columns in an unknown order",
        why=(
            "The columns of a fused tensor are all gates then all ups, or alternate. By the wrong order block scales "
            "would be rescaled with the other half's factor."
        ),
        fix=(
            "Set model_type in config.json to the model's own, or export again with one weight_scale_2 for gate and up."
        ),
        example=(
            "error NVP320 [unknown-gate-up-order] layer 3, "
            "model.layers.3.feed_forward.experts.gate_up_proj_weight_scale_2, model-00001-of-00004.safetensors: gate "
            "and up global scales differ, but config.json's model_type does not say whether the columns are halves "
            "(llama4) or interleaved (gpt_oss)"
        ),
    ),
    Rule(
        "NVP321",
        "router-shape",
        "error",
        "headers",
        "a router that does not score the stored experts",
        why=(
            "With fewer rows than experts some can never be chosen; with more a token may be sent to an expert that is "
            "not there."
        ),
        fix="Fetch router and experts again, from the same revision.",
        example=(
            "error NVP321 [router-shape] layer 3, model.layers.3.mlp.gate.weight, model-00001-of-00004.safetensors: "
            "scores 120 experts, 128 are stored; fetch the whole checkpoint"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP322",
        "router-bias-dtype",
        "warning",
        "headers",
        "a router bias in 16 bits",
        why=(
            "The bias decides which experts a token goes to. In 16 bits nearby scores become equal, and every engine "
            "chooses other experts than the original model."
        ),
        fix="Take the F32 tensor from the original model.",
        example=(
            "warning NVP322 [router-bias-dtype] model.layers.3.mlp.gate.e_score_correction_bias, "
            "model-00001-of-00004.safetensors: BF16 in 58 layers: nearby scores become equal and other experts are "
            "chosen; copied as it is: take the F32 one from the original model"
        ),
    ),
    Rule(
        "NVP323",
        "scale-16bit",
        "warning",
        "headers",
        "scales stored in BF16 or F16",
        why=(
            "TensorRT-LLM takes reciprocals in the stored dtype: up to 0.4 % off in BF16, and inf for an F16 scale "
            "below 1.5e-5, whose expert then computes zero."
        ),
        fix="Run `nvfp4prep convert`, which widens them to F32 by value.",
        example=(
            "warning NVP323 [scale-16bit] model.layers.0.mlp.experts.0.down_proj.weight_scale_2, "
            "model-00001-of-00004.safetensors: 18624 weight_scale_2 are BF16: a loader that reads F32 bits gets "
            "garbage, and TensorRT-LLM rounds their reciprocals to 16 bits; convert widens them by value"
        ),
    ),
    Rule(
        "NVP324",
        "fused-scale-vector",
        "warning",
        "headers",
        "a fused expert scale of more than one value",
        why=(
            "No engine loads more than one value for the experts of a fused tensor: vLLM, SGLang and TensorRT-LLM "
            "refuse."
        ),
        fix="Export the checkpoint again with one value for each fused tensor, or with tensors for each expert.",
        example=(
            "warning NVP324 [fused-scale-vector] model.layers.0.feed_forward.experts.gate_up_proj_weight_scale_2, "
            "model-00001-of-00004.safetensors: [128] (96 such scales): vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM load "
            "fused scales of one value only"
        ),
    ),
    Rule(
        "NVP325",
        "fp8-scale-missing",
        "error",
        "headers",
        "an FP8 weight without weight_scale",
        why=(
            "Nothing tells the weight's values without its scale: an engine that does not stop computes with a scale "
            "that nobody measured."
        ),
        fix="Fetch the shard that holds the scale, or export the checkpoint again.",
        example=(
            "error NVP325 [fp8-scale-missing] layer 3, model.layers.3.self_attn.q_proj.weight, "
            "model-00001-of-00004.safetensors: an FP8 weight without weight_scale, which its values can't be told "
            "without; export it again"
        ),
    ),
    Rule(
        "NVP326",
        "expert-parameter-uneven",
        "warning",
        "headers",
        "a parameter that only some experts of a layer have",
        why=(
            "A MoE kernel takes a parameter for all experts of a layer or for none, so that one of a few experts has "
            "no place there. `--target hf` copies it as it is; packed targets refuse it."
        ),
        fix="Export the checkpoint again, or remove the parameter where it says nothing.",
        example=(
            "warning NVP326 [expert-parameter-uneven] layer 3, expert 5, "
            "model.layers.3.mlp.experts.5.up_proj.weight_zero_point, model-00001-of-00004.safetensors: "
            "model.layers.3.mlp up: 1 of 128 experts have weight_zero_point; kernels take one for all or for none; "
            "export again, or remove it"
        ),
    ),
)
