"""Files beside the shards, and outputs of nvfp4prep that were changed since."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.manifest import MANIFEST, NO_OUTPUTS, listed_outputs
from nvfp4prep.source import Source

_UNFINISHED = re.compile(r"\.(incomplete|part|partial|tmp|aria2|crdownload|lock)$", re.IGNORECASE)
_OTHER_WEIGHTS = re.compile(
    r"((^|/)(pytorch_|adapter_|consolidated)[^/]*\.bin|\.(pt|pth|gguf|ckpt|msgpack|h5|onnx|safetensors))$",
    re.IGNORECASE,
)


def stray(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP010: an interrupted download's leftovers, or weights that no index knows, which would be copied along."""
    source = checkpoint.source
    for name in source.side_files:
        if _UNFINISHED.search(name):
            yield Finding("stray-file", "warning", "left by an interrupted download; fetch it again or remove it", name)
        elif _OTHER_WEIGHTS.search(name):
            message = "weights that are no shard of this checkpoint; convert copies them as they are; remove them"
            yield Finding("stray-file", "info", message, name)


def changed_output(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP807: shards of an output whose sizes are not those that its manifest lists."""
    return changed_shards(checkpoint.source, checkpoint.manifest)


def changed_shards(source: Source, manifest: Mapping[str, Any] | None) -> Iterable[Finding]:
    """As `changed_output`, of a source and its manifest; NVP801 for a manifest that lists no files."""
    if manifest is None:
        return
    outputs = listed_outputs(manifest)
    if outputs is None:
        message = f"{NO_OUTPUTS}; copy the output again, or remove {MANIFEST} if it was changed on purpose"
        yield Finding("manifest-bad", "error", message, MANIFEST)
        return
    shards = source.shards
    for file in sorted(outputs.keys() | shards.keys()):
        listed = outputs[file][0] if file in outputs else None
        if listed == shards.get(file):
            continue
        if file not in shards:
            message = f"{MANIFEST} lists it, but it is not there"
        elif listed is None:
            message = f"{MANIFEST} does not list it"
        else:
            message = f"{shards[file]} bytes; {MANIFEST} says {listed}"
        yield Finding(
            "output-file-changed",
            "error",
            f"{message}; copy the output again, or remove {MANIFEST} if it was changed on purpose",
            file,
        )
