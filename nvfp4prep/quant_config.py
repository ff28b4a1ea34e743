"""One internal model of a checkpoint's quantisation config: read from both files, rewritten from what is stored.

ModelOpt writes config.json's `quantization_config` (keys ignore, kv_cache_scheme) and hf_quant_config.json's
`quantization` (keys exclude_modules, kv_cache_quant_algo); engines read one or the other.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from nvfp4prep.dialects import natural_key
from nvfp4prep.engine_excludes import MAX_COST, SomeShards, engine_modules, matcher, matching_cost
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding, counted
from nvfp4prep.patterns import MAX_PATTERN, MAX_STEPS, Budget, compiled, compiling
from nvfp4prep.schema import GROUP_SIZE, Format, Linear, Schema

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"

W4A4 = "NVFP4"
W4A16 = "W4A16_NVFP4"
INT4_W4A16 = "W4A16_AWQ"
INT4_W4A8 = "W4A8_AWQ"
MIXED = "MIXED_PRECISION"
NVFP4_ALGOS = (W4A4, W4A16, "NVFP4_AWQ")
INT4_ALGOS = (INT4_W4A16, INT4_W4A8)

_KNOWN_FLAT = {
    "quant_algo",
    "quant_method",
    "ignore",
    "exclude_modules",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "group_size",
    "config_groups",
    "quantized_layers",
    "producer",
}
_KNOWN_NESTED = {"quant_algo", "exclude_modules", "ignore", "kv_cache_quant_algo", "group_size", "quantized_layers"}

_MAX_EXCLUDE = 100_000
_NAME_STEPS = 50  # what a module that an entry may hit is counted for


@dataclass(frozen=True)
class QuantConfig:
    """What both files say.

    `layers` is quantized_layers (MIXED_PRECISION), `kv_cache` the algorithm's name, `kv_cache_scheme` its config.json
    form, `extras` keys that are carried as they are (has_zero_point, pre_quant_scale, what a later exporter adds).
    """

    algo: str
    exclude: tuple[str, ...] = ()
    kv_cache: str | None = None
    kv_cache_scheme: Mapping[str, Any] | None = None
    group_size: int | None = None
    layers: Mapping[str, Mapping[str, Any]] | None = None
    producer: Mapping[str, Any] | None = None
    extras: Mapping[str, Any] | None = None


def read_quant_config(
    config: Mapping[str, Any], nested: Mapping[str, Any] | None
) -> tuple[QuantConfig | None, list[Finding]]:
    """One QuantConfig from both files, and how they differ.

    Args:
        config: config.json.
        nested: hf_quant_config.json, or None when there is none.

    Returns:
        (QuantConfig, findings); (None, errors) when neither is a usable ModelOpt configuration.
    """
    findings: list[Finding] = []
    flat_section = quantization_section(config)
    nested_section = nested.get("quantization") if nested is not None else None
    if nested is not None and not isinstance(nested_section, Mapping):
        findings.append(
            Finding("quant-config-bad", "warning", "has no object `quantization`; ignored", HF_QUANT_CONFIG)
        )
        nested_section = None
    method = str((flat_section or {}).get("quant_method", "modelopt"))
    if not method.startswith("modelopt"):
        return None, [
            Finding(
                "not-modelopt", "error", f"quant_method is {method!r}; nvfp4prep reads ModelOpt checkpoints", CONFIG
            )
        ]
    flat = _read_flat(flat_section, findings) if flat_section is not None else None
    deep = _read_nested(nested_section, nested or {}, findings) if nested_section is not None else None
    if flat is None and deep is None:
        return None, [
            *findings,
            Finding(
                "no-quant-config",
                "error",
                "neither a quantization_config in config.json nor "
                "hf_quant_config.json names a quant_algo; quantise it with NVIDIA ModelOpt first",
                CONFIG,
            ),
        ]
    for found, file in ((flat, CONFIG), (deep, HF_QUANT_CONFIG)):
        if found is None:
            other = HF_QUANT_CONFIG if file == CONFIG else CONFIG
            findings.append(
                Finding("quant-config-missing", "info", f"no quantisation config here; {other}'s is used", file)
            )
    if flat is not None and deep is not None:
        findings += _differences(flat, deep)
    return _merge(flat, deep), findings


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's quantization_config, at the top or under text_config; None when null or absent."""
    for holder in (config, config.get("text_config")):
        section = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if isinstance(section, Mapping):
            return section
    return None


def _strings(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _layers(value: object) -> Mapping[str, Mapping[str, Any]] | None:
    if not isinstance(value, Mapping):
        return None
    return {str(key): dict(entry) for key, entry in value.items() if isinstance(entry, Mapping)}


def _group_size(section: Mapping[str, Any]) -> int | None:
    groups = section.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    for holder in (section, *weights):
        size = holder.get("group_size") if isinstance(holder, Mapping) else None
        if isinstance(size, int):
            return size
    return None


def _read_flat(section: Mapping[str, Any], findings: list[Finding]) -> QuantConfig | None:
    inner = section.get("quantization")
    if isinstance(inner, Mapping):  # some exporters put hf_quant_config.json's form here
        return _read_nested(inner, section, findings)
    algo = section.get("quant_algo")
    if not isinstance(algo, str):
        findings.append(
            Finding("quant-config-bad", "warning", f"quantization_config has quant_algo {algo!r}; ignored", CONFIG)
        )
        return None
    scheme = section.get("kv_cache_scheme")
    kv_cache = section.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        kv_cache = "FP8" if bits == 8 else "NVFP4" if bits == 4 else None
    elif isinstance(scheme, str):
        kv_cache = scheme
    return QuantConfig(
        algo.upper(),
        _strings(section.get("ignore", section.get("exclude_modules"))),
        kv_cache if isinstance(kv_cache, str) else None,
        dict(scheme) if isinstance(scheme, Mapping) else None,
        _group_size(section),
        _layers(section.get("quantized_layers")),
        _mapping(section.get("producer")),
        {key: value for key, value in section.items() if key not in _KNOWN_FLAT},
    )


def _read_nested(section: Mapping[str, Any], outer: Mapping[str, Any], findings: list[Finding]) -> QuantConfig | None:
    algo = section.get("quant_algo")
    if not isinstance(algo, str):
        findings.append(Finding("quant-config-bad", "warning", f"quant_algo is {algo!r}; ignored", HF_QUANT_CONFIG))
        return None
    kv_cache = section.get("kv_cache_quant_algo")
    size = section.get("group_size")
    return QuantConfig(
        algo.upper(),
        _strings(section.get("exclude_modules", section.get("ignore"))),
        kv_cache if isinstance(kv_cache, str) else None,
        None,
        size if isinstance(size, int) else None,
        _layers(section.get("quantized_layers")),
        _mapping(outer.get("producer")),
        {key: value for key, value in section.items() if key not in _KNOWN_NESTED},
    )


def _mapping(value: object) -> Mapping[str, Any] | None:
    return dict(value) if isinstance(value, Mapping) else None


def _differences(flat: QuantConfig, deep: QuantConfig) -> list[Finding]:
    findings = []
    for label, here, there in (
        ("quant_algo", flat.algo, deep.algo),
        ("KV cache", flat.kv_cache, deep.kv_cache),
        ("group_size", flat.group_size, deep.group_size),
        ("quantized_layers", flat.layers, deep.layers),
    ):
        if here != there and not (label == "group_size" and None in (here, there)):
            shown = "differ" if isinstance(here, Mapping) else f"{here} here, {there} in {HF_QUANT_CONFIG}"
            findings.append(Finding("configs-disagree", "warning", f"{label}: {shown}", CONFIG))
    only = set(flat.exclude) ^ set(deep.exclude)
    if only and not (flat.algo == MIXED and not deep.exclude):
        more = f" and {len(only) - 1} more" if len(only) > 1 else ""
        message = f"exclude lists differ: only one of them has {_shown(min(only))}{more}"
        findings.append(Finding("configs-disagree", "warning", message, CONFIG))
    return findings


def _merge(flat: QuantConfig | None, deep: QuantConfig | None) -> QuantConfig:
    if flat is None or deep is None:
        found = flat or deep
        assert found is not None
        return found
    return QuantConfig(
        flat.algo,
        tuple(dict.fromkeys((*flat.exclude, *deep.exclude))),
        flat.kv_cache or deep.kv_cache,
        flat.kv_cache_scheme,
        flat.group_size or deep.group_size,
        flat.layers or deep.layers,
        flat.producer or deep.producer,
        {**(deep.extras or {}), **(flat.extras or {})},
    )


# --- compared with what is stored ----------------------------------------------------------------------------------


def algo_of(module: str, config: QuantConfig, moe_container: str | None = None) -> str:
    """The quant_algo declared for a module: its own entry in quantized_layers, else the checkpoint's."""
    layers = config.layers or {}
    for key in (module, moe_container):
        entry = layers.get(key) if key is not None else None
        if entry is not None and isinstance(entry.get("quant_algo"), str):
            return str(entry["quant_algo"]).upper()
    return config.algo


def weight_only_modules(schema: Schema, config: QuantConfig) -> frozenset[str]:
    """4-bit modules that need no input_scale: declared W4A16, or none of the whole checkpoint has one."""
    quantized = [*schema.of_format(Format.NVFP4), *schema.of_format(Format.INT4)]
    if not any("input_scale" in linear.params for linear in quantized):
        return frozenset(linear.module for linear in quantized)
    containers = _containers(schema)
    return frozenset(
        linear.module
        for linear in quantized
        if algo_of(linear.module, config, containers.get(linear.module)) in (W4A16, INT4_W4A16)
    )


def _containers(schema: Schema) -> dict[str, str]:
    return {linear.module: moe.container for moe in schema.moe_layers for linear in (*moe.w13, *moe.w2)}


def check_config(schema: Schema, config: QuantConfig) -> list[Finding]:
    """What the configuration claims against what is stored; errors where no reading of both makes sense."""
    findings: list[Finding] = []
    stored = {kind: list(schema.of_format(kind)) for kind in Format}
    if stored[Format.INT4]:
        findings += _check_int4(stored[Format.INT4], config)
        if not stored[Format.NVFP4]:
            return findings
    if not stored[Format.NVFP4]:
        return [
            Finding(
                "nothing-to-convert", "error", f"no NVFP4 weight is stored, whatever the config says ({config.algo})"
            )
        ]
    if config.algo not in (*NVFP4_ALGOS, MIXED):
        findings.append(
            Finding(
                "algo-contradicts-weights",
                "error",
                f"quant_algo is {config.algo}, but {_linears(stored[Format.NVFP4])} stored as NVFP4; "
                "correct quant_algo",
                CONFIG,
            )
        )
    if config.algo != MIXED and stored[Format.FP8]:
        weight = stored[Format.FP8][0].params["weight"]
        findings.append(
            Finding(
                "algo-contradicts-weights",
                "error",
                f"quant_algo is {config.algo}, but {_linears(stored[Format.FP8])} stored as FP8; "
                "MIXED_PRECISION with quantized_layers is needed",
                weight.file,
                weight.name,
            )
        )
    if config.group_size not in (None, GROUP_SIZE) and config.algo in NVFP4_ALGOS:
        findings.append(
            Finding(
                "group-size",
                "warning",
                f"group_size is {config.group_size}, the stored block scales have {GROUP_SIZE}; corrected",
                CONFIG,
            )
        )
    if config.algo in (W4A4, "NVFP4_AWQ") and not any(
        "input_scale" in linear.params for linear in stored[Format.NVFP4]
    ):
        findings.append(
            Finding(
                "no-input-scales",
                "warning",
                f"quant_algo is {config.algo}, but no input_scale is stored: written as {W4A16}, for weight-only "
                "kernels",
                CONFIG,
            )
        )
    if config.algo == "NVFP4_AWQ":
        findings.append(
            Finding(
                "nvfp4-awq",
                "warning",
                "quant_algo NVFP4_AWQ: vLLM refuses it, and SGLang ignores pre_quant_scale on experts, which then "
                "compute wrong",
                CONFIG,
            )
        )
    if config.algo == MIXED and not config.layers:
        findings.append(
            Finding(
                "quantized-layers-missing",
                "warning",
                "MIXED_PRECISION without quantized_layers; written anew from what is stored",
                CONFIG,
            )
        )
    return findings


def _check_int4(linears: Sequence[Linear], config: QuantConfig) -> list[Finding]:
    """int4 linears against the algorithm and the group size."""
    findings = []
    if config.algo not in (*INT4_ALGOS, MIXED):
        message = f"quant_algo is {config.algo}, but {_linears(linears)} stored as int4; correct quant_algo"
        findings.append(Finding("algo-contradicts-weights", "error", message, CONFIG))
    if config.algo == INT4_W4A8 and not any("input_scale" in linear.params for linear in linears):
        message = f"quant_algo is {config.algo}, but no input_scale is stored: written as {INT4_W4A16}"
        findings.append(Finding("no-input-scales", "warning", message, CONFIG))
    expected = (config.group_size if config.algo in INT4_ALGOS else None) or linears[0].group_size
    odd = [linear for linear in linears if linear.group_size != expected]
    if odd:
        scale = odd[0].params["weight_scale"]
        message = (
            f"{list(scale.shape)} group scales for {odd[0].columns} columns are groups of {odd[0].group_size}, not "
            f"{expected} ({counted(len(odd), 'linear')}): "
        )
        if len(odd) == len(linears) and len({linear.group_size for linear in linears}) == 1:
            message += f"all are alike, so correct group_size to {odd[0].group_size} in the configuration"
        else:
            message += "partial groups and several group sizes can't be converted"
        findings.append(Finding("group-size", "error", message, scale.file, scale.name, odd[0].layer))
    return findings


def _linears(linears: Sequence[Linear]) -> str:
    return f"{counted(len(linears), 'linear')} {'is' if len(linears) == 1 else 'are'}"


@dataclass(frozen=True, slots=True)
class ExcludeReport:
    """The exclude list written anew, and what happened to the old entries."""

    names: tuple[str, ...]
    corrupted: tuple[str, ...]
    unmatched: tuple[str, ...]
    contradicted: tuple[str, ...]
    added: tuple[str, ...]
    findings: tuple[Finding, ...]


def rewrite_exclude(schema: Schema, exclude: Sequence[str], tied: bool) -> ExcludeReport:
    """Explicit names of every module stored unquantised.

    A module counts when its weight has two dimensions or more (linears, embeddings, convolutions; a norm can't be
    quantised). A MoE layer stored unquantised is listed by its experts' names and by its container, which SGLang wants.
    `lm_head` stays when it is tied to the embedding and not stored.

    Args:
        schema: what is stored.
        exclude: the old entries: exact names, module prefixes, globs, or `re:` patterns.
        tied: config.json's tie_word_embeddings.

    Raises:
        InputRefused: there are so many entries and modules that no engine would start in time either.
    """
    plain = {
        linear.module.removesuffix(".gate_up_proj").removesuffix(".down_proj") if linear.experts else linear.module
        for linear in schema.of_format(Format.UNQUANTIZED)
    }
    plain |= {moe.container for moe in schema.moe_layers if moe.format is Format.UNQUANTIZED}
    nameless = "" in plain
    plain.discard("")
    quantized = [linear.module for linear in schema.linears.values() if linear.format is not Format.UNQUANTIZED]
    quantized += [moe.container for moe in schema.moe_layers if moe.format is not Format.UNQUANTIZED]
    if tied and not any(module.rpartition(".")[2] == "lm_head" for module in (*plain, *quantized)):
        plain.add("lm_head")
    _check_size(schema, exclude, plain)
    corrupted = dict.fromkeys(entry for entry in exclude if not entry or not entry.isprintable())
    untried: list[str] = []
    match = _matcher([*plain, *quantized], untried)
    quantized_set = set(quantized)
    unmatched, contradicted, covered = [], [], set()
    over: dict[str, tuple[int, str]] = {}
    for entry in dict.fromkeys(exclude):
        if entry in corrupted:
            continue
        hits = match(entry)
        covered.update(hits)
        wrong = [hit for hit in hits if hit in quantized_set]
        if not hits:
            unmatched.append(entry)  # also those that were not tried
        elif wrong:
            contradicted.append(entry)
            over[entry] = len(wrong), wrong[0]
    names = tuple(sorted(plain, key=natural_key))
    added = tuple(name for name in names if name not in covered)
    findings = []
    if nameless:
        message = "this tensor's module has no name, and an empty entry would exclude every module: not listed"
        findings.append(Finding("exclude-nameless", "warning", message, tensor="weight"))
    for entries, rule, (one, many) in (
        (
            untried,
            "exclude-pattern",
            (
                "entry of the exclude list is no pattern that can be matched; convert drops it",
                "entries of the exclude list are no patterns that can be matched; convert drops them",
            ),
        ),
        (
            list(corrupted),
            "exclude-corrupted",
            (
                "corrupted entry of the exclude list; convert drops it",
                "corrupted entries of the exclude list; convert drops them",
            ),
        ),
        (
            unmatched,
            "exclude-unmatched",
            (
                "entry of the exclude list matches no stored module; convert drops it",
                "entries of the exclude list match no stored module; convert drops them",
            ),
        ),
        (
            added,
            "exclude-added",
            (
                "module stored unquantised that the exclude list does not name; convert lists it",
                "modules stored unquantised that the exclude list does not name; convert lists them",
            ),
        ),
    ):
        if entries:
            more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
            shown = ", ".join(map(_shown, entries[:3]))
            findings.append(
                Finding(
                    rule,
                    "warning" if rule != "exclude-unmatched" else "info",
                    f"{len(entries)} {one if len(entries) == 1 else many}: {shown}{more}",
                    CONFIG,
                )
            )
    for entry, (count, first) in over.items():
        findings.append(
            Finding(
                "exclude-contradicted",
                "warning",
                f"{_shown(entry)} excludes {counted(count, 'module')} stored quantised ({first}); convert drops it",
                CONFIG,
            )
        )
    findings += overmatches(schema, names)
    return ExcludeReport(names, tuple(corrupted), tuple(unmatched), tuple(contradicted), added, tuple(findings))


def _check_size(schema: Schema, exclude: Sequence[str], plain: Collection[str]) -> None:
    """Refuse exclude lists, the old one and the one to be written, that would take minutes to compare with modules."""
    modules = engine_modules(schema)
    for entries in (exclude, tuple(plain)):
        if len(exclude) > _MAX_EXCLUDE or matching_cost(modules, entries) > MAX_COST:
            message = (
                f"an exclude list of {len(entries):,} entries for {len(modules):,} modules is too long to be judged"
            )
            raise InputRefused([Finding("bad-json", "error", message, CONFIG)])


def _shown(entry: str) -> str:
    """An entry as findings show it."""
    return repr(entry if len(entry) <= 120 else entry[:117] + "...")


def _matcher(modules: Iterable[str], untried: list[str]) -> Callable[[str], list[str]]:
    """A function from an exclude entry to the modules it matches: glob, `re:` regex, or a name and all below it.

    Entries that are no pattern, or would take too long, match nothing and are added to `untried`.
    """
    ordered = sorted(set(modules))
    longest = max(map(len, ordered), default=0)
    average = sum(map(len, ordered)) // max(len(ordered), 1)
    budget, plain_budget = Budget(), Budget(2 * MAX_STEPS)

    def starting_with(prefix: str) -> list[str]:
        begin = bisect_left(ordered, prefix)
        end = bisect_left(ordered, prefix + "\U0010ffff", begin)
        return ordered[begin:end]

    def match(entry: str) -> list[str]:
        if entry.startswith("re:"):
            pattern = compiled(entry[3:]) if budget.take(compiling(entry)) else None
            if pattern is None or not budget.allows(pattern, len(ordered), longest):
                untried.append(entry)
                return []
            return [module for module in ordered if pattern.regex.match(module)]
        literal = re.split(r"[*?\[]", entry, maxsplit=1)[0]
        candidates = starting_with(literal)
        if literal == entry:
            if not plain_budget.take(_NAME_STEPS * len(candidates)):
                untried.append(entry)
                return []
            return [module for module in candidates if module == entry or module.startswith(entry + ".")]
        steps = compiling(entry) + len(candidates) * (_NAME_STEPS + average) * (1 + entry.count("*"))
        if len(entry) > MAX_PATTERN or not plain_budget.take(steps):
            untried.append(entry)
            return []
        return [module for module in candidates if fnmatchcase(module, entry)]

    return match


def overmatches(schema: Schema, names: Sequence[str]) -> list[Finding]:
    """Where an engine takes an explicit name for more than it says: it leaves a quantised module unquantised.

    vLLM 0.33 tests `entry in prefix`, so a router `mlp.gate` also hits the fused `mlp.gate_up_proj` of the same layer.
    SGLang 0.5.23 compares the last part alone for MLA's projections, over all layers.
    """
    findings = []
    modules = [module for module in engine_modules(schema) if module.quantized]
    for engine, label, rule in (("vllm", "vLLM", "exclude-substring"), ("sglang", "SGLang", "exclude-tail")):
        matches = matcher(engine, names)  # type: ignore[arg-type]
        hit = []
        for module in modules:
            with suppress(SomeShards):
                if matches(module):
                    hit.append(module.names[engine])  # type: ignore[index]
        if hit:
            message = (
                f"{label} takes an entry of the exclude list for {hit[0]!r} too, which is quantised ({len(hit)} in all)"
            )
            findings.append(Finding(rule, "warning", message, CONFIG))
    return findings


def rewrite(schema: Schema, config: QuantConfig, exclude: ExcludeReport) -> QuantConfig:
    """The configuration that says what is stored: algorithm, explicit excludes, every linear when mixed."""
    algo = config.algo
    quantized = [*schema.of_format(Format.NVFP4), *schema.of_format(Format.INT4)]
    if not any("input_scale" in linear.params for linear in quantized):
        algo = {W4A4: W4A16, "NVFP4_AWQ": W4A16, INT4_W4A8: INT4_W4A16}.get(algo, algo)
    group_size = quantized[0].group_size if algo != MIXED else None
    layers = _rewrite_layers(schema, config) if algo == MIXED else None
    return replace(config, algo=algo, exclude=exclude.names, group_size=group_size, layers=layers)


def _rewrite_layers(schema: Schema, config: QuantConfig) -> dict[str, dict[str, Any]]:
    """quantized_layers with each quantised linear, and each MoE container, which vLLM looks up first."""
    containers = _containers(schema)
    weight_only = weight_only_modules(schema, config)
    old = config.layers or {}
    layers: dict[str, dict[str, Any]] = {}
    for linear in schema.linears.values():
        container = containers.get(linear.module)
        if linear.format is Format.NVFP4:
            declared = algo_of(linear.module, config, container)
            if declared not in NVFP4_ALGOS or linear.module in weight_only:
                declared = W4A16 if linear.module in weight_only else W4A4
            entry: dict[str, Any] = {"quant_algo": declared, "group_size": GROUP_SIZE}
        elif linear.format is Format.INT4:
            declared = INT4_W4A16 if linear.module in weight_only else INT4_W4A8
            entry = {"quant_algo": declared, "group_size": linear.group_size}
        elif linear.format is Format.FP8:
            entry = dict(old.get(linear.module) or {"quant_algo": "FP8"})
        elif linear.module in old:
            entry = dict(old[linear.module])
        else:
            continue
        if linear.experts is None and linear.module:
            layers[linear.module] = entry
        if container is not None:
            layers[container] = entry
    return {key: layers[key] for key in sorted(layers, key=natural_key)}


# --- written back -----------------------------------------------------------------------------------------------------


def _tensor_args(bits: int, group_size: int | None) -> dict[str, Any]:
    args: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float"}
    return args | ({"group_size": group_size} if group_size else {})


def _config_groups(config: QuantConfig) -> dict[str, Any] | None:
    def group(algo: str, targets: list[str], size: int | None) -> dict[str, Any]:
        bits = 4 if "NVFP4" in algo else 8
        weights = _tensor_args(bits, size if bits == 4 else None)
        activations = {} if algo == W4A16 else {"input_activations": dict(weights)}
        return {**activations, "weights": weights, "targets": targets}

    if config.algo in NVFP4_ALGOS:
        return {"group_0": group(config.algo, ["Linear"], config.group_size)}
    if config.algo in INT4_ALGOS:
        return None
    by_algo: dict[str, list[str]] = defaultdict(list)
    for module, entry in (config.layers or {}).items():
        by_algo[str(entry.get("quant_algo", "")).upper()].append(module)
    if not set(by_algo) <= {*NVFP4_ALGOS, "FP8"}:
        return None
    return {f"group_{i}": group(algo, by_algo[algo], GROUP_SIZE) for i, algo in enumerate(sorted(by_algo))}


def quantization_config(config: QuantConfig) -> dict[str, Any]:
    """config.json's quantization_config."""
    section: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": config.algo}
    if config.group_size is not None:
        section["group_size"] = config.group_size
    groups = _config_groups(config)
    if groups is not None:
        section["config_groups"] = groups
    if config.layers is not None:
        section["quantized_layers"] = dict(config.layers)
    section["ignore"] = list(config.exclude)
    scheme = config.kv_cache_scheme
    if scheme is None and config.kv_cache is not None:
        scheme = {"FP8": _tensor_args(8, None), "NVFP4": _tensor_args(4, GROUP_SIZE)}.get(config.kv_cache.upper())
    if scheme is not None or config.algo == MIXED:  # SGLang 0.5.23 insists on the key when mixed, null will do
        section["kv_cache_scheme"] = dict(scheme) if scheme is not None else None
    if config.kv_cache is not None:
        section["kv_cache_quant_algo"] = config.kv_cache
    if config.producer is not None:
        section["producer"] = dict(config.producer)
    return section | _extras(config, _KNOWN_FLAT)


def _extras(config: QuantConfig, known: Collection[str]) -> dict[str, Any]:
    """Keys that are carried, but none that has a meaning of its own where it is written to."""
    return {key: value for key, value in (config.extras or {}).items() if key not in known and key != "quantization"}


def hf_quant_config(config: QuantConfig) -> dict[str, Any]:
    """hf_quant_config.json."""
    section: dict[str, Any] = {"quant_algo": config.algo, "kv_cache_quant_algo": config.kv_cache}
    if config.group_size is not None:
        section["group_size"] = config.group_size
    if config.layers is not None:
        section["quantized_layers"] = dict(config.layers)
    section["exclude_modules"] = list(config.exclude)
    section |= _extras(config, _KNOWN_NESTED)
    producer = {"producer": dict(config.producer)} if config.producer is not None else {}
    return {**producer, "quantization": section}


def rewritten_config(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with `section` as its quantization_config, where it stood (top level, or text_config)."""
    written = dict(config)
    text = config.get("text_config")
    if "quantization_config" not in config and isinstance(text, Mapping) and "quantization_config" in text:
        written["text_config"] = {**text, "quantization_config": dict(section)}
    else:
        written["quantization_config"] = dict(section)
        if isinstance(text, Mapping) and "quantization_config" in text:
            written["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return written
