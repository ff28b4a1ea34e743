"""Shards and index."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP101",
        "shard-missing",
        "error",
        "headers",
        "a shard that the index names is not there",
        why="The tensors of this shard are in no other file, so layers or experts of the model are missing.",
        fix="Fetch the missing shard, for example with `hf download`.",
        example=(
            "error NVP101 [shard-missing] model-00003-of-00004.safetensors: named by model.safetensors.index.json "
            "(18490 tensors) but not there; fetch it"
        ),
    ),
    Rule(
        "NVP102",
        "bad-shard",
        "error",
        "headers",
        "a shard that is cut short, or whose header breaks the format's rules",
        why=(
            "The tensors of this file can't be found, or are not all there. Often a download was cut off, or the file "
            "is a Git LFS pointer or a saved error page."
        ),
        fix="Fetch the shard again; where it is a Git LFS pointer, run `git lfs pull`.",
        example=(
            "error NVP102 [bad-shard] model-00002-of-00004.safetensors: the file is cut short: the header needs "
            "4998913024 bytes, the file has 3221225472; fetch it again"
        ),
    ),
    Rule(
        "NVP103",
        "bad-index",
        "error",
        "headers",
        "an index that does not map tensors to shards",
        why=(
            "Without a map of tensors to shards nobody can tell whether the checkpoint is complete, and which files "
            "belong to it."
        ),
        fix="Fetch the index again, or remove it if there is one shard only.",
        example=(
            "error NVP103 [bad-index] model.safetensors.index.json: weight_map must map tensor names to shard names"
        ),
    ),
    Rule(
        "NVP104",
        "unsafe-shard-name",
        "error",
        "headers",
        "the index names a file outside the checkpoint",
        why=(
            "A reader that follows the index would open files outside the checkpoint. The index is damaged, or was "
            "made to do harm."
        ),
        fix="Take the checkpoint from a source that you trust.",
        example=(
            "error NVP104 [unsafe-shard-name] lm_head.weight, model.safetensors.index.json: names the shard "
            "'../other/model.safetensors'; a shard is a file beside the index"
        ),
    ),
    Rule(
        "NVP105",
        "indexed-tensor-missing",
        "error",
        "headers",
        "a tensor that the index names is in no shard",
        why=(
            "A tensor of the model is missing. The shard and the index are of different revisions, or one was changed "
            "by hand."
        ),
        fix="Fetch the shard and the index again, from the same revision.",
        example=(
            "error NVP105 [indexed-tensor-missing] model.layers.12.mlp.experts.40.up_proj.weight_scale, "
            "model-00002-of-00004.safetensors: model.safetensors.index.json names it, but the shard does "
            "not have it; fetch both again"
        ),
    ),
    Rule(
        "NVP106",
        "index-wrong-shard",
        "warning",
        "headers",
        "the index names another shard than the one that holds the tensor",
        why="A loader that goes by the index looks for the tensor in a file that does not hold it.",
        fix="Run `nvfp4prep convert`, which writes the index anew.",
        example=(
            "warning NVP106 [index-wrong-shard] lm_head.weight, model-00004-of-00004.safetensors: "
            "model.safetensors.index.json says model-00001-of-00004.safetensors"
        ),
    ),
    Rule(
        "NVP107",
        "unindexed-tensors",
        "warning",
        "headers",
        "tensors in a shard that the index does not know",
        why=(
            "A loader that goes by the index never sees these tensors. Often they are MTP layers in a file of their "
            "own."
        ),
        fix=(
            "Run `nvfp4prep convert`, which keeps and indexes them; move the file away first if it is not part of the "
            "model."
        ),
        example=(
            "warning NVP107 [unindexed-tensors] model.layers.61.eh_proj.weight, mtp.safetensors: 1569 tensors are not "
            "in model.safetensors.index.json; convert keeps and indexes them"
        ),
    ),
    Rule(
        "NVP108",
        "tensor-in-two-shards",
        "error",
        "headers",
        "a tensor stored twice",
        why="The two copies may differ, and which one an engine uses depends on the order in which it reads the files.",
        fix="Remove the stray file; often it is a model.safetensors left beside numbered shards.",
        example=(
            "error NVP108 [tensor-in-two-shards] model.embed_tokens.weight, model.safetensors: also in "
            "model-00001-of-00004.safetensors; remove the stray file"
        ),
    ),
    Rule(
        "NVP109",
        "second-copy",
        "error",
        "headers",
        "the same model under other names beside the shards",
        why=(
            "The file holds the model again under other names. In the output it would keep its old scales beside the "
            "new ones."
        ),
        fix="Move the `consolidated` files out of the directory.",
        example=(
            "error NVP109 [second-copy] consolidated.safetensors: holds tensors under names that the index does not "
            "know; move this file away"
        ),
    ),
    Rule(
        "NVP110",
        "header-too-large",
        "error",
        "headers",
        "an output header over the format's limit",
        why="A safetensors header may have 100,000,000 bytes; readers refuse a file with a larger one.",
        fix="Use a smaller `--max-shard-size`, so that fewer tensors share a file.",
        example=(
            "error NVP110 [header-too-large] model-00001-of-00002.safetensors: the header would be 104857607 bytes, "
            "over 100000000; use a smaller --max-shard-size"
        ),
    ),
    Rule(
        "NVP111",
        "index-total-size",
        "info",
        "headers",
        "the index's total_size is not the bytes stored",
        why="Tools that plan disk or memory by total_size go by a wrong number. The tensors are not affected.",
        fix="Run `nvfp4prep convert`, which writes the index anew.",
        example=(
            "info NVP111 [index-total-size] model.safetensors.index.json: total_size is 16060522496, the tensors have "
            "18112345088 bytes; convert writes it anew"
        ),
    ),
)
