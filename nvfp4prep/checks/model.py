"""config.json's promises about the model against the tensors: layers, MTP, lm_head, sizes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding, ranges
from nvfp4prep.model_config import is_tied, number_in, sections
from nvfp4prep.quant_config import CONFIG

_LAYER = re.compile(r"((?:[^.]+\.)*?)layers\.(0|[1-9][0-9]{0,8})\.")
_MTP = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_HEADS = frozenset({"lm_head", "output"})
_EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "tok_embeddings", "wte", "word_embeddings"})


def decoder_layers(checkpoint: Checkpoint) -> frozenset[int]:
    """Layer numbers of the language model: those beside the MoE layers, or the longest run of layers without any."""
    stacks: dict[str, set[int]] = defaultdict(set)
    for name in checkpoint.source.tensors:
        match = _LAYER.match(name)
        if match:
            stacks[match[1]].add(int(match[2]))
    moe = Counter(match[1] for layer in checkpoint.schema.moe_layers if (match := _LAYER.match(layer.path + ".")))
    chosen = moe.most_common(1)[0][0] if moe else max(stacks, key=lambda prefix: len(stacks[prefix]), default="")
    return frozenset(stacks.get(chosen, ()))


def missing_layers(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP223: layers below num_hidden_layers of which nothing is stored."""
    expected = number_in(checkpoint.config, "num_hidden_layers", "n_layer")
    stored = decoder_layers(checkpoint)
    if expected is None or not stored:
        return
    missing = expected - sum(number < expected for number in stored)
    if missing > 0:
        absent = [number for number in range(min(expected, max(stored) + 2)) if number not in stored]
        message = f"num_hidden_layers is {expected}, {missing} are not stored (layers {ranges(absent)}"
        message += " and above" if expected > max(stored) + 2 else ""
        yield Finding(
            "layers-missing", "error", message + "); fetch the missing shards, or correct config.json", CONFIG
        )


def missing_mtp(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP222: multi-token-prediction layers promised, none stored."""
    promised = number_in(checkpoint.config, *_MTP_KEYS) or 0
    layers = number_in(checkpoint.config, "num_hidden_layers", "n_layer")
    if promised <= 0 or layers is None or any(number >= layers for number in decoder_layers(checkpoint)):
        return
    if not any(_MTP.search(name) for name in checkpoint.source.tensors):
        key = next(key for key in _MTP_KEYS if number_in(checkpoint.config, key))
        message = (
            f"{key} is {promised}, but no such layer is stored; serve without speculative decoding, or set it to 0"
        )
        yield Finding("mtp-missing", "warning", message, CONFIG)


def missing_head(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP224: no lm_head although config.json says that it is not the embedding."""
    if not _says_untied(checkpoint.config):
        return
    modules = {module.rpartition(".")[2] for module in checkpoint.schema.linears}
    if not modules & _HEADS:
        message = "tie_word_embeddings is false, but no lm_head is stored; fetch the shard that holds it"
        yield Finding("lm-head-missing", "warning", message, CONFIG)


def _says_untied(config: Mapping[str, object]) -> bool:
    said = [section.get("tie_word_embeddings") for section in sections(config)]
    return False in said and not is_tied(config)


def differing_sizes(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP225: hidden and intermediate size of the experts, and rows of the embedding, against config.json."""
    config = checkpoint.config
    hidden = {number_in(config, key) for key in ("hidden_size", "moe_latent_size")} - {None}
    inner = number_in(config, "moe_intermediate_size", "expert_ffn_hidden_size") or number_in(
        config, "intermediate_size"
    )
    wrong: dict[str, list[int | None]] = defaultdict(list)
    for moe in checkpoint.schema.moe_layers:
        if hidden and moe.hidden and moe.hidden not in hidden:
            wrong[f"hidden size is {max(filter(None, hidden))} by config.json, {moe.hidden} in the experts"].append(
                moe.layer
            )
        if inner and moe.intermediate and moe.intermediate != inner:
            wrong[f"intermediate size is {inner} by config.json, {moe.intermediate} in the experts"].append(moe.layer)
    for message, layers in wrong.items():
        known = [layer for layer in layers if layer is not None]
        where = f" of layers {ranges(known)}" if known else ""
        yield Finding("config-shape", "warning", f"{message}{where}; engines size their buffers by config.json", CONFIG)
    vocabulary = number_in(config, "vocab_size")
    for linear in checkpoint.schema.linears.values():
        if vocabulary and linear.module.rpartition(".")[2] in _EMBEDDINGS and 0 < linear.rows < vocabulary:
            tensor = linear.params["weight"]
            message = f"{linear.rows} rows, but vocab_size is {vocabulary}; engines would read past the end"
            yield Finding("config-shape", "warning", message, tensor.file, tensor.name)
