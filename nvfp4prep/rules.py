"""Every rule that a finding can name: stable id, what it is about, why it matters, how to fix it.

Ids are never used again for something else. The first digit says what a rule looks at: 0 the path given, 1 shards and
index, 2 configuration, 3 modules and shapes, 4 values of scales, 5 block scales and packed bytes, 6 int4 and AWQ,
7 targets, 8 outputs of nvfp4prep, 9 the smoke check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From worst to mildest. error: no conversion makes it right, and `convert` refuses. warning: engines disagree or read
it wrong as it stands, and `convert` repairs it or says what it can't. info: worth knowing."""

Level = Literal["headers", "scales", "full"]
LEVELS: tuple[Level, ...] = ("headers", "scales", "full")
"""What is read: headers and JSON files; scalars and small tensors too; every byte."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `severity` is the worst that its findings have; `level` the first that looks for it.

    `summary` says what is found, in a few words; `example` is a message as it is printed.
    """

    id: str
    name: str
    severity: Severity
    level: Level
    summary: str
    why: str = ""
    fix: str = ""
    example: str = ""


def _rules(level: Level, *rows: tuple[str, str, Severity, str]) -> tuple[Rule, ...]:
    return tuple(Rule(number, name, severity, level, summary) for number, name, severity, summary in rows)


RULES: tuple[Rule, ...] = (
    *_rules(
        "headers",
        ("NVP001", "no-such-checkpoint", "error", "neither a directory nor a Hub repo"),
        ("NVP002", "not-a-directory", "error", "a file where the checkpoint's directory was expected"),
        ("NVP003", "no-weights", "error", "no *.safetensors file"),
        ("NVP004", "already-packed", "error", "packed for a kernel already"),
        ("NVP005", "unfinished-output", "error", "an output that nvfp4prep did not finish"),
        ("NVP006", "undecodable-name", "error", "a file name that is not UTF-8"),
        ("NVP007", "linked-folder", "error", "a link to a folder"),
        ("NVP008", "not-a-file", "error", "a folder, broken link or special file where a file belongs"),
        ("NVP009", "name-taken", "error", "a side file with the name of an output file"),
        ("NVP010", "stray-file", "warning", "what an interrupted download or another format left beside the shards"),
        ("NVP101", "shard-missing", "error", "a shard that the index names is not there"),
        ("NVP102", "bad-shard", "error", "a shard that is cut short, or whose header breaks the format's rules"),
        ("NVP103", "bad-index", "error", "an index that does not map tensors to shards"),
        ("NVP104", "unsafe-shard-name", "error", "the index names a file outside the checkpoint"),
        ("NVP105", "indexed-tensor-missing", "error", "a tensor that the index names is in no shard"),
        ("NVP106", "index-wrong-shard", "warning", "the index names another shard than the one that holds the tensor"),
        ("NVP107", "unindexed-tensors", "warning", "tensors in a shard that the index does not know"),
        ("NVP108", "tensor-in-two-shards", "error", "a tensor stored twice"),
        ("NVP109", "second-copy", "error", "the same model under other names beside the shards"),
        ("NVP110", "header-too-large", "error", "an output header over the format's limit"),
        ("NVP111", "index-total-size", "info", "the index's total_size is not the bytes stored"),
        ("NVP201", "no-config", "error", "no config.json"),
        ("NVP202", "bad-json", "error", "a JSON file that can't be read"),
        ("NVP203", "no-quant-config", "error", "no quantisation configuration"),
        ("NVP204", "not-modelopt", "error", "quantised by something other than ModelOpt"),
        ("NVP205", "quant-config-bad", "warning", "a quantisation configuration without a usable quant_algo"),
        ("NVP206", "quant-config-missing", "info", "only one of the two quantisation configurations"),
        ("NVP207", "configs-disagree", "warning", "config.json and hf_quant_config.json differ"),
        ("NVP208", "algo-contradicts-weights", "error", "quant_algo is not what is stored"),
        ("NVP209", "nothing-to-convert", "error", "no quantised weight is stored"),
        ("NVP210", "no-input-scales", "warning", "W4A4 by the configuration, but no input_scale is stored"),
        ("NVP211", "group-size", "warning", "group_size is not what is stored"),
        ("NVP212", "quantized-layers-missing", "warning", "MIXED_PRECISION without quantized_layers"),
        ("NVP213", "nvfp4-awq", "warning", "NVFP4_AWQ, which few engines compute right"),
        ("NVP214", "exclude-contradicted", "warning", "an exclude entry that hits modules stored quantised"),
        ("NVP215", "exclude-added", "warning", "modules stored unquantised that the exclude list does not name"),
        ("NVP216", "exclude-unmatched", "info", "an exclude entry that matches nothing"),
        ("NVP217", "exclude-corrupted", "warning", "an exclude entry that is no text"),
        ("NVP218", "exclude-pattern", "warning", "an exclude entry that is no usable pattern"),
        ("NVP219", "exclude-nameless", "warning", "an unquantised module without a name"),
        ("NVP220", "exclude-substring", "warning", "an exclude entry that vLLM takes for a longer name"),
        ("NVP221", "exclude-tail", "warning", "an exclude entry that SGLang takes for all layers"),
        ("NVP222", "mtp-missing", "warning", "config.json promises MTP layers that are not stored"),
        ("NVP223", "layers-missing", "error", "fewer layers are stored than config.json says"),
        ("NVP224", "lm-head-missing", "warning", "no lm_head, and it is not tied to the embedding"),
        ("NVP225", "config-shape", "warning", "sizes in config.json are not those of the tensors"),
        ("NVP226", "experts-unquantized", "warning", "expert bytes that are not packed under a 4-bit configuration"),
        ("NVP227", "shared-expert-unquantized", "info", "a 16-bit shared expert beside quantised routed experts"),
        ("NVP301", "module-named-twice", "error", "two tensors stand for the same parameter"),
        ("NVP302", "scale-without-weight", "error", "a scale that nothing uses"),
        ("NVP303", "block-scale-missing", "error", "a packed weight without block scales"),
        ("NVP304", "block-scale-dtype", "error", "block scales of an unexpected dtype"),
        ("NVP305", "block-scale-shape", "error", "block scales that don't fit the weight"),
        ("NVP306", "global-scale-missing", "error", "an NVFP4 weight without weight_scale_2"),
        ("NVP307", "weight-shape", "error", "a packed weight of a shape that NVFP4 does not have"),
        ("NVP308", "scale-dtype", "error", "a scale that is no float"),
        ("NVP309", "scale-shape", "error", "a scale of a shape that no exporter writes"),
        ("NVP310", "unclassified", "error", "a weight in a format that nvfp4prep does not know"),
        ("NVP311", "expert-id", "error", "an expert id that is no plain number"),
        ("NVP312", "expert-twice", "error", "two linears for the same expert and projection"),
        ("NVP313", "expert-missing", "error", "not the number of experts that config.json says"),
        ("NVP314", "projection-missing", "error", "an expert without its gate, up or down projection"),
        ("NVP315", "expert-shape", "error", "experts of one layer differ in shape"),
        ("NVP316", "expert-bias", "error", "biases that not all experts have, or that don't fit"),
        ("NVP317", "mixed-dialects", "error", "experts of one layer are named in different ways"),
        ("NVP318", "mixed-experts", "error", "experts of one layer differ in format"),
        ("NVP319", "mixed-fusion-group", "error", "linears that engines fuse differ in format"),
        ("NVP320", "unknown-gate-up-order", "error", "fused gate and up columns in an unknown order"),
        ("NVP321", "router-shape", "error", "a router that does not score the stored experts"),
        ("NVP322", "router-bias-dtype", "warning", "a router bias in 16 bits"),
        ("NVP323", "scale-16bit", "warning", "scales stored in BF16 or F16"),
        ("NVP324", "fused-scale-vector", "warning", "a fused expert scale of more than one value"),
    ),
    *_rules(
        "scales",
        ("NVP401", "input-scale-missing", "error", "experts or linears without an input_scale"),
        ("NVP402", "input-scale-bad", "error", "an input_scale that is zero, negative, subnormal, inf or NaN"),
        ("NVP403", "input-scale-imputed", "warning", "an input_scale that `--impute` replaced"),
        ("NVP404", "input-scale-differs", "warning", "input scales of one GEMM differ"),
        ("NVP405", "input-scales-kept", "warning", "`--input-scale keep` leaves differing input scales"),
        ("NVP406", "global-scale-bad", "error", "a weight_scale_2 that is zero, negative, subnormal, inf or NaN"),
        ("NVP407", "global-scale-ratio", "error", "global scales too far apart to be made one"),
        ("NVP408", "gate-up-scale-differs", "warning", "gate and up have two different weight_scale_2"),
        ("NVP409", "gate-up-split", "warning", "`--w13-scale split` leaves two weight_scale_2"),
        ("NVP410", "fused-linear-scale-differs", "warning", "linears that engines fuse have different scales"),
        ("NVP411", "scale-reciprocal", "error", "scales stored as their reciprocals"),
        ("NVP412", "kv-scale-bad", "error", "a k_scale or v_scale that is zero, negative, inf or NaN"),
        ("NVP413", "kv-scale-unpaired", "warning", "a layer with a k_scale and no v_scale, or the reverse"),
        ("NVP414", "kv-scale-one", "info", "all k_scale and v_scale are exactly 1"),
        ("NVP415", "kv-scale-missing", "warning", "an FP8 KV cache by the configuration, but layers without scales"),
    ),
    *_rules(
        "full",
        ("NVP501", "block-scale-nan", "error", "NaN among block scales"),
        ("NVP502", "block-scale-negative", "error", "negative block scales"),
        ("NVP503", "block-scale-zero", "warning", "a block scale of zero over codes that are not"),
        ("NVP504", "experts-zero", "error", "experts whose block scales are all zero"),
        ("NVP505", "tied-head-differs", "warning", "lm_head is said to be the embedding, and is not"),
    ),
    *_rules(
        "headers",
        ("NVP601", "int4", "error", "int4 weights where only NVFP4 can be written"),
        ("NVP602", "pre-quant-scale-missing", "error", "some experts of a GEMM without a pre_quant_scale"),
        ("NVP603", "shared-expert-folded", "warning", "a shared expert's pre_quant_scale folded into a shared norm"),
    ),
    *_rules(
        "full",
        ("NVP604", "pre-quant-scale-bad", "error", "a pre_quant_scale that is zero, inf or NaN"),
        ("NVP605", "int4-scale-bad", "error", "an int4 group scale that is inf or NaN"),
        ("NVP606", "int4-gate-up-identical", "warning", "gate and up have identical int4 scales"),
    ),
    *_rules(
        "scales",
        ("NVP701", "target-refused", "error", "the checkpoint can't be packed for a target"),
        ("NVP702", "block-scale-bad", "error", "block scales that a layout can't store"),
        ("NVP703", "kernel-scale-bad", "error", "a kernel's scale that F32 can't hold"),
    ),
    *_rules(
        "headers",
        ("NVP801", "manifest-bad", "error", "an nvfp4prep.json that is not this output's"),
        ("NVP802", "not-packed", "error", "no packed output"),
        ("NVP803", "layout-unknown", "error", "a layout of another version"),
        ("NVP804", "rank-missing", "error", "a rank's folder or index is missing"),
        ("NVP805", "packed-file-bad", "error", "a file of another layout, rank or size"),
        ("NVP806", "packed-tensor-bad", "error", "a packed tensor that is missing, or of another shape"),
        ("NVP807", "output-file-changed", "error", "a file of an output is not the one that was written"),
    ),
    *_rules("full", ("NVP808", "digest-differs", "error", "a file's bytes are not those that the manifest lists")),
    *_rules(
        "headers",
        ("NVP901", "nothing-to-check", "error", "no MoE layer for the smoke check"),
        ("NVP902", "smoke-refused", "error", "the smoke check can't be run"),
        ("NVP903", "reference-layer", "error", "the reference has no such layer"),
        ("NVP904", "reference-dtype", "error", "the reference is not 16- or 32-bit"),
        ("NVP905", "reference-shape", "error", "the reference's experts have other shapes"),
    ),
)

BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in RULES}
BY_ID: Mapping[str, Rule] = {rule.id: rule for rule in RULES}


def picked(words: Iterable[str]) -> frozenset[str]:
    """Names of the rules that words pick: an id, the beginning of ids (NVP4), or a name.

    Raises:
        ValueError: with the word that picks nothing.
    """
    names: set[str] = set()
    for word in words:
        found = {rule.name for rule in RULES if rule.id.startswith(word.upper()) or rule.name == word}
        if not found or not word:
            raise ValueError(word)
        names |= found
    return frozenset(names)
