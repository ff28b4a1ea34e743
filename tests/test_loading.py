"""nvfp4prep.open and load_experts: what they hand out is what the files hold, read here by safetensors' own library."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pack_checks as packs
import pytest
import torch
from runner import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nvfp4prep
from nvfp4prep import loading
from nvfp4prep.errors import EnvironmentFault, InputRefused, UsageFault

MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "trtllm": ("qwen3moe-nvfp4-perexpert", {"target": "flashinfer-trtllm", "tp": 2, "ep": 2}),
    "trtllm-sglang": ("qwen3moe-nvfp4-perexpert", {"target": "flashinfer-trtllm", "engine": "sglang", "ep": 2}),
    "cutlass-plain": ("qwen3moe-nvfp4-perexpert", {"target": "vllm-cutlass"}),
    "trtllm-biased": ("gptoss-nvfp4", {"target": "flashinfer-trtllm"}),
    "cutlass-sglang": ("qwen3moe-nvfp4-i96", {"target": "flashinfer-cutlass", "engine": "sglang"}),
    "cutlass-biased": ("gptoss-nvfp4", {"target": "flashinfer-cutlass", "tp": 2}),
    "cutedsl": ("mixtral-nvfp4", {"target": "flashinfer-cutedsl"}),
    "vllm-cutlass": ("nemotronh-nvfp4", {"target": "vllm-cutlass", "tp": 2}),
    "marlin": ("qwen3moe-w4a16nvfp4", {"target": "vllm-marlin"}),
    "marlin-sglang": ("dsv3-nvfp4", {"target": "vllm-marlin", "engine": "sglang", "ep": 2}),
    "fused": ("llama4-nvfp4", {"target": "flashinfer-cutlass", "ep": 2}),
}
"""Short name -> shipped checkpoint and how it is packed: every layout, flat and not, biased, not gated, fused."""


@pytest.fixture(scope="module")
def packed(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in made:
            source, options = MADE[name]
            made[name] = packs.pack(checkpoint(source), tmp_path_factory.mktemp("packed") / name, **options)
        return made[name]

    return path_of


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and packs.same_bytes(ours, theirs)


@pytest.mark.parametrize("name", MADE)
def test_every_stored_tensor_of_the_experts_is_handed_out(packed: Callable[[str], Path], name: str) -> None:
    path = packed(name)
    _, options = MADE[name]
    tp, ep = options.get("tp", 1), options.get("ep", 1)
    opened = nvfp4prep.open(path)
    assert (opened.layout, opened.tp, opened.ep) == (options["target"], tp, ep)
    assert opened.engine == options.get("engine", "vllm")
    assert opened.ranks == tuple((t, e) for e in range(ep) for t in range(tp))
    prefix = "routed_experts." if opened.engine == "vllm" else ""
    for layer in opened.layers:
        for t, e in opened.ranks:
            folder = path if tp * ep == 1 else path / f"rank-{t:02}-of-{tp:02}_{e:02}-of-{ep:02}"
            start = f"{layer.path}.experts."
            expected = {key[len(start) :]: value for key, value in stored(folder).items() if key.startswith(start)}
            found = opened.load_experts(layer.path, (t, e))
            own = {key: value for key, value in found.tensors.items() if f"nvfp4prep.{key}" in expected}
            own |= {**found.scalars, **found.logical}
            handed = {prefix + key: value for key, value in found.parameters.items()}
            handed |= {f"nvfp4prep.{key}": value for key, value in own.items()}
            assert handed.keys() == expected.keys()
            assert [key for key in expected if not same(handed[key], expected[key])] == []
            share = layer.experts // ep
            assert found.experts == range(e * share, (e + 1) * share)
            assert {len(value) for value in (*found.tensors.values(), *found.scalars.values())} == {share}


def test_layers_and_sizes(packed: Callable[[str], Path]) -> None:
    opened = nvfp4prep.open(str(packed("trtllm-sglang")))
    first = opened.layers[0]
    assert (first.path, first.layer, first.experts) == ("model.layers.0.mlp", 0, 8)
    assert (first.hidden, first.intermediate, first.gated) == (256, 128, True)
    assert [layer.layer for layer in opened.layers] == [0, 1]
    assert opened.layout_id == "flashinfer-trtllm/sglang/1"
    assert (opened.engine_version, opened.kernel) == ("0.5.23", "trtllm_fp4_block_scale_moe")
    assert opened.manifest["target"] == "flashinfer-trtllm"


def scales(folder: Path, ending: str) -> list[float]:
    """Values of a checkpoint's scales whose names end so, by expert."""
    found = {name: float(value) for name, value in stored(folder).items() if name.endswith(ending)}
    return [found[name] for name in sorted(found)]


def test_kernel_args_of_trtllm(packed: Callable[[str], Path], checkpoint: Callable[[str], Path]) -> None:
    """Alphas are a1·s and a2·s of the source's scales, a the layer's maximum."""
    found = nvfp4prep.load_experts(packed("trtllm"), 1, rank=(1, 1))
    args = found.kernel_args(top_k=2)
    assert args["top_k"] == 2
    assert args["gemm1_weights"] is found.parameters["w13_weight"]
    assert args["gemm2_weights_scale"].dtype == torch.float8_e4m3fn
    source = checkpoint("qwen3moe-nvfp4-perexpert")
    experts = "model.layers.1.mlp.experts"
    tensors = stored(source)

    def column(projection: str, param: str) -> torch.Tensor:
        return torch.stack([tensors[f"{experts}.{e}.{projection}.{param}"].float() for e in range(8)])

    a1 = torch.maximum(column("gate_proj", "input_scale"), column("up_proj", "input_scale")).max()
    a2 = column("down_proj", "input_scale").max()
    assert torch.equal(args["output1_scale_gate_scalar"], (a1 * column("gate_proj", "weight_scale_2"))[4:])
    assert torch.equal(args["output2_scale_scalar"], (a2 * column("down_proj", "weight_scale_2"))[4:])
    assert torch.equal(found.logical["down_weight_scale_2"], column("down_proj", "weight_scale_2")[4:])
    assert torch.equal(found.logical["raw_w2_input_scale"], column("down_proj", "input_scale")[4:])


def test_kernel_args_of_every_layout_hold_the_weights(packed: Callable[[str], Path]) -> None:
    weights = {
        "trtllm-sglang": "gemm1_weights",
        "cutlass-sglang": "fc1_expert_weights",
        "cutedsl": "w1_weight",
        "vllm-cutlass": "w1_fp4",
        "marlin": "w1",
    }
    for name, argument in weights.items():
        found = nvfp4prep.load_experts(packed(name), nvfp4prep.open(packed(name)).layers[0].path)
        given = found.kernel_args()[argument]
        assert torch.equal(given.view(found.parameters["w13_weight"].dtype), found.parameters["w13_weight"]), name


def test_biases_take_the_outputs_dtype(packed: Callable[[str], Path]) -> None:
    found = nvfp4prep.load_experts(packed("cutlass-biased"), 0, (1, 0))
    args = found.kernel_args(output_dtype=torch.bfloat16)
    assert args["fc2_expert_biases"].dtype == torch.bfloat16
    assert torch.equal(args["fc1_expert_biases"], found.tensors["fc1_expert_biases"].to(torch.bfloat16))
    with pytest.raises(UsageFault, match="give output_dtype"):
        found.kernel_args()


# --- what is not there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "rank", "message"),
    [
        (2, (0, 0), "no packed MoE layer 2; there are 0, 1"),
        ("model.layers.0", (0, 0), "no packed MoE layer 'model.layers.0'; there are 0, 1"),
        (0, (2, 0), r"no rank \(2, 0\); packed for TP 2 and EP 2: .* \(0, 0\), \(1, 0\), \(0, 1\), \(1, 1\)"),
        (0, (0, -1), r"no rank \(0, -1\)"),
        (0, (0.0, 1.0), r"no rank \(0\.0, 1\.0\)"),
        (0, [0, 1, 0], r"no rank \[0, 1, 0\]"),
        (0, "01", "no rank '01'"),
        (0, 1, "no rank 1;"),
        (0, None, "no rank None"),
        (0, ((0, 0), 1), r"no rank \(\(0, 0\), 1\)"),
        (1.0, (0, 0), r"no packed MoE layer 1\.0"),
        (None, (0, 0), "no packed MoE layer None"),
        ([0], (0, 0), r"no packed MoE layer \[0\]"),
    ],
)
def test_wrong_layer_or_rank(packed: Callable[[str], Path], layer: Any, rank: Any, message: str) -> None:
    with pytest.raises(UsageFault, match=message) as raised:
        nvfp4prep.load_experts(packed("trtllm"), layer, rank)
    assert str(packed("trtllm")) in str(raised.value)


def test_whole_numbers_of_any_kind(packed: Callable[[str], Path]) -> None:
    opened = nvfp4prep.open(packed("trtllm"))
    wanted = opened.load_experts(1, (0, 1))
    for layer, rank in ((np.int64(1), [0, 1]), (torch.tensor(1), np.array([0, 1])), (1, torch.tensor([0, 1]))):
        found = opened.load_experts(layer, rank)
        assert (found.path, found.rank, found.experts) == (wanted.path, (0, 1), wanted.experts)


@pytest.mark.parametrize("device", ["xyz", "", "cuda:x", object(), 1.5, ("cpu",)])
def test_no_device(packed: Callable[[str], Path], device: Any) -> None:
    with pytest.raises(UsageFault, match=r"device .*give cpu or cuda:0"):
        nvfp4prep.load_experts(packed("cutedsl"), 0, device=device)


@pytest.mark.parametrize("device", ["cuda:99", "mps", "xpu", torch.device("cuda", 99)])
def test_a_device_that_is_not_here(packed: Callable[[str], Path], device: Any) -> None:
    with pytest.raises(EnvironmentFault, match="device "):
        nvfp4prep.load_experts(packed("cutedsl"), 0, device=device)


def test_a_device_that_is_full(packed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(loading, "_read", full)
    with pytest.raises(EnvironmentFault, match=r"safetensors: model.*bytes on device cpu: CUDA out of memory\.$"):
        nvfp4prep.load_experts(packed("cutedsl"), 0)


def test_paths(packed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="too long"):
        nvfp4prep.open(tmp_path / ("x" * 300))
    for strange in ("", "\0", "no/such"):
        with pytest.raises(InputRefused):
            nvfp4prep.open(tmp_path / strange)
    out = packed("cutedsl")
    monkeypatch.chdir(out.parent)
    opened = nvfp4prep.open(out.name)
    monkeypatch.chdir(tmp_path)
    assert opened.path == out
    assert opened.load_experts(0).tensors


def test_a_file_that_goes_is_named_in_full(packed: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(packed("cutedsl"), tmp_path / "out")
    opened = nvfp4prep.open(tmp_path / "out")
    for path in opened.path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(EnvironmentFault, match=re.escape(str(tmp_path / "out"))):
        opened.load_experts(0)


@pytest.mark.parametrize("version", [None, 5, "0.1", ...])
def test_the_engines_version(packed: Callable[[str], Path], tmp_path: Path, version: Any) -> None:
    """Opening, unpacking and validating say the same of it."""
    out = tmp_path / "out"
    shutil.copytree(packed("cutedsl"), out)
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    manifest["packed"]["engine_version"] = version
    if version is ...:
        del manifest["packed"]["engine_version"]
    (out / "nvfp4prep.json").write_text(json.dumps(manifest))
    with pytest.raises(InputRefused, match="manifest-bad"):
        nvfp4prep.open(out)
    assert run("unpack", out, tmp_path / "hf").code == 3
    assert run("validate", out, "--level", "headers").code == 1


OWN, ENGINES = "model.layers.0.mlp.experts.nvfp4prep.", "model.layers.0.mlp.experts.routed_experts."


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        (OWN + "foo", torch.ones(2, dtype=torch.int64), "nvfp4prep stores no such tensor; remove it"),
        (OWN + "foo", torch.ones(2), "nvfp4prep stores no such tensor; remove it"),
        (OWN + "down_bar", torch.ones(2, dtype=torch.complex64), "nvfp4prep stores no such tensor; remove it"),
        (OWN + "g1_alphas", torch.ones(8, dtype=torch.complex64), r"C64 \[8\] where F32 \[8\] belongs"),
        (OWN + "raw_input_scale", torch.ones(7), r"F32 \[7\] where F32 \[8\] belongs"),
        (ENGINES + "w2_input_scale", torch.ones(8).double(), r"F64 \[8\] where F32 \[8\]"),
        (ENGINES + "foo", torch.ones(8), "nvfp4prep stores no such tensor; remove it"),
    ],
)
def test_tensors_that_packing_does_not_write(
    packed: Callable[[str], Path], tmp_path: Path, name: str, tensor: torch.Tensor, says: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(packed("cutlass-plain"), out)
    path = next(path for path in out.glob("*.safetensors") if OWN + "g1_alphas" in load_file(path))
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(load_file(path) | {name: tensor}, path, metadata)
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    manifest["outputs"][path.name]["bytes"] = path.stat().st_size
    (out / "nvfp4prep.json").write_text(json.dumps(manifest))
    with pytest.raises(InputRefused, match=says):
        nvfp4prep.open(out)
    assert run("validate", out, "--level", "headers").code == 1


def test_a_number_that_two_layers_have(packed: Callable[[str], Path]) -> None:
    opened = nvfp4prep.open(packed("cutedsl"))
    first = opened.packed.layers[0]
    twice = replace(opened.packed, layers=(first, replace(first, path="mtp.layers.0.mlp")))
    with pytest.raises(UsageFault, match=r"2 MoE layers have the number 0; give the path of one: .*, mtp\.layers\.0"):
        replace(opened, packed=twice).load_experts(0)


@pytest.mark.parametrize("name", ["trtllm-biased", "marlin", "vllm-cutlass", "moe-wna16", "flashinfer-sm90-w4a8"])
def test_whatever_torchs_default_dtype_is(
    packed: Callable[[str], Path], name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Engines set theirs while they load a model."""
    if name in MADE:
        folder = packed(name)
    else:
        folder = packs.pack(checkpoint("qwen3moe-w4a8awq"), tmp_path / "out", name, pre_quant_scale="fold")
    layer = nvfp4prep.open(folder).layers[0].path
    before = nvfp4prep.load_experts(folder, layer)
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = nvfp4prep.load_experts(folder, layer)
    finally:
        torch.set_default_dtype(torch.float32)
    for table in ("parameters", "tensors", "scalars", "logical"):
        ours, theirs = getattr(after, table), getattr(before, table)
        assert ours.keys() == theirs.keys()
        assert all(same(ours[key], theirs[key]) for key in ours)


def test_not_a_packed_output(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match=r"not-packed.*no such directory"):
        nvfp4prep.open(tmp_path / "none")
    with pytest.raises(InputRefused, match=r"not-packed.*no packed output"):
        nvfp4prep.open(checkpoint("qwen3moe-nvfp4-perexpert"))


def test_a_file_that_changes_after_it_was_opened(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source, options = MADE["cutedsl"]
    opened = nvfp4prep.open(packs.pack(checkpoint(source), tmp_path / "out", **options))
    file = sorted(opened.path.glob("*.safetensors"))[-1]  # the experts'
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EnvironmentFault, match=rf"{file.name}: changed since its header was read"):
        opened.load_experts(0)


# --- the package's front ---------------------------------------------------------------------------------------------


def test_torch_is_imported_when_first_needed() -> None:
    code = """
import sys
import nvfp4prep, nvfp4prep.cli
assert nvfp4prep.__version__
assert "torch" not in sys.modules
nvfp4prep.open
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_packages_names() -> None:

    assert nvfp4prep.open is loading.open_packed
    assert nvfp4prep.load_experts is loading.load_experts
    assert nvfp4prep.PackedExperts is loading.PackedExperts
    with pytest.raises(AttributeError, match="no attribute 'opened'"):
        nvfp4prep.opened  # noqa: B018
