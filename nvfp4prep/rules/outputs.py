"""Outputs of nvfp4prep."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP801",
        "manifest-bad",
        "error",
        "headers",
        "an nvfp4prep.json that is not this output's",
        why=(
            "The manifest says what an output was made from and how its bytes lie. By a damaged one, or another "
            "output's, they would be read wrong."
        ),
        fix=(
            "Copy the whole output again, or convert its source again. Where it is a warning the file is ignored; "
            "remove it if it is not nvfp4prep's."
        ),
        example=(
            "error NVP801 [manifest-bad] config.json: packed as flashinfer-trtllm/vllm/1 by nvfp4prep.json, but not by "
            "this"
        ),
        mildest="warning",
    ),
    Rule(
        "NVP802",
        "not-packed",
        "error",
        "headers",
        "no packed output",
        why="Only the manifest of a packed output says which checkpoint it stands for.",
        fix="Give a directory that `nvfp4prep convert` wrote for a packed target.",
        example=(
            "error NVP802 [not-packed] qwen3-nvfp4: no packed output of convert: there must be a config.json, and an "
            "nvfp4prep.json with a `packed` entry"
        ),
    ),
    Rule(
        "NVP803",
        "layout-unknown",
        "error",
        "headers",
        "a layout of another version",
        why=(
            "Another version may put the same weights in another order. By this version's rules they would be read "
            "wrong."
        ),
        fix="Use the version of nvfp4prep that packed it, or convert its source again.",
        example=(
            "error NVP803 [layout-unknown] nvfp4prep.json: packed as vllm-marlin/vllm/99; this version knows "
            "vllm-marlin/vllm/1"
        ),
    ),
    Rule(
        "NVP804",
        "rank-missing",
        "error",
        "headers",
        "a rank's folder or index is missing",
        why="Each rank has experts, or parts of them, that no other has. Without its folder the model is incomplete.",
        fix="Copy the whole output: each rank's folder, and `common`.",
        example=(
            "error NVP804 [rank-missing] rank-01-of-02_00-of-01/model.safetensors.index.json: not there; copy the "
            "whole output"
        ),
    ),
    Rule(
        "NVP805",
        "packed-file-bad",
        "error",
        "headers",
        "a file of another layout, rank or size",
        why="A rank would load weights that were cut for another rank or packed for another kernel.",
        fix="Copy the whole output again, and remove files that the manifest does not list.",
        example=(
            "error NVP805 [packed-file-bad] rank-01-of-02_00-of-01/model.safetensors: says it is of "
            "flashinfer-trtllm/vllm/1 rank 0 of 2, 0 of 1; flashinfer-trtllm/vllm/1 rank 1 of 2, 0 of 1 belongs here; "
            "copy the whole output"
        ),
    ),
    Rule(
        "NVP806",
        "packed-tensor-bad",
        "error",
        "headers",
        "a packed tensor that is missing, or of another shape",
        why="Kernel and unpack read the tensor by the shape that the manifest gives. Another one gives wrong weights.",
        fix="Copy the whole output again, or convert its source again.",
        example=(
            "error NVP806 [packed-tensor-bad] model.layers.3.mlp.experts.nvfp4prep.down_weight_scale_2, "
            "rank-01-of-02_00-of-01: F16 [64] where F32 [64] belongs"
        ),
    ),
    Rule(
        "NVP807",
        "output-file-changed",
        "error",
        "headers",
        "a file of an output is not the one that was written",
        why=(
            "A copy was cut off, or a file was added, removed or replaced: the output is not the one that convert "
            "validated."
        ),
        fix="Copy the output again, or remove nvfp4prep.json if the change was meant.",
        example=(
            "error NVP807 [output-file-changed] model-00002-of-00004.safetensors: 3221225472 bytes; nvfp4prep.json "
            "says 4998913024; copy the output again, or remove nvfp4prep.json if it was changed on purpose"
        ),
    ),
    Rule(
        "NVP808",
        "digest-differs",
        "error",
        "full",
        "a file's bytes are not those that the manifest lists",
        why="A disk or a copy changed bytes of the file, or somebody did: some of its weights are wrong.",
        fix="Copy the file again from where it is right, or convert the source again.",
        example=(
            "error NVP808 [digest-differs] model-00002-of-00004.safetensors: not the bytes that were written: their "
            "digest is not the one in nvfp4prep.json; copy it again"
        ),
    ),
)
