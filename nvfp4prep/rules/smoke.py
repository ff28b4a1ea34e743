"""The smoke check."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP901",
        "nothing-to-check",
        "error",
        "headers",
        "no MoE layer for the smoke check",
        why=(
            "The smoke check runs MoE layers that are packed for a kernel, and no target can pack any of this "
            "checkpoint."
        ),
        fix="Run `nvfp4prep validate` with a packed `--target` to see what is in the way.",
        example="error NVP901 [nothing-to-check] no NVFP4 experts that a packed target takes",
    ),
    Rule(
        "NVP902",
        "smoke-refused",
        "error",
        "headers",
        "the smoke check can't be run",
        why=(
            "The check does not guess: with an activation, a routing or a router that it does not know, its verdict "
            "would mean nothing. `convert` goes on then, and says that the check was not run."
        ),
        fix="Correct config.json if the message names a wrong setting, and judge the model by an evaluation otherwise.",
        example=(
            "error NVP902 [smoke-refused] config.json names the model_type 'longcat_flash', whose routing nvfp4prep "
            "does not know"
        ),
    ),
    Rule(
        "NVP903",
        "reference-layer",
        "error",
        "headers",
        "the reference or the source has no such layer",
        why=(
            "There is nothing to compare the layer with. The reference or the source is another model, or names its "
            "layers in another way."
        ),
        fix=(
            "Give the original checkpoint of the same model with `--reference`, the one that was packed with "
            "`--source`."
        ),
        example=(
            "error NVP903 [reference-layer] the reference Qwen3-8B has no routed experts under model.layers.3.mlp; it "
            "has none"
        ),
    ),
    Rule(
        "NVP904",
        "reference-dtype",
        "error",
        "headers",
        "the reference is not 16- or 32-bit",
        why="A quantised reference has errors of its own, and can't say which result is right.",
        fix="Give the original BF16, F16 or F32 checkpoint with `--reference`.",
        example=(
            "error NVP904 [reference-dtype] Qwen3-30B-A3B-FP8: model.layers.3.mlp.experts.0.gate_proj is F8_E4M3; a "
            "reference holds BF16, F16 or F32"
        ),
    ),
    Rule(
        "NVP905",
        "reference-shape",
        "error",
        "headers",
        "the reference's or the source's experts have other shapes",
        why="The reference or the source is another model: a comparison with it would say nothing.",
        fix=(
            "Give the original checkpoint of the same model with `--reference`, the one that was packed with "
            "`--source`."
        ),
        example=(
            "error NVP905 [reference-shape] Qwen3-235B-A22B: model.layers.3.mlp has experts 128, hidden 4096, "
            "intermediate 1536, gated 1; the checkpoint has experts 128, hidden 2048, intermediate 768, gated 1"
        ),
    ),
)
