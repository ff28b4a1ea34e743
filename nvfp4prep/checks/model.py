"""config.json's promises about the model against the tensors: layers, MTP, lm_head, sizes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.dialects import QUANT_PARAMS
from nvfp4prep.findings import Finding, gaps, named
from nvfp4prep.model_config import is_tied, number_in, sections
from nvfp4prep.quant_config import CONFIG

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(0|[1-9][0-9]{0,8})(?:\.|$)")
_TOWER = re.compile(r"vision|visual|audio|image|speech|encoder")
_LANGUAGE = ("language_model", "text"), ("model", "transformer")
_BELOW_EXPERTS = re.compile(r"(^|\.)experts\..*", re.DOTALL)
_OF_A_KIND = re.compile(r"layer|block|pattern|attn|attention|compress|type|freq")
_SIDECARS = frozenset({*QUANT_PARAMS, "weight_scale_inv", "k_scale", "v_scale"})
_MAX_LISTED = 4
_MAX_FORMS = 256
_MTP = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_HEADS = frozenset({"lm_head", "output"})
_EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "tok_embeddings", "wte", "word_embeddings"})


Layers = Mapping[int, set[str]]
"""What is stored of each layer: names below its number."""


def layers(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP223, NVP222 and NVP228: what the language model's layers lack; all names are looked through once for them."""
    stack, stored = _decoder(checkpoint)
    yield from _missing_layers(checkpoint, stored)
    yield from _missing_mtp(checkpoint, stored)
    yield from _incomplete_layers(checkpoint, stack, stored)


def _decoder(checkpoint: Checkpoint) -> tuple[str, Layers]:
    """The language model's stack of layers ("model.layers"), and what is stored of each.

    It is the one beside the MoE layers, or the one that its name or length tells.
    """
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in checkpoint.source.tensors:
        place = _in_stack(name)
        if place is not None:
            stacks[place[0]][place[1]].add(place[2])
    moe = Counter(place[0] for layer in checkpoint.schema.moe_layers if (place := _in_stack(layer.path)))
    if moe:
        chosen = moe.most_common(1)[0][0]
        return chosen, stacks[chosen]
    for words in (*_LANGUAGE, ("",)):
        fitting = [stack for stack in stacks if any(word in stack.rpartition(".")[0] for word in words)]
        if fitting:
            chosen = max(fitting, key=lambda stack: len(stacks[stack]))
            return chosen, stacks[chosen]
    return "", {}


def _in_stack(name: str) -> tuple[str, int, str] | None:
    """Stack, layer number and the rest of a name; None outside of layers, and in towers."""
    match = _LAYER.search(name)
    if match is None or in_tower(name[: match.start(1)]):
        return None
    return name[: match.start(1) - 1], int(match[1]), name[match.end() :]


def in_tower(module: str) -> bool:
    """Whether a module belongs to what reads images or sound beside the language model."""
    return _TOWER.search(module) is not None


def _missing_layers(checkpoint: Checkpoint, stored: Layers) -> Iterable[Finding]:
    """NVP223: layers below num_hidden_layers of which nothing is stored."""
    expected = number_in(checkpoint.config, "num_hidden_layers", "n_layer")
    if expected is None or not stored:
        return
    missing = expected - sum(number < expected for number in stored)
    if missing > 0:
        absent = gaps((number for number in stored if number < expected), expected)
        spans = [(gap.start, gap.stop - 1) for gap in absent[:_MAX_LISTED]]
        listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        more = " and more" if len(absent) > _MAX_LISTED else ""
        where = f"layer{'s' if missing > 1 else ''} {listed}{more}"
        message = (
            f"num_hidden_layers is {expected}, {missing} {'is' if missing == 1 else 'are'} not stored ({where}); fetch "
            "the missing shards, or correct config.json"
        )
        yield Finding("layers-missing", "error", message, CONFIG)


def _incomplete_layers(checkpoint: Checkpoint, stack: str, stored: Layers) -> Iterable[Finding]:
    """NVP228: layers without tensors that at least as many others of their kind have, which have all of theirs too.

    Sidecars of quantised weights come and go with their format, and experts are judged elsewhere.
    """
    limit = number_in(checkpoint.config, "num_hidden_layers", "n_layer")
    lists = _said_of_layers(checkpoint.config, limit)
    kinds: dict[tuple[str, ...], dict[frozenset[str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number in sorted(stored):
        if limit is None or number < limit:
            names = {_BELOW_EXPERTS.sub(r"\1experts", name) for name in stored[number]}
            held = frozenset(name for name in names if name.rpartition(".")[2] not in _SIDECARS)
            kinds[tuple(entries[number] for entries in lists)][held].append(number)
    lacking: dict[frozenset[str], list[int]] = defaultdict(list)
    for forms in kinds.values():
        if len(forms) > _MAX_FORMS:
            continue  # no layer has a like
        for held, numbers in forms.items():
            fuller = [other for other in forms if held < other and len(forms[other]) >= len(numbers)]
            if fuller:
                lacking[max(fuller, key=lambda other: (len(forms[other]), -len(other))) - held] += numbers
    for missing, numbers in lacking.items():
        absent = sorted(missing)
        listed = ", ".join(absent[:_MAX_LISTED])
        if len(absent) > _MAX_LISTED:
            listed += f" and {len(absent) - _MAX_LISTED} more"
        who = f"{named('layer', numbers)} of {stack}"
        message = f"{who} lack{'' if len(numbers) > 1 else 's'} what other layers have: {listed}; fetch the whole "
        message += "checkpoint, or export it again"
        tensor = f"{stack}.{min(numbers)}.{absent[0]}"
        yield Finding("layer-incomplete", "warning", message, tensor=tensor, layer=min(numbers))


def _said_of_layers(config: Mapping[str, object], count: int | None) -> list[list[str]]:
    """config.json's lists with an entry for each layer, such as layer_types; not those of layer numbers."""
    said: list[list[str]] = []
    for section in sections(config):
        for key, value in section.items():
            if count is None or not _OF_A_KIND.search(key) or not isinstance(value, list | str):
                continue
            if len(value) < count or (isinstance(value, str) and "pattern" not in key):
                continue
            entries = [str(entry) for entry in value]
            if isinstance(value, str) or isinstance(value[0], str) or len(set(entries)) < len(entries):
                said.append(entries)
    return said


def _missing_mtp(checkpoint: Checkpoint, stored: Layers) -> Iterable[Finding]:
    """NVP222: multi-token-prediction layers promised, none stored."""
    promised = number_in(checkpoint.config, *_MTP_KEYS) or 0
    count = number_in(checkpoint.config, "num_hidden_layers", "n_layer")
    if promised <= 0 or count is None or any(number >= count for number in stored):
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
        where = f" of {named('layer', known)}" if known else ""
        yield Finding("config-shape", "warning", f"{message}{where}; engines size their buffers by config.json", CONFIG)
    vocabulary = number_in(config, "vocab_size")
    for linear in checkpoint.schema.linears.values():
        if in_tower(linear.module) or linear.module.rpartition(".")[2] not in _EMBEDDINGS:
            continue
        if vocabulary and 0 < linear.rows < vocabulary:
            tensor = linear.params["weight"]
            message = f"{linear.rows} rows, but vocab_size is {vocabulary}; engines would read past the end"
            yield Finding("config-shape", "warning", message, tensor.file, tensor.name)
