"""What an engine must be running as to load a packed output: every difference is told, with both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pack_checks as packs
import pytest

import nvfp4prep
from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.serving import Module, Running, check_module, check_running, logical_quantization, other_tensors

SOURCE = "qwen3moe-nvfp4-perexpert"


@pytest.fixture(scope="module")
def packed(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> nvfp4prep.PackedCheckpoint:
    out = tmp_path_factory.mktemp("packed") / "out"
    return nvfp4prep.open(packs.pack(checkpoint(SOURCE), out, "vllm-marlin", engine="sglang", tp=2))


RIGHT = Running("sglang", "0.5.23", "marlin", 2, 1, "bf16")


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_as_packed_for(packed: nvfp4prep.PackedCheckpoint, version: str) -> None:
    check_running(packed, replace(RIGHT, version=version))


@pytest.mark.parametrize(
    ("running", "message"),
    [
        (replace(RIGHT, engine="vllm", version="0.33.0"), "packed for sglang, and this is vllm; .* --engine vllm"),
        (replace(RIGHT, version="0.6.0"), r"packed for sglang 0\.5\.23, and this is 0\.6\.0"),
        (replace(RIGHT, version="0.5.24"), r"packed for sglang 0\.5\.23, and this is 0\.5\.24"),
        (
            replace(RIGHT, backend="flashinfer_trtllm"),
            r"backend marlin \(vllm-marlin\), and flashinfer_trtllm is chosen",
        ),
        (replace(RIGHT, tp=4), "packed for TP 2 and EP 1, and the experts run with TP 4 and EP 1: .* --tp 4 --ep 1"),
        (replace(RIGHT, tp=1, ep=2), "packed for TP 2 and EP 1, and the experts run with TP 1 and EP 2"),
        (replace(RIGHT, dtype="fp16"), "packed for bf16 activations, and the model runs in fp16"),
    ],
)
def test_otherwise(packed: nvfp4prep.PackedCheckpoint, running: Running, message: str) -> None:
    with pytest.raises(UsageFault, match=message) as raised:
        check_running(packed, running)
    assert str(packed.path) in str(raised.value)


def test_every_difference_is_told(packed: nvfp4prep.PackedCheckpoint) -> None:
    with pytest.raises(UsageFault) as raised:
        check_running(packed, replace(RIGHT, backend="triton", tp=8, dtype="fp16"))
    assert [word in str(raised.value) for word in ("triton", "TP 8", "fp16")] == [True] * 3


@pytest.mark.parametrize("change", [{"experts": 16}, {"hidden": 512}, {"intermediate": 64}, {"gated": False}])
def test_another_models_module(packed: nvfp4prep.PackedCheckpoint, change: dict[str, int]) -> None:
    right = Module(8, 256, 128, True)
    check_module(packed, packed.layers[0], right)
    with pytest.raises(UsageFault, match=r"model\.layers\.0\.mlp is packed as .*, and the engine's model has"):
        check_module(packed, packed.layers[0], replace(right, **change))


def test_the_logical_section_is_that_of_the_hf_checkpoint(
    packed: nvfp4prep.PackedCheckpoint, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = packs.pack(checkpoint(SOURCE), tmp_path / "hf", "hf")
    expected = json.loads((hf / "config.json").read_text())["quantization_config"]
    assert logical_quantization(str(packed.path)) == expected
    with pytest.raises(UsageFault, match="served from a local directory; download it first"):
        logical_quantization("org/name")
    with pytest.raises(UsageFault, match="its logical entry is None"):
        logical_quantization(str(hf))


@pytest.mark.parametrize("target", ["vllm-marlin", "moe-wna16"])
def test_int4_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path, target: str) -> None:
    """SGLang would take the algorithm behind it for another format, and vLLM would ask for a converter."""
    out = packs.pack(checkpoint("qwen3moe-int4awq"), tmp_path / "out", target, pre_quant_scale="fold")
    with pytest.raises(UsageFault, match="does not load; serve int4 as compressed-tensors"):
        logical_quantization(str(out))


def test_a_file_of_other_tensors_that_goes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    opened = nvfp4prep.open(packs.pack(checkpoint(SOURCE), tmp_path / "out", "vllm-cutlass"))
    for path in opened.path.glob("*.safetensors"):
        path.write_bytes(b"nothing")
    with pytest.raises(EnvironmentFault, match=r"safetensors: can't be read: .*copy it again"):
        list(other_tensors(opened))
