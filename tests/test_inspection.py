"""`inspect`: what is shown as data and as text, for NVFP4, int4 and BF16 checkpoints, good and bad."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from checkpoints import INT4, NVFP4, OVERLAYS, full_set
from rich.console import Console
from runner import run

from nvfp4prep import convert as conversion
from nvfp4prep import inspection, inspection_view
from nvfp4prep.findings import printable
from nvfp4prep.inspection import Inspection

Checkpoint = Callable[[str], Path]
MOE = "qwen3moe-nvfp4-perexpert"
EXPERTS = r"model\.layers\.0\.mlp\.experts\."


def text_of(found: Inspection, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(inspection_view.inspection(found))
    return stream.getvalue()


def strict(value: Any) -> Any:
    """Through JSON that refuses NaN and infinities."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.fixture
def converted(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    def convert(source: Path | str, **options: Any) -> Path:
        folder = checkpoint(source) if isinstance(source, str) else source
        prepared = conversion.prepare(str(folder), conversion.Options(**options))
        out = tmp_path / "converted"
        conversion.write(prepared, out, overwrite=False, workers=2, progress=lambda _: None)
        return out

    return convert


# --- every checkpoint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS, *INT4])
def test_every_shipped_checkpoint_is_shown(checkpoint: Checkpoint, name: str) -> None:
    found = inspection.inspect(str(checkpoint(name)), None)
    text = text_of(found)
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 60
    assert all(title in text for title in ("vLLM 0.33.0", "SGLang 0.5.23", "TensorRT-LLM"))
    entry = strict(inspection.to_json(found))
    linears = sum(row["linears"] for row in entry["inventory"]["formats"])
    assert linears == len(found.checkpoint.schema.linears)
    held = sum(row["bytes"] for row in entry["inventory"]["formats"]) + entry["inventory"]["other_bytes"]
    assert held == sum(tensor.nbytes for tensor in found.checkpoint.source.tensors.values())


@pytest.mark.parametrize("name", sorted(full_set()) or ["(none)"])
def test_every_checkpoint_of_the_full_set(full_set: dict[str, Path], name: str) -> None:
    if name not in full_set:
        pytest.skip("not available: the full set")
    result = run("inspect", full_set[name])
    assert result.code == 0, result.stderr


def test_bf16_gets_an_inventory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def plain(ck: damage.Editable) -> None:
        ck.tensors = {
            name: torch.zeros(32, 32, dtype=torch.bfloat16) for name in ck.tensors if name.endswith(".weight")
        }
        ck.hf = None
        del ck.config["quantization_config"]

    folder = damage.damaged(checkpoint(MOE), tmp_path / "bf16", plain)
    result = run("inspect", folder, "--json")
    assert result.code == 0
    assert [row["format"] for row in result.json["inventory"]["formats"]] == ["unquantized"]
    assert {engine["verdict"] for engine in result.json["engines"]} == {"unknown"}
    assert result.json["convert"]["refused"]


def test_errors_are_shown_not_raised(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = damage.damaged(checkpoint(MOE), tmp_path / "bad", damage.drop(EXPERTS + r"3\..*"))
    result = run("inspect", folder)
    assert result.code == 0
    assert "expert-missing" in result.stdout and "convert would refuse it" in result.stdout
    assert "unknown" in result.stdout


# --- what is said of scales ------------------------------------------------------------------------------------------


def test_spread_and_maximum(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def scales(ck: damage.Editable) -> None:
        for name in ck.names(EXPERTS + r".*input_scale"):
            ck.tensors[name] = torch.tensor(0.5)
        ck.tensors["model.layers.0.mlp.experts.5.up_proj.input_scale"] = torch.tensor(2.0)
        ck.tensors["model.layers.0.mlp.experts.2.down_proj.input_scale"] = torch.tensor(0.25)

    layer = inspection.inspect(str(damage.damaged(checkpoint(MOE), tmp_path / "s", scales)), None).layers[0]
    assert (layer.w13.low, layer.w13.high, layer.w13.ratio, layer.w13.top) == (0.5, 2.0, 4.0, 5)
    assert (layer.w2.low, layer.w2.high, layer.w2.top) == (0.25, 0.5, 0)
    assert layer.gate_up_inputs_differ == (5,)


def test_bad_values_by_kind_with_ids(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = EXPERTS + r"{}\.{}_proj\.input_scale"
    folder = damage.damaged(
        checkpoint(MOE),
        tmp_path / "bad",
        damage.put(float("nan"), name.format(1, "gate")),
        damage.put(float("inf"), name.format("[23]", "down")),
        damage.put(0.0, name.format(4, "up")),
        damage.drop(name.format("[5-7]", "down")),
    )
    found = inspection.inspect(str(folder), None)
    assert found.layers[0].w13.faults == {"NaN": (1, (1,)), "zero": (1, (4,))}
    assert found.layers[0].w2.faults == {"inf": (2, (2, 3)), "missing": (3, (5, 6, 7))}
    text = text_of(found)
    assert "layer 0: w2 input_scale missing 3, experts 5-7" in text
    assert "3 without the input_scale they need" in text
    assert "convert would refuse it without --impute layer-max" in text
    assert "convert --impute layer-max would change" in text
    changes = " ".join(found.outlook.changes)
    assert "3 missing input_scale added" in changes and "4 unusable input_scale replaced" in changes
    assert [verdict.outcome for verdict in found.outlook.after] == ["yes"] * 3
    entry = strict(inspection.to_json(found))
    assert entry["moe_layers"][0]["w2_input_scale"]["bad"]["missing"] == {"count": 3, "experts": [5, 6, 7]}


def test_pairs_and_powers_of_two(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = damage.damaged(checkpoint(MOE), tmp_path / "p", damage.multiply(EXPERTS + r"[02]\.up_proj", 0.5))
    found = inspection.inspect(str(folder), None)
    pairs = found.layers[0].gate_up
    assert pairs is not None and pairs.differing == (0, 2) and pairs.max_ratio == 2
    assert any("2 groups of unequal weight_scale_2" in c and "powers of two" in c for c in found.outlook.changes)


def test_other_changes_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def config(ck: damage.Editable) -> None:
        ck.set_exclude(["lm_head", "model.layers.9*", "a\0b"])
        ck.hf = None

    folder = damage.damaged(checkpoint(MOE), tmp_path / "c", damage.cast(torch.bfloat16), damage.reshape(1), config)
    changes = "\n".join(inspection.inspect(str(folder), None).outlook.changes)
    assert "112 scales widened from BF16 to F32" in changes
    assert "112 scales reshaped" in changes
    assert "entries dropped: 1 corrupted, 1 unmatched" in changes
    assert "3 unquantised modules added" in changes
    assert "hf_quant_config.json: quantisation config added" in changes


# --- before and after ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS])
def test_outlook_is_what_convert_does(checkpoint: Checkpoint, converted: Callable[..., Path], name: str) -> None:
    before = inspection.inspect(str(checkpoint(name)), None)
    after = inspection.inspect(str(converted(name)), None)
    assert after.verdicts == before.outlook.after
    assert after.outlook.changes == ()
    assert all(layer.w13.ratio == layer.w2.ratio == 1 and not layer.faulty for layer in after.layers if layer.w2.stored)
    assert "nvfp4prep convert" in text_of(after)


@pytest.mark.parametrize("name", [MOE, "tinymoe-nvfp4-splitscale", "tinymoe-nvfp4-fewtokens", "nemotronh-nvfp4"])
def test_converted_shows_agreement(converted: Callable[..., Path], name: str) -> None:
    found = inspection.inspect(str(converted(name)), None)
    assert all(verdict.outcome == "yes" and not verdict.varies for verdict in found.verdicts)


# --- one layer -------------------------------------------------------------------------------------------------------


def test_layer_expert_by_expert(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = damage.damaged(
        checkpoint(MOE), tmp_path / "l", damage.put(float("nan"), EXPERTS + r"3\.down_proj\.input_scale")
    )
    entry = run("inspect", folder, "--layer", 0, "--json").json["layer"]
    assert [row["expert"] for row in entry["experts"]] == list(range(8))
    assert entry["experts"][3]["input_scale"]["down"] == "nan" and entry["experts"][3]["bad"] == ["NaN"]
    text = run("inspect", folder, "--layer", 0).stdout
    (row,) = [line for line in text.splitlines() if line.startswith("3 ")]
    assert "nan !" in row
    top = max(row["input_scale"]["down"] for row in entry["experts"] if row["expert"] != 3)
    assert f"{top:.4g} *" in text
    assert "self_attn.q_proj" in text


@pytest.mark.parametrize("name", ["llama4-nvfp4", "gptoss-nvfp4", "nemotronh-nvfp4", "qwen3-dense-nvfp4", *INT4])
def test_layer_of_other_forms(checkpoint: Checkpoint, name: str) -> None:
    result = run("inspect", checkpoint(name), "--layer", 1)
    assert result.code == 0 and "layer 1" in result.stdout


def test_fused_halves_of_each_expert(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = damage.damaged(
        checkpoint("llama4-nvfp4"),
        tmp_path / "f",
        damage.reshape(8, 2, param="weight_scale_2", within=".*layers.0.*gate_up_proj"),
        damage.multiply(".*layers.0.*gate_up_proj", 1, 1, 1, 0.5),
    )
    found = inspection.inspect(str(folder), 0)
    pairs = found.layers[0].gate_up
    assert pairs is not None and pairs.total == 8 and pairs.differing == (1, 3, 5, 7)
    assert found.detail is not None and [row[0] for row in found.detail.experts] == [None, *range(8)]


def test_no_such_layer(checkpoint: Checkpoint) -> None:
    result = run("inspect", checkpoint(MOE), "--layer", 7)
    assert result.code == 2 and "the layers are 0-1" in result.stderr


# --- many layers, plan, torch ----------------------------------------------------------------------------------------


def test_many_layers_collapse(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """30 layers of one expert each: the first three and the five worst are shown."""

    def many(ck: damage.Editable) -> None:
        layer = {name: tensor for name, tensor in ck.tensors.items() if ".layers.0.mlp.experts.0." in name}
        ck.tensors = {
            name.replace("layers.0.", f"layers.{i}."): tensor for i in range(30) for name, tensor in layer.items()
        }
        ck.config.update(num_experts=1)
        for name in ck.names(r"model\.layers\.(7|20)\..*gate_proj\.weight_scale_2"):
            ck.tensors[name] = ck.tensors[name] / 2

    text = text_of(inspection.inspect(str(damage.damaged(checkpoint(MOE), tmp_path / "m", many)), None))
    rows = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert rows == ["0", "1", "2", "7", "20"]
    assert "and 25 layers more: input_scale equal in each, gate/up equal, none bad" in text


def test_plan_json(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prepared = conversion.prepare(str(checkpoint("tinymoe-nvfp4-splitscale")), conversion.Options())
    entry = strict(inspection.plan_json(prepared))
    assert entry["target"] == "hf" and entry["options"]["w13_scale"] == "unify"
    assert entry["tensors"] == 855 and entry["bytes"] == sum(file["bytes"] for file in entry["outputs"])
    assert entry["disk_needed"] >= entry["bytes"]
    assert len(entry["input_scales"]) == 16 and all(group["after"] for group in entry["input_scales"])
    assert all(group["unified"] for group in entry["weight_scale_2"] if group["differing"])
    assert entry["quant_config"]["quant_algo"] == "NVFP4" and entry["imputed"] == []


def test_torch_is_not_imported(checkpoint: Checkpoint) -> None:
    code = (
        "import sys; from nvfp4prep import inspection, inspection_view;"
        f"inspection_view.inspection(inspection.inspect({str(checkpoint(MOE))!r}, 0));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- names from files ---

EVIL = ("[/b]", "[red]", "\x1b[31m", "\\[/x]")


@pytest.mark.parametrize("evil", EVIL)
def test_names_are_shown_as_they_are(evil: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Markup in an architecture, a producer or a module is text; control characters are escaped."""

    def change(ck: damage.Editable) -> None:
        ck.config["architectures"] = [f"A{evil}Z"]
        for section in (ck.config["quantization_config"], ck.hf or {}):
            section["producer"] = {"name": f"P{evil}Z", "version": evil}
        ck.rename(lambda name: name.replace("model.layers.1.mlp.", f"M{evil}Z."))
        damage.multiply(rf"M{re.escape(evil)}Z\.experts.*", 1, 2, param="input_scale")(ck)

    source = damage.damaged(checkpoint(MOE), tmp_path / "source", change)
    shown = printable(evil)
    text = text_of(inspection.inspect(str(source), None), 300)
    assert f"A{shown}Z" in text and f"P{shown}Z" in text and f"M{shown}Z" in text and "\x1b" not in text
    done = run("convert", source, tmp_path / "out", "-v", "--dry-run")
    assert done.code == 0 and "\x1b[31m" not in done.stdout + done.stderr
    for layer in (0, None):
        done = run("inspect", source, *(("--layer", layer) if layer is not None else ()))
        assert done.code == 0, done


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3moe-int4awq", "--target compressed-tensors and --pre-quant-scale fold; or packed"),
        ("qwen3moe-nvfp4-awqlite", "leave out the experts' pre_quant_scale"),
        ("qwen3moe-w4a16nvfp4", "--target vllm-marlin"),
        ("qwen3moe-nvfp4-perexpert", "--target flashinfer-trtllm"),
        ("qwen3-dense-nvfp4", None),
    ],
)
def test_the_way_on_is_named(name: str, words: str | None, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """By inspect, and by convert once it has written `hf`."""
    told = [run("inspect", checkpoint(name)).stdout, run("convert", checkpoint(name), tmp_path / "out").stdout]
    for text in told:
        joined = " ".join(text.split())
        assert words in joined if words else "--target" not in joined
