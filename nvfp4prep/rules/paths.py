"""The path given, and the files in it."""

from __future__ import annotations

from nvfp4prep.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "NVP001",
        "no-such-checkpoint",
        "error",
        "headers",
        "neither a directory nor a Hub repo",
        why="There is nothing to read. A mistyped path looks like this too.",
        fix="Give the checkpoint's directory, or a Hub repo as `org/name` or `org/name@revision`.",
        example=(
            "error NVP001 [no-such-checkpoint] ./qwen3-nvfp4: no such directory, and not a Hub repo (org/name or "
            "org/name@revision)"
        ),
    ),
    Rule(
        "NVP002",
        "not-a-directory",
        "error",
        "headers",
        "a file where the checkpoint's directory was expected",
        why="A checkpoint is a directory: a shard alone has neither the configuration nor the other tensors.",
        fix="Give the directory that the file lies in.",
        example=(
            "error NVP002 [not-a-directory] qwen3-nvfp4/model.safetensors is a file; give the checkpoint's directory"
        ),
    ),
    Rule(
        "NVP003",
        "no-weights",
        "error",
        "headers",
        "no *.safetensors file",
        why=(
            "nvfp4prep reads safetensors only. A download may have stopped after the small files, or the weights are "
            "of another format (.bin, GGUF)."
        ),
        fix="Fetch the safetensors files, for example with `hf download`, or export the model to safetensors.",
        example=(
            "error NVP003 [no-weights] qwen3-nvfp4: no *.safetensors file here; nvfp4prep reads safetensors "
            "checkpoints only"
        ),
    ),
    Rule(
        "NVP004",
        "already-packed",
        "error",
        "headers",
        "packed for a kernel already",
        why=(
            "The experts already lie in one kernel's order. Packed again they would be shuffled and swizzled twice, "
            "and the kernel would compute nonsense."
        ),
        fix="Convert the checkpoint that it was made from, or get that back with `nvfp4prep unpack`.",
        example=(
            "error NVP004 [already-packed] config.json: already packed as flashinfer-trtllm/vllm/1 for vllm; convert "
            "its source, or get it back with nvfp4prep unpack"
        ),
    ),
    Rule(
        "NVP005",
        "unfinished-output",
        "error",
        "headers",
        "an output that nvfp4prep did not finish",
        why=(
            "The run that wrote it was stopped. Parts of its files may never have been written, and an engine would "
            "load zeros there."
        ),
        fix="Delete this output and convert its source again.",
        example=(
            "error NVP005 [unfinished-output] .nvfp4prep-partial: marks an output that nvfp4prep did not finish; "
            "convert its source again"
        ),
    ),
    Rule(
        "NVP006",
        "undecodable-name",
        "error",
        "headers",
        "a file name that is not UTF-8",
        why=(
            "The index, the configuration and the manifest are text: a file with such a name can't be listed in them "
            "or copied under the same name."
        ),
        fix="Rename the file, or remove it.",
        example=r"error NVP006 [undecodable-name] \xff.txt: '\udcff.txt' is not UTF-8; rename it",
    ),
    Rule(
        "NVP007",
        "linked-folder",
        "error",
        "headers",
        "a link to a folder",
        why=(
            "Behind a link to a folder may lie anything, the output itself too: copying it could take foreign files, "
            "or never end."
        ),
        fix="Put the folder itself in the link's place, or remove the link.",
        example="error NVP007 [linked-folder] assets: a link to a folder; put the folder in its place, or remove it",
    ),
    Rule(
        "NVP008",
        "not-a-file",
        "error",
        "headers",
        "a folder, broken link or special file where a file belongs",
        why="There are no bytes to copy. The output would lack a file that an engine or the tokeniser asks for.",
        fix="Fetch the file again, or remove what stands in its place.",
        example="error NVP008 [not-a-file] tokenizer.json: a broken link or special file; repair or remove it",
    ),
    Rule(
        "NVP009",
        "name-taken",
        "error",
        "headers",
        "a side file with the name of an output file",
        why="The output has a file or folder of that name itself, and one of the two would overwrite the other.",
        fix="Rename or remove the file in the source.",
        example="error NVP009 [name-taken] common/README.md: the output has its own common; rename or remove this file",
    ),
    Rule(
        "NVP010",
        "stray-file",
        "warning",
        "headers",
        "what an interrupted download or another format left beside the shards",
        why=(
            "What an interrupted download left behind means that other files may be missing too. Weights of another "
            "format are copied along, and stay as they were."
        ),
        fix="Fetch the checkpoint again if its download was cut off, and remove the file otherwise.",
        example=(
            "warning NVP010 [stray-file] model-00003-of-00004.safetensors.incomplete: left by an interrupted download; "
            "fetch it again or remove it"
        ),
        mildest="info",
    ),
)
