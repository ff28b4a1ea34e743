"""Layers whose pre_quant_scale is folded away, against a BF16 reference: compared for the inputs that they get, or not
at all, and then the report says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Editable, damaged, load
from runner import Run, run
from torch import Tensor

from nvfp4prep.schema import Format
from nvfp4prep.smoke.metrics import INT4_NOISE, quantisation_error, reference_tolerances
from nvfp4prep.smoke.reference import column_factors, unevenness

TINY, INT4, W4A8, AWQ = "tinymoe-int4awq", "qwen3moe-int4awq", "tinymoe-w4a8awq", "qwen3moe-nvfp4-awqlite"
EXPERT = r"model\.layers\.\d+\.mlp\.experts\.\d+\."
GROUP = 128

Fetch = Callable[[str], Path]


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int4 as ModelOpt stores it: codes of rows 2r and 2r + 1 in one byte, F32 scales of groups."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).view(weight.shape).to(torch.int16) & 15
    return (codes[0::2] | codes[1::2] << 4).to(torch.uint8), scale


def uneven(weights: dict[str, Tensor], spread: float, down: float) -> Callable[[Editable], None]:
    """Experts quantised anew from made weights, for factors that differ by up to `spread`, of down by `down`."""

    def change(ck: Editable) -> None:
        generator = torch.Generator().manual_seed(3)
        for layer in {name.split(".mlp.")[0] for name in ck.names(EXPERT + r"\w+\.weight")}:
            hidden = ck.tensors[f"{layer}.post_attention_layernorm.weight"].shape[0]
            shared = ((torch.rand(hidden, generator=generator) * 2 - 1) * spread).exp2().to(torch.bfloat16)
            for name in ck.names(rf"{layer}\.mlp\.experts\.\d+\.\w+\.weight"):
                module = name.removesuffix(".weight")
                stored = ck.tensors[f"{module}.pre_quant_scale"]
                factors = shared
                if module.endswith("down_proj"):
                    factors = ((torch.rand(len(stored), generator=generator) * 2 - 1) * down).exp2().to(torch.bfloat16)
                ck.tensors[f"{module}.pre_quant_scale"] = factors
                codes, scale = quantised(weights[name] / factors.float())
                ck.tensors[name], ck.tensors[f"{module}.weight_scale"] = codes, scale

    return change


def weights_of(source: Path) -> dict[str, Tensor]:
    """Normal weights for each of an int4 checkpoint's experts' linears."""
    ck, generator = load(source), torch.Generator().manual_seed(1)
    return {
        name: torch.randn(ck.tensors[name].shape[0] * 2, ck.tensors[name].shape[1], generator=generator) * 0.02
        for name in ck.names(EXPERT + r"\w+\.weight")
    }


def reference_of(source: Path, weights: dict[str, Tensor], folder: Path) -> Path:
    """The BF16 checkpoint behind it: experts unquantised, norm and router as they are."""

    def change(ck: Editable) -> None:
        ck.remove(ck.names(EXPERT + r"\w+\.(weight_scale|pre_quant_scale|input_scale|weight_scale_2)"))
        ck.tensors |= {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        del ck.config["quantization_config"]
        ck.hf = None

    return damaged(source, folder, change)


def packed(source: Path, out: Path, target: str = "vllm-marlin") -> Path:
    done = run("convert", source, out, "--target", target, "--pre-quant-scale", "fold", "--no-smoke", "-q")
    assert done.code == 0, done.stderr
    return out


def smoke(*arguments: object) -> Run:
    return run("smoke", *arguments, "--tokens", "48", "--json", "-")


def against_reference(report: dict[str, Any]) -> list[float]:
    return [row["comparison"]["rel_l2"] for row in report["rows"] if row["against"] == "reference"]


@pytest.fixture(scope="module")
def made(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint with factors from 1/2 to 2, its BF16 reference, and it packed for Marlin."""
    folder, base = tmp_path_factory.mktemp("made"), checkpoint(INT4)
    weights = weights_of(base)
    source = damaged(base, folder / "source", uneven(weights, 1.0, 0.25))
    return source, reference_of(base, weights, folder / "reference"), packed(source, folder / "out")


def test_a_reference_is_compared_for_the_inputs_that_folded_layers_get(made: tuple[Path, Path, Path]) -> None:
    source, reference, out = made
    for subject in ((out,), (out, "--source", source), (source, "--target", "vllm-marlin")):
        done = smoke(*subject, "--reference", reference)
        assert done.code == 0, done.stdout
        assert done.json["reference"] == "BF16 checkpoint" and done.json["not_compared"] == []
        errors = against_reference(done.json)
        assert len(errors) == 4
        most = quantisation_error("silu", weights=Format.INT4, activations="16-bit", uneven=(1.75, 1.2))
        assert all(error < most for error in errors), "within the derivation, without headroom"


def test_a_norm_that_does_not_fit_the_experts_fails(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """As if gate's and up's factors had gone into the norm inverted, or not at all."""
    _, reference, out = made
    name = "model.layers.0.post_attention_layernorm.weight"
    own, stored = load(reference).tensors[name], load(out).tensors[name]
    for index, wrong in enumerate((own, (own.float() ** 2 / stored.float()).to(own.dtype))):
        folder = tmp_path / str(index)
        shutil.copytree(out, folder)
        editable = load(folder)
        info = next(file for key, file in editable.files.items() if key == name)
        raw = (folder / info).read_bytes()
        before = stored.view(torch.uint8).numpy().tobytes()
        assert raw.count(before) == 1
        (folder / info).write_bytes(raw.replace(before, wrong.view(torch.uint8).numpy().tobytes()))
        done = smoke(folder, "--reference", reference, "--layers", "0")
        assert done.code == 1
        assert min(against_reference(done.json)) > 0.5


def test_factors_of_down_that_differ_widely_are_not_compared(checkpoint: Fetch, tmp_path: Path) -> None:
    base = checkpoint(INT4)
    weights = weights_of(base)
    out = packed(damaged(base, tmp_path / "source", uneven(weights, 0.0, 3.0)), tmp_path / "out")
    reference = reference_of(base, weights, tmp_path / "reference")
    done = smoke(out, "--reference", reference)
    assert done.code == 0
    assert done.json["reference"] is None
    assert {entry["layer"] for entry in done.json["not_compared"]} == {0, 1}
    assert all("differ too much" in entry["why"] for entry in done.json["not_compared"])
    text = run("smoke", out, "--reference", reference, "--tokens", "3").stdout
    assert "reference: BF16" not in text
    assert "not compared with real weights" in text.splitlines()[0]
    assert "2 of 2 layers not compared with real weights" in text


@pytest.mark.parametrize("more", [(), ("--source",)])
def test_quantised_activations_are_not_compared(more: tuple[str, ...], checkpoint: Fetch, tmp_path: Path) -> None:
    out = packed(checkpoint(AWQ), tmp_path / "out", "flashinfer-trtllm")
    done = smoke(out, *more, *([checkpoint(AWQ)] if more else []))
    assert done.code == 0
    assert done.json["reference"] is None
    assert [entry["layer"] for entry in done.json["not_compared"]] == [0, 1]
    assert "pre_quant_scale is folded away" in done.json["not_compared"][0]["why"]


@pytest.mark.parametrize("change", ["removed", "another shape", "zero"])
def test_a_reference_whose_norm_says_nothing(change: str, made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, reference, out = made

    def damage(ck: Editable) -> None:
        for name in ck.names(r".*post_attention_layernorm\.weight"):
            norm = ck.tensors.pop(name)
            if change != "removed":
                ck.tensors[name] = norm[:7] if change == "another shape" else norm * 0

    done = smoke(out, "--reference", damaged(reference, tmp_path / "reference", damage), "--layers", "0")
    if change == "another shape":
        assert done.code == 3
        assert done.findings[0]["rule"] == "reference-shape"
    else:
        assert done.code == 0 and done.json["reference"] is None
        assert "post_attention_layernorm" in done.json["not_compared"][0]["why"]


@pytest.mark.parametrize("norm", ["model.norms.weight", "model.layers.0.mlp.gate.weight", 5])
def test_a_manifest_that_names_no_norm_is_refused(norm: Any, made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, reference, out = made
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    manifest = json.loads((folder / "nvfp4prep.json").read_text())
    for entry in manifest["runs"][-1]["folded"].values():
        entry["norm"] = norm
    (folder / "nvfp4prep.json").write_text(json.dumps(manifest))
    done = smoke(folder, "--reference", reference)
    assert done.code == 3
    assert done.findings[0]["rule"] == "manifest-bad"


@pytest.mark.parametrize("name", [INT4, AWQ])
def test_another_models_reference_is_refused(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """Whether the layers are compared or not."""
    target = "vllm-marlin" if name == INT4 else "flashinfer-trtllm"
    base = checkpoint(TINY)
    other = reference_of(base, weights_of(base), tmp_path / "reference")
    done = smoke(packed(checkpoint(name), tmp_path / "out", target), "--reference", other)
    assert done.code == 3
    assert done.findings[0]["rule"] == "reference-shape"


# --- by how much more factors let weights differ ----------------------------------------------------------------------


def test_unevenness() -> None:
    real = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    factors = torch.ones(256)
    assert unevenness(column_factors(real, real), 128) == pytest.approx(1)
    assert unevenness(column_factors(real, real / 7), 128) == pytest.approx(1), "one factor for all changes nothing"
    factors[:128] = torch.tensor([1.0, -3.0]).repeat(64)
    assert torch.allclose(column_factors(real, real / factors).float(), factors.abs())
    assert unevenness(factors, 128) == pytest.approx(5**0.5), "rms of 1 and 3, over 1"
    assert unevenness(factors, 128, folded=True) == pytest.approx((9 / 5) ** 0.5), "1 over the rms of 1 and 1/3"
    gone = real.clone()
    gone[:, 5] = 0
    assert unevenness(column_factors(real, gone), 128) == unevenness(column_factors(gone, real), 128) == 1


def test_uneven_factors_widen_the_bound_as_far_as_the_error_grows() -> None:
    """By Monte Carlo: GEMM2 alone, one group of 128 columns."""
    generator = torch.Generator().manual_seed(0)
    real, x = torch.randn(512, 128, generator=generator), torch.randn(256, 128, generator=generator)
    for spread in (0.5, 1.0, 1.5):
        factors = ((torch.rand(128, generator=generator) * 2 - 1) * spread).exp2()
        scaled = real / factors
        step = scaled.abs().amax(1, keepdim=True) / 7
        stored = (scaled / step).round() * step
        error = float((x @ (stored * factors - real).T).norm() / (x @ real.T).norm())
        more = unevenness(column_factors(real, stored), 128)
        assert 0.4 * more * INT4_NOISE < error < 1.05 * more * INT4_NOISE
        error = float((x @ (stored - scaled).T).norm() / (x @ scaled.T).norm())
        more = unevenness(factors, 128, folded=True)
        assert 0.4 * more * INT4_NOISE < error < 1.05 * more * INT4_NOISE


def test_bounds_with_uneven_factors() -> None:
    plain = quantisation_error("silu", weights=Format.INT4, activations="16-bit")
    assert plain == pytest.approx(3**0.5 * INT4_NOISE)
    more = quantisation_error("silu", weights=Format.INT4, activations="16-bit", uneven=(1.0, 2.0))
    assert more == pytest.approx(6**0.5 * INT4_NOISE)
    wide = reference_tolerances("silu", weights=Format.INT4, activations="16-bit", uneven=(1.0, 2.0))
    assert wide.rel_l2 > reference_tolerances("silu", weights=Format.INT4, activations="16-bit").rel_l2
