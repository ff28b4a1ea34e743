"""What vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM do with a checkpoint as it stands.

CONDITIONS is docs/engines.md as data, for every row that can be told from a checkpoint; a test holds the two together.
Detectors are pure functions on `Facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from nvfp4prep import quant_config as qc
from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.engine_excludes import ENGINES, Engine, EngineModule, SomeShards, engine_modules, matcher
from nvfp4prep.findings import errors, ranges
from nvfp4prep.scales import fault
from nvfp4prep.scalestats import GroupScales, LayerScales, group_scales, layer_scales
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear

TITLES: Mapping[Engine, str] = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23", "trtllm": "TensorRT-LLM"}

Outcome = Literal["yes", "unknown", "wrong", "refuses"]
OUTCOMES: tuple[Outcome, ...] = ("yes", "unknown", "wrong", "refuses")
"""From best to worst. `unknown`: docs/engines.md has no row for something in the checkpoint."""

_VARYING = ("input-scale-differs-between-experts", "input-scale-zero-some", "weight-scale-2-gate-up-differ")


@dataclass(frozen=True, slots=True)
class Hit:
    """A condition that holds: where, and an outcome that differs from the table's because of a note in the docs."""

    where: str = ""
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell: the outcome, whether the docs are sure of it, and why, in a few words."""

    outcome: Outcome
    sure: bool
    why: str

    def __str__(self) -> str:
        return self.outcome + ("" if self.sure else "?")


@dataclass(frozen=True, slots=True)
class Reason:
    """One condition's part in a verdict: where it holds, and why the engine does what it does."""

    id: str
    outcome: Outcome
    sure: bool
    where: str = ""
    why: str = ""

    @property
    def text(self) -> str:
        return ": ".join(part for part in (self.where, self.why) if part)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an engine does: the worst over its reasons, which stand worst first."""

    engine: Engine
    outcome: Outcome
    sure: bool
    reasons: tuple[Reason, ...]

    @property
    def title(self) -> str:
        return TITLES[self.engine]

    @property
    def varies(self) -> bool:
        """Whether a yes means other numbers on another engine or backend."""
        return any(reason.id in _VARYING for reason in self.reasons)


# --- what detectors look at ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """A checkpoint, its scale values, hf_quant_config.json, and a digest of each w13 pre_quant_scale by tensor name."""

    checkpoint: Checkpoint
    values: Mapping[str, tuple[float, ...]]
    nested: Mapping[str, Any] | None
    pre_quant: Mapping[str, bytes]

    @cached_property
    def flat(self) -> Mapping[str, Any] | None:
        """config.json's quantization_config."""
        return qc.quantization_section(self.checkpoint.config)

    @cached_property
    def deep(self) -> Mapping[str, Any] | None:
        """hf_quant_config.json's quantization."""
        section = (self.nested or {}).get("quantization")
        return section if isinstance(section, Mapping) else None

    @cached_property
    def read(self) -> Mapping[Engine, qc.QuantConfig | None]:
        """The configuration that each engine goes by: config.json's, but TensorRT-LLM prefers hf_quant_config.json."""
        of_config = qc.read_quant_config(self.checkpoint.config, None)[0] if self.flat else None
        of_nested = qc.read_quant_config({}, self.nested)[0] if self.deep else None
        first = of_config or of_nested
        if of_config and of_config.algo == qc.MIXED and not of_config.layers:
            first = of_nested or of_config
        return {"vllm": first, "sglang": first, "trtllm": of_nested or of_config}

    def algo(self, engine: Engine) -> str:
        config = self.read[engine]
        return config.algo if config else ""

    @cached_property
    def layers(self) -> tuple[LayerScales, ...]:
        return layer_scales(self.checkpoint.schema.nvfp4_layers, self.values)

    @cached_property
    def groups(self) -> tuple[GroupScales, ...]:
        return group_scales(self.checkpoint.schema.nvfp4_groups, self.values)

    @cached_property
    def nvfp4(self) -> tuple[Linear, ...]:
        return tuple(self.checkpoint.schema.of_format(Format.NVFP4))

    @cached_property
    def routed(self) -> frozenset[str]:
        """Modules of routed experts."""
        return frozenset(linear.module for moe in self.checkpoint.schema.moe_layers for linear in (*moe.w13, *moe.w2))

    @cached_property
    def dense(self) -> tuple[Linear, ...]:
        """NVFP4 linears outside the routed experts."""
        return tuple(linear for linear in self.nvfp4 if linear.module not in self.routed)

    @property
    def split(self) -> Iterator[LayerScales]:
        """MoE layers with a tensor per expert."""
        return (layer for layer in self.layers if layer.moe.gate_up is None)

    @property
    def fused(self) -> Iterator[LayerScales]:
        """MoE layers with one tensor for all experts."""
        return (layer for layer in self.layers if layer.moe.gate_up is not None)

    @cached_property
    def architecture(self) -> str:
        names = self.checkpoint.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @cached_property
    def weight_only_groups(self) -> bool:
        """config_groups without input_activations, and no input_scale: NVFP4 that means W4A16."""
        groups = (self.flat or {}).get("config_groups")
        declared = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
        stored = any("input_scale" in linear.params for linear in self.nvfp4)
        return bool(declared) and not stored and all(g.get("input_activations") is None for g in declared)

    def needs_input_scale(self, engine: Engine, module: str, container: str | None = None) -> bool:
        """Whether the engine takes a module for W4A4."""
        config = self.read[engine]
        return config is not None and not self.weight_only_groups and qc.algo_of(module, config, container) != qc.W4A16

    @cached_property
    def modules(self) -> tuple[EngineModule, ...]:
        return engine_modules(self.checkpoint.schema)

    @cached_property
    def excluded(self) -> Mapping[Engine, Mapping[int, bool] | str]:
        """By engine: which of `modules` it leaves unquantised, or the fused module of which only some shards are."""
        found: dict[Engine, Mapping[int, bool] | str] = {}
        for engine in ENGINES:
            config = self.read[engine]
            match = matcher(engine, config.exclude if config else ())
            try:
                found[engine] = {number: match(module) for number, module in enumerate(self.modules)}
            except SomeShards as inconsistent:
                found[engine] = str(inconsistent)
        return found


Detector = Callable[[Facts, Engine], Hit | None]


@dataclass(frozen=True, slots=True)
class Condition:
    """A row of docs/engines.md and how to tell that it holds. `algorithm` marks the rows one of which must hold."""

    id: str
    cells: Mapping[Engine, Cell]
    detect: Detector
    algorithm: bool = False


def _layers(layers: Iterable[LayerScales]) -> Hit | None:
    """A hit that names the layers, or None when there is none."""
    numbers = [layer.moe.layer for layer in layers]
    if not numbers:
        return None
    known = [number for number in numbers if number is not None]
    return Hit(f"layer{'s' if len(known) != 1 else ''} {ranges(known)}" if known else f"{len(numbers)} layers")


def _modules(modules: Iterable[str], outcome: Outcome | None = None) -> Hit | None:
    names = list(modules)
    if not names:
        return None
    return Hit(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), outcome)


def _when(holds: bool, where: str = "", outcome: Outcome | None = None) -> Hit | None:
    return Hit(where, outcome) if holds else None


# --- algorithm and config files --------------------------------------------------------------------------------------


def _algo(*names: str) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        return _when(facts.algo(engine) in names)

    return detect


def _algo_nvfp4(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.algo(engine) == qc.W4A4 and not facts.weight_only_groups)


def _right_without_experts(algo: str) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        dense = engine == "sglang" and not facts.layers
        return _when(facts.algo(engine) == algo, "no experts" if dense else "", "yes" if dense else None)

    return detect


def _declared_weight_only(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.algo(engine) == qc.W4A4 and facts.weight_only_groups)


def _layers_in(section: Mapping[str, Any] | None) -> bool:
    return section is not None and bool(section.get("quantized_layers"))


def _mixed(facts: Facts) -> bool:
    return any(section is not None and section.get("quant_algo") == qc.MIXED for section in (facts.flat, facts.deep))


def _mixed_without_layers(facts: Facts, engine: Engine) -> Hit | None:
    return _when(_mixed(facts) and not _layers_in(facts.flat) and not _layers_in(facts.deep))


def _mixed_layers_only_nested(facts: Facts, engine: Engine) -> Hit | None:
    return _when(_mixed(facts) and facts.flat is not None and not _layers_in(facts.flat) and _layers_in(facts.deep))


def _mixed_config_only(facts: Facts, engine: Engine) -> Hit | None:
    flat = facts.flat
    if not _mixed(facts) or flat is None or facts.nested is not None:
        return None
    keyed = "kv_cache_scheme" in flat or "kv_cache_quant_algo" in flat
    return Hit("", "yes" if engine == "sglang" and keyed else None)


def _config_only(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.flat is not None and facts.nested is None and facts.algo(engine) != qc.MIXED)


def _nested_only(facts: Facts, engine: Engine) -> Hit | None:
    if facts.flat is not None or facts.deep is None or facts.algo(engine) == qc.W4A16:
        return None
    needed = {"vllm": ("group_size", "kv_cache_quant_algo", "exclude_modules"), "sglang": ("group_size",), "trtllm": ()}
    keys: tuple[str, ...] = needed[engine] if facts.algo(engine) in qc.NVFP4_ALGOS else ()
    absent = [key for key in keys if key not in facts.deep]
    return Hit(f"without the keys {', '.join(absent)}", "refuses") if absent else Hit()


def _nested_only_w4a16(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.flat is None and facts.deep is not None and facts.algo(engine) == qc.W4A16)


def _files_disagree(facts: Facts, engine: Engine) -> Hit | None:
    found = [f.message for f in facts.checkpoint.findings if f.rule == "configs-disagree"]
    return _when(bool(found), "; ".join(found[:1]))


def _container_keys_only(facts: Facts, engine: Engine) -> Hit | None:
    keys = _mixed_expert_keys(facts, engine)
    if keys != (True, False):
        return None
    return Hit("Nemotron-H", "refuses") if engine == "trtllm" and "NemotronH" in facts.architecture else Hit()


def _linear_keys_only(facts: Facts, engine: Engine) -> Hit | None:
    keys = _mixed_expert_keys(facts, engine)
    if keys != (False, True):
        return None
    return Hit("DeepSeek", "refuses") if engine == "trtllm" and "Deepseek" in facts.architecture else Hit()


def _mixed_expert_keys(facts: Facts, engine: Engine) -> tuple[bool, bool] | None:
    """(container keys, per-linear keys) in quantized_layers, of MoE layers; None when not mixed or without experts."""
    config = facts.read[engine]
    if config is None or config.algo != qc.MIXED or not config.layers or not facts.layers:
        return None
    containers = any(layer.moe.container in config.layers for layer in facts.layers)
    linears = any(linear.module in config.layers for layer in facts.layers for linear in layer.moe.w2)
    return containers, linears


# --- experts ---------------------------------------------------------------------------------------------------------


def _w4a4(facts: Facts, engine: Engine, layers: Iterable[LayerScales]) -> Iterator[LayerScales]:
    for layer in layers:
        if facts.needs_input_scale(engine, layer.moe.w2[0].module, layer.moe.container):
            yield layer


def _of_input_scales(holds: Callable[[LayerScales], bool]) -> Detector:
    """The condition holds for layers whose experts run W4A4 and have a tensor each."""

    def detect(facts: Facts, engine: Engine) -> Hit | None:
        return _layers(layer for layer in _w4a4(facts, engine, facts.split) if holds(layer))

    return detect


def _of_split(holds: Callable[[LayerScales], bool]) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        return _layers(layer for layer in facts.split if holds(layer))

    return detect


def _some_missing(layer: LayerScales) -> bool:
    return any(0 < spread.stored < spread.count for spread in (layer.w13, layer.w2))


def _some(kind: str) -> Callable[[LayerScales], bool]:
    return lambda layer: any(kind in spread.faults and spread.high is not None for spread in (layer.w13, layer.w2))


def _no_good(kind: str) -> Callable[[LayerScales], bool]:
    return lambda layer: any(kind in spread.faults and spread.high is None for spread in (layer.w13, layer.w2))


def _any(kind: str) -> Callable[[LayerScales], bool]:
    return lambda layer: any(kind in spread.faults for spread in (layer.w13, layer.w2))


def _nan(facts: Facts, engine: Engine) -> Hit | None:
    hit = _of_input_scales(_any("NaN"))(facts, engine)
    only_w2 = not any("NaN" in layer.w13.faults for layer in facts.split)
    return Hit(hit.where, "wrong" if engine == "trtllm" and only_w2 else None) if hit else None


def _differs(layer: LayerScales) -> bool:
    return layer.w13.ratio > 1 or layer.w2.ratio > 1


def _pairs_differ(facts: Facts, engine: Engine) -> Hit | None:
    return _layers(layer for layer in facts.split if layer.gate_up and layer.gate_up.differing)


# --- fused experts ---------------------------------------------------------------------------------------------------


def _llama4(text_only: bool) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        llama = facts.architecture.startswith("Llama4") and any(True for _ in facts.fused)
        return _when(llama and (facts.architecture == "Llama4ForCausalLM") == text_only)

    return detect


def _fused_shape(*tail: int) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        return _layers(
            layer
            for layer in facts.fused
            if layer.moe.expert_count > 1 and (layer.moe.expert_count, *tail) in layer.shapes
        )

    return detect


def _fused_16bit(facts: Facts, engine: Engine) -> Hit | None:
    return _layers(layer for layer in facts.fused if layer.dtypes & {"BF16", "F16"})


def _gpt_oss(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.architecture.startswith("GptOss") and bool(facts.layers))


def _nemotron(facts: Facts, engine: Engine) -> Hit | None:
    return _when(facts.architecture.startswith("NemotronH") and bool(facts.layers))


# --- linears outside the experts -------------------------------------------------------------------------------------


_QKV = ("q_proj", "k_proj", "v_proj")
_DENSE_GATE_UP = ("gate_proj", "up_proj", "w1", "w3")
_MLA = ("q_a_proj", "kv_a_proj_with_mqa")


def _group(members: tuple[str, ...], param: str) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        return _modules(
            group.group.label
            for group in facts.groups
            if set(group.kind.split("/")) <= set(members)
            and (group.globals if param == "weight_scale_2" else group.input).ratio > 1
            and (param == "weight_scale_2" or facts.needs_input_scale(engine, group.group.members[0].module))
        )

    return detect


def _mla_shape_1(facts: Facts, engine: Engine) -> Hit | None:
    return _modules(
        group.group.label
        for group in facts.groups
        if set(group.kind.split("/")) <= set(_MLA)
        and any(m.params[p].shape == (1,) for m in group.group.members for p in SCALAR_PARAMS if p in m.params)
    )


def _linear_input_missing(facts: Facts, engine: Engine) -> Hit | None:
    return _modules(
        linear.module
        for linear in facts.dense
        if "input_scale" not in linear.params and facts.needs_input_scale(engine, linear.module)
    )


def _linear_16bit(facts: Facts, engine: Engine) -> Hit | None:
    return _modules(
        linear.module
        for linear in facts.dense
        if any(linear.params[p].dtype in ("BF16", "F16") for p in SCALAR_PARAMS if p in linear.params)
    )


# --- pre_quant_scale, KV scales, exclude lists -----------------------------------------------------------------------


def _pre_quant_linear(facts: Facts, engine: Engine) -> Hit | None:
    return _modules(linear.module for linear in facts.dense if "pre_quant_scale" in linear.params)


def _with_pre_quant(facts: Facts, where: Literal["w13", "w2"]) -> Iterator[LayerScales]:
    for layer in facts.layers:
        linears = layer.moe.w13 if where == "w13" else layer.moe.w2
        if any("pre_quant_scale" in linear.params for linear in linears):
            yield layer


def _pre_quant_digests(facts: Facts, layer: LayerScales) -> set[bytes]:
    names = (linear.tensor_name("pre_quant_scale") for linear in layer.moe.w13)
    return {facts.pre_quant[name] for name in names if name in facts.pre_quant}


def _pre_quant_experts(facts: Facts, engine: Engine) -> Hit | None:
    layers = _with_pre_quant(facts, "w13")
    return _layers(layer for layer in layers if len(_pre_quant_digests(facts, layer)) < 2)


def _pre_quant_differ(facts: Facts, engine: Engine) -> Hit | None:
    layers = _with_pre_quant(facts, "w13")
    return _layers(layer for layer in layers if len(_pre_quant_digests(facts, layer)) > 1)


def _pre_quant_down(facts: Facts, engine: Engine) -> Hit | None:
    return _layers(_with_pre_quant(facts, "w2"))


def _kv_scales(llama4: bool) -> Detector:
    def detect(facts: Facts, engine: Engine) -> Hit | None:
        if facts.architecture.startswith("Llama4") != llama4:
            return None
        return _modules(
            linear.module
            for linear in facts.checkpoint.schema.linears.values()
            if "k_scale" in linear.params or "v_scale" in linear.params
        )

    return detect


_NEVER_QUANTIZED = frozenset({"gate", "router", "shared_expert_gate", "conv1d", "embed_tokens", "embeddings", "wte"})
_VISION = ("vision_tower", "vision_model", "vit_large_projector", "multi_modal_projector")


def _builds_quantized(engine: Engine, module: EngineModule) -> bool:
    """Whether an engine's model file would quantise this module unless told not to."""
    name = module.names[engine]
    tail = name.rpartition(".")[2]
    if tail in _NEVER_QUANTIZED or any(part in name for part in _VISION):
        return False
    return engine == "vllm" or tail != "lm_head"


def _bf16_not_excluded(facts: Facts, engine: Engine) -> Hit | None:
    excluded, config = facts.excluded[engine], facts.read[engine]
    if isinstance(excluded, str) or config is None or config.algo == qc.MIXED:
        return None
    return _modules(
        module.names[engine]
        for number, module in enumerate(facts.modules)
        if not module.quantized and not excluded[number] and _builds_quantized(engine, module)
    )


def _excluded_but_nvfp4(facts: Facts, engine: Engine) -> Hit | None:
    excluded, config = facts.excluded[engine], facts.read[engine]
    if isinstance(excluded, str) or config is None:
        return None
    return _modules(
        module.names[engine]
        for number, module in enumerate(facts.modules)
        if Format.NVFP4 in module.formats and (excluded[number] or _unlisted(config, module))
    )


def _unlisted(config: qc.QuantConfig, module: EngineModule) -> bool:
    """Whether MIXED_PRECISION's quantized_layers has no entry for a module, which engines then take for BF16."""
    if config.algo != qc.MIXED or not config.layers:
        return False
    names = {*module.names.values(), *module.stored}
    return names.isdisjoint(config.layers)


def _corrupt(facts: Facts, engine: Engine) -> Hit | None:
    config = facts.read[engine]
    entries = [entry for entry in (config.exclude if config else ()) if not entry.isprintable()]
    return _when(bool(entries), f"{len(entries)} entries")


def _some_shards(facts: Facts, engine: Engine) -> Hit | None:
    excluded = next((found for found in facts.excluded.values() if isinstance(found, str)), None)
    return Hit(excluded) if excluded is not None else None


# --- the table -------------------------------------------------------------------------------------------------------


def _cell(text: str) -> Cell:
    verdict, _, why = text.partition(": ")
    outcome = next(known for known in OUTCOMES if known == verdict.removesuffix("?"))
    return Cell(outcome, not verdict.endswith("?"), why)


def _row(ids: str, vllm: str, sglang: str, trtllm: str, detect: Detector, algorithm: bool = False) -> Condition:
    return Condition(ids, {"vllm": _cell(vllm), "sglang": _cell(sglang), "trtllm": _cell(trtllm)}, detect, algorithm)


_SHAPE = "refuses: no weight or scale of that shape is expected"
_VECTOR = "refuses: wants one value for a fused tensor"
_LARGER = "wrong: uses the largest, block scales untouched"

CONDITIONS: tuple[Condition, ...] = (
    _row("algo-nvfp4", "yes", "yes", "yes", _algo_nvfp4, True),
    _row(
        "algo-w4a16-nvfp4",
        "yes",
        "wrong: on Blackwell experts run W4A4 with input_scale 1.0; right with --moe-runner-backend marlin",
        "yes?",
        _right_without_experts(qc.W4A16),
        True,
    ),
    _row(
        "nvfp4-declared-weight-only",
        "yes: read as W4A16",
        "wrong: runs W4A4 with input_scale 1.0",
        "refuses: looks for input_scale",
        _declared_weight_only,
        True,
    ),
    _row(
        "algo-nvfp4-awq",
        "refuses: quant_algo NVFP4_AWQ is not among its algorithms",
        "wrong: does not apply pre_quant_scale in experts",
        "yes",
        _right_without_experts("NVFP4_AWQ"),
        True,
    ),
    _row(
        "algo-w4a16-awq",
        "refuses: not among its algorithms",
        "refuses: not among its algorithms",
        "yes?",
        _algo("W4A16_AWQ"),
        True,
    ),
    _row(
        "algo-w4a8-awq",
        "refuses: not among its algorithms",
        "refuses: not among its algorithms",
        "yes?",
        _algo("W4A8_AWQ"),
        True,
    ),
    _row("algo-mixed", "yes", "yes", "yes?", _algo(qc.MIXED), True),
    _row(
        "mixed-without-layers",
        "refuses: wants quantized_layers",
        "refuses?: takes it for w4afp8",
        "refuses: wants quantized_layers",
        _mixed_without_layers,
    ),
    _row(
        "mixed-layers-only-in-hf-quant-config",
        "yes",
        "refuses?: takes config.json for w4afp8",
        "yes",
        _mixed_layers_only_nested,
    ),
    _row(
        "mixed-config-json-only",
        "yes",
        "refuses: wants kv_cache_scheme in config.json, or hf_quant_config.json",
        "yes",
        _mixed_config_only,
    ),
    _row("mixed-container-key-only", "yes", "yes", "yes?", _container_keys_only),
    _row("mixed-per-linear-keys-only", "yes", "yes", "yes?", _linear_keys_only),
    _row("config-json-only", "yes", "yes", "yes", _config_only),
    _row("hf-quant-config-only", "yes", "yes", "yes", _nested_only),
    _row(
        "hf-quant-config-only-w4a16",
        "refuses: does not know W4A16_NVFP4 there",
        "wrong: as algo-w4a16-nvfp4",
        "yes?",
        _nested_only_w4a16,
    ),
    _row(
        "config-files-disagree",
        "yes: config.json wins",
        "yes: config.json wins",
        "yes: hf_quant_config.json wins, with a warning",
        _files_disagree,
    ),
    _row(
        "input-scale-differs-between-experts",
        "yes: maximum over experts on FlashInfer, each its own on CUTLASS",
        "yes: maximum over experts, but CuteDSL keeps w2's",
        "yes: maximum over experts",
        _of_input_scales(_differs),
    ),
    _row(
        "input-scale-gate-up-differ",
        "yes: the larger",
        "wrong: the one loaded last, maybe the smaller",
        "refuses: asserts that they are equal",
        _of_input_scales(lambda layer: bool(layer.gate_up_inputs_differ)),
    ),
    _row(
        "input-scale-missing-some",
        "wrong: uninitialised memory",
        "wrong: 1.0, for the whole layer",
        "refuses: KeyError",
        _of_input_scales(_some_missing),
    ),
    _row(
        "input-scale-missing-all",
        "wrong: uninitialised memory",
        "wrong: 1.0",
        "refuses: KeyError",
        _of_input_scales(lambda layer: layer.w13.stored == 0 or layer.w2.stored == 0),
    ),
    _row(
        "input-scale-zero-some",
        "yes: lost in the maximum; wrong on CUTLASS",
        "yes: lost in the maximum; w2 wrong on CuteDSL",
        "yes: lost in the maximum",
        _of_input_scales(_some("zero")),
    ),
    _row("input-scale-zero-all", "wrong: 1/0", "wrong: 1/0", "wrong: 1/0", _of_input_scales(_no_good("zero"))),
    _row(
        "input-scale-inf",
        "wrong: spoils every expert of the layer",
        "wrong: spoils every expert of the layer",
        "wrong: spoils every expert of the layer",
        _of_input_scales(_any("inf")),
    ),
    _row(
        "input-scale-nan",
        "wrong: NaN reaches every expert",
        "wrong: NaN reaches every expert",
        "refuses: its check that gate equals up fails",
        _nan,
    ),
    _row(
        "weight-scale-2-gate-up-differ",
        "wrong: uses the gate's for both halves",
        "yes: exact on trtllm; wrong on CUTLASS, CuteDSL and Marlin",
        "wrong: uses the larger, block scales untouched",
        _pairs_differ,
    ),
    _row("scale-shape-1", "yes", "yes", "yes", _of_split(lambda layer: (1,) in layer.shapes)),
    _row(
        "scale-bf16", "yes", "yes", "wrong: its reciprocal is rounded to BF16", _of_split(lambda x: "BF16" in x.dtypes)
    ),
    _row("scale-f16", "yes", "yes", "wrong: its reciprocal is rounded to F16", _of_split(lambda x: "F16" in x.dtypes)),
    _row(
        "scale-dtype-gate-up-differ",
        "yes",
        "yes",
        "refuses?: compares two dtypes",
        _of_split(lambda layer: bool(layer.mixed_dtypes)),
    ),
    _row(
        "fused-llama4-scalar",
        "yes?: at TP = 1",
        "refuses: cannot place a 3-D block scale",
        "yes",
        _llama4(text_only=False),
    ),
    _row(
        "fused-llama4-text-only",
        "refuses: looks for a w13_weight_weight_scale",
        "refuses: cannot place a 3-D block scale",
        "yes?",
        _llama4(text_only=True),
    ),
    _row("fused-scale-e", _VECTOR, _VECTOR, _VECTOR, _fused_shape()),
    _row("fused-scale-e1", _VECTOR, _VECTOR, _VECTOR, _fused_shape(1)),
    _row("fused-scale-e2", _VECTOR, _VECTOR, _VECTOR, _fused_shape(2)),
    _row(
        "fused-scale-16bit",
        "yes?",
        "refuses: as fused-llama4-scalar",
        "wrong: its reciprocal is rounded to 16 bits",
        _fused_16bit,
    ),
    _row(
        "gpt-oss-nvfp4",
        "refuses: its NVFP4 MoE has no bias",
        "wrong?: drops scales and biases silently",
        "refuses: takes the weights for BF16",
        _gpt_oss,
    ),
    _row("nemotron-h", "yes", "yes", "yes", _nemotron),
    _row(
        "qkv-weight-scale-2-differ",
        _LARGER,
        _LARGER,
        "refuses: asserts that they are equal",
        _group(_QKV, "weight_scale_2"),
    ),
    _row(
        "qkv-input-scale-differ",
        "yes: the largest",
        "yes: the largest",
        "refuses: asserts that they are equal",
        _group(_QKV, "input_scale"),
    ),
    _row(
        "dense-gate-up-weight-scale-2-differ",
        _LARGER,
        _LARGER,
        "refuses: asserts that they are equal",
        _group(_DENSE_GATE_UP, "weight_scale_2"),
    ),
    _row(
        "dense-gate-up-input-scale-differ",
        "yes: the larger",
        "yes: the larger",
        "refuses: asserts that they are equal",
        _group(_DENSE_GATE_UP, "input_scale"),
    ),
    _row(
        "qa-kva-weight-scale-2-differ",
        _LARGER,
        "wrong: keeps q_a's alone",
        "refuses?: asserts that they are equal",
        _group(_MLA, "weight_scale_2"),
    ),
    _row(
        "qa-kva-input-scale-differ",
        "yes: the larger",
        "wrong: keeps q_a's alone",
        "refuses: asserts that they are equal",
        _group(_MLA, "input_scale"),
    ),
    _row("qa-kva-scale-shape-1", "yes", "refuses?: joins two [1] to [2]", "yes", _mla_shape_1),
    _row(
        "linear-input-scale-missing",
        "wrong: uninitialised memory",
        "wrong: 1.0",
        "wrong?: uninitialised memory",
        _linear_input_missing,
    ),
    _row("linear-scale-16bit", "yes", "yes", "wrong: its reciprocal is rounded to 16 bits", _linear_16bit),
    _row("pre-quant-scale-linear", "refuses: NVFP4_AWQ", "yes", "yes", _pre_quant_linear),
    _row("pre-quant-scale-experts", "refuses: NVFP4_AWQ", "wrong: drops it", "yes", _pre_quant_experts),
    _row(
        "pre-quant-scale-experts-differ",
        "refuses: NVFP4_AWQ",
        "wrong: drops it",
        "refuses: wants one for all experts",
        _pre_quant_differ,
    ),
    _row(
        "pre-quant-scale-experts-down",
        "refuses: NVFP4_AWQ",
        "wrong: drops it",
        "wrong: never reads down_proj's",
        _pre_quant_down,
    ),
    _row("kv-scale-names", "yes", "yes", "wrong?: takes 1.0 for an FP8 cache", _kv_scales(llama4=False)),
    _row(
        "kv-scale-names-llama4",
        "yes",
        "wrong: drops the value",
        "wrong?: takes 1.0 for an FP8 cache",
        _kv_scales(llama4=True),
    ),
    _row("bf16-not-excluded", _SHAPE, _SHAPE, _SHAPE, _bf16_not_excluded),
    _row("excluded-but-nvfp4", _SHAPE, _SHAPE, "refuses?: no place for its scales", _excluded_but_nvfp4),
    _row(
        "exclude-corrupt-nul",
        "refuses: the entries match nothing; lm_head is built as NVFP4",
        "refuses?: the entries match nothing",
        "yes?: the entries match nothing",
        _corrupt,
    ),
    _row(
        "exclude-some-shards",
        "refuses: only some shards of a fused linear are listed",
        "refuses: only some shards of a fused linear are listed",
        "refuses: one listed shard unquantises all",
        _some_shards,
    ),
)


# --- verdicts --------------------------------------------------------------------------------------------------------


def verdicts(facts: Facts) -> tuple[Verdict, ...]:
    """What each engine does, by the worst condition that holds."""
    uncovered = _uncovered(facts)
    return tuple(_verdict(facts, engine, uncovered) for engine in ENGINES)


def _verdict(facts: Facts, engine: Engine, uncovered: list[Reason]) -> Verdict:
    reasons = list(uncovered)
    known_algorithm = False
    for condition in CONDITIONS:
        hit = condition.detect(facts, engine)
        if hit is None:
            continue
        known_algorithm |= condition.algorithm
        cell = condition.cells[engine]
        overridden = hit.outcome is not None and hit.outcome != cell.outcome
        why = "" if overridden else cell.why
        reasons.append(Reason(condition.id, hit.outcome or cell.outcome, cell.sure or overridden, hit.where, why))
    if not known_algorithm and not uncovered:
        algo = facts.algo(engine) or "none"
        reasons.append(Reason("no-row", "unknown", True, why=f"docs/engines.md has no row for quant_algo {algo}"))
    reasons.sort(key=lambda reason: (-OUTCOMES.index(reason.outcome), not reason.sure))
    outcome = reasons[0].outcome
    same = [reason.sure for reason in reasons if reason.outcome == outcome]
    return Verdict(engine, outcome, all(same) if outcome == "yes" else any(same), tuple(reasons))


def _uncovered(facts: Facts) -> list[Reason]:
    """What docs/engines.md says nothing about."""
    checkpoint = facts.checkpoint
    texts = []
    if checkpoint.quant is None:
        texts.append("not quantised by ModelOpt")
    found = [f.rule for f in errors(checkpoint.findings) if f.rule not in ("no-quant-config", "not-modelopt")]
    if found and checkpoint.quant is not None:
        texts.append(f"it has errors that no row is about: {', '.join(sorted(set(found)))}")
    odd = [kind for kind in ("-inf", "negative", "subnormal") if any(map(_any(kind), facts.layers))]
    if odd:
        texts.append(f"input_scale {', '.join(odd)}")
    bad = [name for name, values in facts.values.items() if name.endswith("weight_scale_2") and any(map(fault, values))]
    if bad:
        texts.append(f"{len(bad)} unusable weight_scale_2, {bad[0]} among them")
    return [Reason("no-row", "unknown", True, why=text) for text in texts]
