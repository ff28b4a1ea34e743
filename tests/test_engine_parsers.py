"""docs/engines.md's claims on configs, tested on the engines' own code (vLLM 0.33.0, SGLang 0.5.23).

Runs when NVFP4PREP_ENGINES names a folder with the unzipped wheels:

    pip download --no-deps --python-version 3.11 --only-binary :all: vllm==0.33.0 sglang==0.5.23
    unzip -q vllm-*.whl -d ENGINES/vllm; unzip -q sglang-*.whl -d ENGINES/sglang
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import damage
import pytest
from checkpoints import INT4, NVFP4, OVERLAYS
from engine_code import Sglang, Vllm

from nvfp4prep import convert as conversion
from nvfp4prep import inspection
from nvfp4prep.engine_excludes import EngineModule, SomeShards, engine_modules, matcher
from nvfp4prep.schema import Format, build_schema
from nvfp4prep.source import read_directory

FOLDER = os.environ.get("NVFP4PREP_ENGINES")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="not available: the engines' parsers (NVFP4PREP_ENGINES names no folder of unzipped wheels)"
)

Engine = Literal["vllm", "sglang"]
Checkpoint = Callable[[str], Path]
ENGINE_NAMES: tuple[Engine, ...] = ("vllm", "sglang")
CONFIG_IDS = ("algo-", "mixed-", "hf-quant-config-only", "config-json-only")


@pytest.fixture(scope="module", params=ENGINE_NAMES)
def engine(request: pytest.FixtureRequest) -> tuple[Engine, Any]:
    assert FOLDER
    return request.param, {"vllm": Vllm, "sglang": Sglang}[request.param](Path(FOLDER))


@pytest.fixture(scope="module")
def converted(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    outputs: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in outputs:
            outputs[name] = tmp_path_factory.mktemp("converted") / name
            prepared = conversion.prepare(str(checkpoint(name)), conversion.Options())
            conversion.write(prepared, outputs[name], overwrite=False, workers=2, progress=lambda _: None)
        return outputs[name]

    return path_of


def configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    nested = folder / "hf_quant_config.json"
    config = json.loads((folder / "config.json").read_text())
    return config, json.loads(nested.read_text()) if nested.is_file() else None


def parser_accepts(code: Any, folder: Path) -> bool:
    try:
        code.parse(*configs(folder))
    except ValueError:
        return False
    return True


def says_parser_accepts(folder: Path, name: Engine) -> bool:
    """What engines.py says of the configs alone."""
    verdict = next(v for v in inspection.inspect(str(folder), None).verdicts if v.engine == name)
    return not any(r.outcome == "refuses" and r.id.startswith(CONFIG_IDS) for r in verdict.reasons)


# --- parsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS])
def test_parser_of_converted(engine: tuple[Engine, Any], converted: Callable[[str], Path], name: str) -> None:
    folder = converted(name)
    accepted = parser_accepts(engine[1], folder)
    assert accepted == says_parser_accepts(folder, engine[0])
    assert accepted == (not (name.endswith("awqlite") and engine[0] == "vllm"))


@pytest.mark.parametrize("name", [*NVFP4, *INT4])
def test_parser_of_source(engine: tuple[Engine, Any], checkpoint: Checkpoint, name: str) -> None:
    assert parser_accepts(engine[1], checkpoint(name)) == says_parser_accepts(checkpoint(name), engine[0])


def one_file(which: str) -> damage.Damage:
    def change(ck: damage.Editable) -> None:
        if which == "config.json":
            ck.hf = None
        else:
            del ck.config["quantization_config"]

    return change


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("of", ["source", "output"])
@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-perexpert", "qwen3moe-w4a16nvfp4", "qwen3moe-mixed-fp8attn"])
def test_parser_with_one_file(
    engine: tuple[Engine, Any],
    checkpoint: Checkpoint,
    converted: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    of: str,
    file: str,
) -> None:
    base = checkpoint(name) if of == "source" else converted(name)
    folder = damage.damaged(base, tmp_path / "damaged", one_file(file))
    assert parser_accepts(engine[1], folder) == says_parser_accepts(folder, engine[0])


@pytest.mark.parametrize("where", ["config.json", "both"])
def test_parser_of_mixed_without_layers(
    engine: tuple[Engine, Any], checkpoint: Checkpoint, tmp_path: Path, where: str
) -> None:
    def change(ck: damage.Editable) -> None:
        for section in ck.sections[: 1 if where == "config.json" else 2]:
            section.pop("quantized_layers", None)

    folder = damage.damaged(checkpoint("qwen3moe-mixed-fp8attn"), tmp_path / "damaged", change)
    assert parser_accepts(engine[1], folder) == says_parser_accepts(folder, engine[0])


# --- exclude lists ---------------------------------------------------------------------------------------------------


def modules_of(folder: Path) -> tuple[EngineModule, ...]:
    source = read_directory(folder, spec=folder.name, revision=None)
    return engine_modules(build_schema(source.tensors, configs(folder)[0]))


@pytest.mark.parametrize("name", [n for n in (*NVFP4, *OVERLAYS) if "awqlite" not in n])
def test_converted_excludes_exactly_what_is_unquantised(
    engine: tuple[Engine, Any], converted: Callable[[str], Path], name: str
) -> None:
    folder = converted(name)
    parsed = engine[1].parse(*configs(folder))
    wrong = [m.names[engine[0]] for m in modules_of(folder) if engine[1].excludes(parsed, m) == m.quantized]
    assert not wrong


def test_mixed_finds_each_algorithm(engine: tuple[Engine, Any], converted: Callable[[str], Path]) -> None:
    folder = converted("qwen3moe-mixed-fp8attn")
    parsed = engine[1].parse(*configs(folder))
    names = {Format.NVFP4: "NVFP4", Format.FP8: "FP8"}
    for module in modules_of(folder):
        if module.quantized:
            (form,) = module.formats
            assert parsed._resolve_quant_algo(module.names[engine[0]]) == names[form]


def lists_of(name: str) -> Iterator[list[str]]:
    """Exclude lists of every form that docs/engines.md tells apart."""
    layer = {"dsv3-nvfp4": "model.layers.1.mlp", "mixtral-nvfp4": "model.layers.1.block_sparse_moe"}.get(
        name, "model.layers.1.mlp"
    )
    attention = "model.layers.0.self_attn"
    single = [
        "lm_head", "*", "lm_head*", "lm", "model", "self_attn", "o_proj", "down_proj", "experts", "gate", "proj",
        "model.layers.1*", "model.layers.1.*", "model.layers.?.mlp*", "*.mlp.gate", "*self_attn*", "re:.*o_proj",
        f"{layer}.experts", f"{layer}.experts.*", f"{layer}.experts*", f"{layer}.experts.0.gate_proj",
        f"{layer}.experts.0.down_proj", f"{layer}.gate", f"{layer}.gate_up_proj", f"{layer}.shared_experts",
        f"{layer}.shared_experts.down_proj",
        f"{layer}.shared_experts.down_proj.x", f"{attention}.qkv_proj", f"{attention}*", f"{attention}.*",
        f"{attention}.q_a_proj", f"{attention}.q_b_proj", f"{attention}.kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj",
        f"{attention}.o_proj", "language_model.model.layers.0", "", "a\0b", "[", "model.layers.1.mlp.[eg]*", ".",
        "layers",
    ]  # fmt: skip
    yield from ([entry] for entry in single)
    yield from (list(pair) for pair in itertools.combinations(single[:20], 2))
    for group in (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa")):
        for size in range(1, len(group) + 1):
            yield from ([f"{attention}.{shard}" for shard in shards] for shards in itertools.combinations(group, size))
    yield [f"{layer}.experts.{i}.{p}" for i in range(8) for p in ("gate_proj", "up_proj", "down_proj")]
    yield [f"model.layers.0.mlp.{p}" for p in ("gate_proj", "up_proj")]
    yield ["model.layers.0.mlp.gate_proj"]


@pytest.mark.parametrize("name", ["dsv3-nvfp4", "mixtral-nvfp4", "qwen3-dense-nvfp4", "qwen3moe-nvfp4-perexpert"])
def test_matchers_are_the_engines_own(engine: tuple[Engine, Any], checkpoint: Checkpoint, name: str) -> None:
    """engine_excludes.py decides as the engine does, for every module and every form of entry."""
    modules = modules_of(checkpoint(name))
    config, nested = configs(checkpoint(name))
    parsed = engine[1].parse(config, nested)
    for entries in lists_of(name):
        parsed.exclude_modules = entries
        match = matcher(engine[0], entries)
        for module in modules:
            expected: bool | str
            actual: bool | str
            try:
                expected = engine[1].excludes(parsed, module)
            except ValueError:
                expected = "some shards"
            except Exception as error:  # a regex that SGLang can't compile
                assert engine[0] == "sglang" and entries == ["["], error
                continue
            try:
                actual = match(module)
            except SomeShards:
                actual = "some shards"
            assert actual == expected, (entries, module.names[engine[0]])
