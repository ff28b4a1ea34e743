"""Block scales and packed bytes."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP501",
        "block-scale-nan",
        "error",
        "full",
        "NaN among block scales",
        why=(
            "A NaN block scale makes an output of the expert NaN, and from there the whole answer of every token that "
            "reaches it: engines then print one character over and over."
        ),
        fix="Export these weights again.",
        example=(
            "error NVP501 [block-scale-nan] layer 3, experts 5, 9, model.layers.3.mlp.experts.5.up_proj.weight_scale, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp up_proj: 2 of 12,582,912 block scales are NaN (the "
            "first in row 0, block 0); outputs become NaN; export these weights again"
        ),
    ),
    Rule(
        "NVP502",
        "block-scale-negative",
        "error",
        "full",
        "negative block scales",
        why=(
            "Kernels read block scales without their sign, and Marlin's form has no code for one, so that the weights "
            "get other values than were meant."
        ),
        fix="Export these weights again.",
        example=(
            "error NVP502 [block-scale-negative] layer 3, expert 5, model.layers.3.mlp.experts.5.up_proj.weight_scale, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp up_proj: 2 of 12,582,912 block scales are negative "
            "(the first in row 17, block 3); kernels read block scales without sign; export these weights again"
        ),
    ),
    Rule(
        "NVP503",
        "block-scale-zero",
        "warning",
        "full",
        "a block scale of zero over codes that are not",
        why=(
            "All 16 values of such a block act as zero. The scale underflowed when the weight was quantised, and no "
            "conversion brings it back."
        ),
        fix="Export these weights again if many blocks are hit.",
        example=(
            "warning NVP503 [block-scale-zero] layer 3, expert 5, model.layers.3.mlp.experts.5.up_proj.weight_scale, "
            "model-00001-of-00004.safetensors: model.layers.3.mlp up_proj: 311 of 12,582,912 block scales are zero "
            "over codes that are not (the first in row 17, block 3); these weights act as zero: they were lost when "
            "quantised"
        ),
    ),
    Rule(
        "NVP504",
        "experts-zero",
        "error",
        "full",
        "experts whose block scales are all zero",
        why=(
            "The experts add nothing to the layer. No engine notices, and the text stays fluent but is wrong. It is an "
            "error where all experts of a layer are hit. `convert` itself does not look for it."
        ),
        fix="Export the checkpoint again.",
        example=(
            "error NVP504 [experts-zero] layer 3, experts 0-127, model-00001-of-00004.safetensors: model.layers.3.mlp: "
            "128 of 128 experts have a linear whose block scales are all zero: the layer computes nothing, and the "
            "text stays fluent but wrong; export it again"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP505",
        "tied-head-differs",
        "warning",
        "full",
        "lm_head is said to be the embedding, and is not",
        why=(
            "Engines use one of the two tensors for both and drop the other. If that is the wrong one, all logits are "
            "wrong."
        ),
        fix="Set tie_word_embeddings to false if lm_head is its own, or remove lm_head.weight if it is not.",
        example=(
            "warning NVP505 [tied-head-differs] lm_head.weight, model-00004-of-00004.safetensors: config.json ties it "
            "to model.embed_tokens.weight, but its values differ: engines drop one of the two"
        ),
    ),
    Rule(
        "NVP506",
        "fp8-nan",
        "error",
        "full",
        "NaN among FP8 weights",
        why="A NaN weight makes an output of the linear NaN, and from there the whole answer of every token.",
        fix="Export these weights again.",
        example=(
            "error NVP506 [fp8-nan] layer 3, model.layers.3.self_attn.q_proj.weight, model-00001-of-00004.safetensors: "
            "2 of 8,388,608 FP8 weights are NaN (the first at [17, 3]); export them again"
        ),
    ),
)
