"""scripts/eval_tinymoe.py on int4 checkpoints, and on what `convert --target compressed-tensors` writes."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import damage
import eval_tinymoe
import pytest
import torch
from eval_tinymoe import BF16, LABELS, MISREAD, ROWS, SCALE_BITS, W4A16, Layer, Model, forward, load, losses
from runner import run, strict_json
from torch import Tensor

Fetch = Callable[[str], Path]
TEXT = eval_tinymoe.DEFAULT_TEXT.read_bytes()[:2048]
TOLERANCE = 0.001  # nats per byte; roundings to BF16 cost below 0.0002, a router that is not compensated 0.0026
TINY = ("tinymoe-int4awq", "tinymoe-w4a8awq")
SMALL = "qwen3moe-w4a8awq"
W4A4 = [row.key for row in eval_tinymoe.SEMANTICS]


@pytest.fixture(scope="module")
def converted(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> Fetch:
    """``converted(name)``: what convert makes of a shipped checkpoint for compressed-tensors, with fold. Read only."""
    done: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("compressed") / name
            result = run(
                *("convert", checkpoint(name), done[name], "--target", "compressed-tensors"),
                *("--pre-quant-scale", "fold", "--no-smoke", "-q"),
            )
            assert result.code == 0, result.stderr
        return done[name]

    return path_of


def with_layers(model: Model, of: Model, change: Callable[[Layer, Layer], Layer]) -> Model:
    """`model` with every layer changed, given the same layer of another."""
    return replace(model, layers=tuple(change(a, b) for a, b in zip(model.layers, of.layers, strict=True)))


# --- what folding does to the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_folding_keeps_the_loss(checkpoint: Fetch, converted: Fetch, name: str) -> None:
    source, out = load(checkpoint(name)), load(converted(name))
    before, after = losses(source, TEXT), losses(out, TEXT)
    assert abs(after[W4A16] - before[W4A16]) < TOLERANCE
    assert before[W4A16] < 1.4, "the trained model is read right"
    quantised = {"w4a8-layer-max", "w4a8-own"} if name == "tinymoe-w4a8awq" else set()
    assert set(before) == {W4A16} | quantised
    assert set(after) == {W4A16, SCALE_BITS}, "weight-only, BF16 group scales"
    assert all(0 < abs(before[key] - before[W4A16]) < 0.01 for key in quantised)
    assert len({before[key] for key in quantised}) == len(quantised)
    assert after[SCALE_BITS] > after[W4A16] + 0.1
    wrong = with_layers(replace(out, misread={}), source, lambda layer, old: replace(layer, router=old.router))
    assert losses(wrong, TEXT)[W4A16] > before[W4A16] + 2 * TOLERANCE, "this test would see a wrong router"


PACKED = [
    *(("tinymoe-int4awq", target) for target in ("vllm-marlin", "moe-wna16")),
    *(("tinymoe-w4a8awq", target) for target in ("vllm-marlin", "moe-wna16", "flashinfer-sm90-w4a8", "sglang-w4afp8")),
]


@pytest.mark.parametrize(("name", "target"), PACKED)
def test_packed_outputs_keep_the_loss(checkpoint: Fetch, tmp_path: Path, name: str, target: str) -> None:
    """Read from the written bytes by each kernel's index formulas; W4A8 with the input scales as packed."""
    packing = ("--target", target, "--pre-quant-scale", "fold", "--ep", "2", "--no-smoke", "-q")
    result = run("convert", checkpoint(name), tmp_path / "out", *packing)
    assert result.code == 0, result.stderr
    model = load(tmp_path / "out")
    before, after = losses(load(checkpoint(name)), TEXT), losses(model, TEXT)
    kernel = "w4a8-layer-max" if name == "tinymoe-w4a8awq" else W4A16
    assert abs(after[W4A16] - before[W4A16]) < TOLERANCE
    # E4M3 codes near a tie go the other way behind a rounded norm; over the whole text that is 0.0003.
    assert abs(after[kernel] - before[kernel]) < 2 * TOLERANCE
    kept = target == "flashinfer-sm90-w4a8"
    assert all((layer.w13.smoothing[0] is not None) is kept for layer in model.layers)


FOLDED = [*TINY, "qwen3moe-int4awq", "qwen3moe-w4a8awq", "qwen3moe-nvfp4-awqlite"]


def apart(reference: Tensor, logits: Tensor) -> float:
    """The median over the tokens of the relative error: a token whose routing rounding tips over may be far off."""
    return float(((reference - logits).norm(dim=-1) / reference.norm(dim=-1)).median())


@pytest.mark.parametrize("name", FOLDED)
@torch.inference_mode()
def test_folding_keeps_the_logits_and_a_wrong_fold_does_not(checkpoint: Fetch, converted: Fetch, name: str) -> None:
    """Negative controls: the fold undone in one place each, in memory, is told from the right one."""
    source, out = load(checkpoint(name)), load(converted(name))
    tokens = torch.tensor(list(TEXT[:512]))[None]
    reference = forward(source, tokens)

    def with_source_norm(layer: Layer, old: Layer) -> Layer:
        return replace(layer, norms={**layer.norms, "mlp": old.norms["mlp"]})

    wrong = {
        "router not compensated": lambda layer, old: replace(layer, router=old.router),
        "norm not folded": with_source_norm,
    }
    if "int4" in name or "w4a8" in name:
        wrong["rows of up not scaled"] = lambda layer, old: replace(
            layer, w13=replace(layer.w13, weights=old.w13.weights)
        )
    good = apart(reference, forward(out, tokens))
    assert 0 < good < 0.012, "a few roundings to BF16 of 2^-9 each"
    for what, change in wrong.items():
        assert apart(reference, forward(with_layers(out, source, change), tokens)) > 3 * good, what


# --- group scales in 16 bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_group_scales(checkpoint: Fetch, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = damage.damaged(checkpoint("tinymoe-int4awq"), tmp_path / "cast", damage.cast(dtype, "weight_scale"))
    before = losses(load(checkpoint("tinymoe-int4awq")), TEXT)
    after = losses(load(folder), TEXT)
    assert abs(after[W4A16] - before[W4A16]) < TOLERANCE
    if dtype == torch.float16:
        assert not after[SCALE_BITS] < after[W4A16] + 2, "collapsed, or not finite"
    else:
        assert not after[SCALE_BITS] < after[W4A16] + 0.1, "two BF16 read as one F32 are about the second"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_as_f32(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0.01, 0.02], [0.03, 0.04], [0.05, 0.06]]).to(dtype)
    raw = b"".join(struct.pack("<H", one & 0xFFFF) for one in scale.view(torch.int16).flatten().tolist())
    read = struct.unpack("<3f", raw)
    assert eval_tinymoe.bits_as_f32(scale).flatten().tolist() == [*read, *read]
    with pytest.raises(ValueError, match="can't be read as F32"):
        eval_tinymoe.bits_as_f32(scale[:1, :1])


# --- the codecs ------------------------------------------------------------------------------------------------------


def test_int4_of_both_packings() -> None:
    rows, columns, group = 6, 32, 16
    rng = random.Random(0)
    codes = [[rng.randrange(-8, 8) for _ in range(columns)] for _ in range(rows)]
    scale = torch.rand(rows, columns // group) + 0.5
    expected = [
        [codes[r][c] * torch.tensor(scale[r, c // group].item()).item() for c in range(columns)] for r in range(rows)
    ]
    modelopt = [
        [(codes[2 * r][c] & 15) | (codes[2 * r + 1][c] & 15) << 4 for c in range(columns)] for r in range(rows // 2)
    ]
    words = [[sum((row[8 * w + i] + 8) << 4 * i for i in range(8)) for w in range(columns // 8)] for row in codes]
    packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    wanted = torch.tensor(expected, dtype=torch.float32)
    assert torch.equal(eval_tinymoe.dequantize_int4(torch.tensor(modelopt, dtype=torch.uint8), scale, None), wanted)
    assert torch.equal(eval_tinymoe.dequantize_int4(packed, scale, [rows, columns]), wanted)
    with pytest.raises(ValueError, match="weight_shape"):
        eval_tinymoe.dequantize_int4(packed, scale, [columns, rows])
    with pytest.raises(ValueError, match="weight_scale"):
        eval_tinymoe.dequantize_int4(packed, scale.T, [rows, columns])


def test_e4m3_activations() -> None:
    """Quantised with 0.5: codes of 2·x, 448 at most, three bits of mantissa; dequantised with 0.25."""
    x = torch.tensor([0.0, 1.0, -1.0, 8.5 / 2, 224.0, 1e6, -1e6])
    found = eval_tinymoe.quantize_dequantize_e4m3(x, 0.5, 0.25)
    assert found.tolist() == [0.0, 0.5, -0.5, 8 / 4, 112.0, 112.0, -112.0]


def test_input_scales_of_w4a8_matter(checkpoint: Fetch, tmp_path: Path) -> None:
    """Scales too small clip; without them there are no W4A8 rows."""
    source = checkpoint("tinymoe-w4a8awq")
    clipped = damage.damaged(source, tmp_path / "clipped", damage.multiply(".*", 1 / 16, param="input_scale"))
    found = losses(load(clipped), TEXT[:1024])
    assert found["w4a8-own"] > found[W4A16] + 0.05
    without = damage.damaged(
        source, tmp_path / "without", damage.drop(r".*layers\.3.*experts\.7\.up_proj\.input_scale")
    )
    assert set(losses(load(without), TEXT[:512])) == {W4A16, "w4a8-layer-max"}


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def test_nvfp4_in_compressed_tensors_has_the_rows_of_modelopt(
    checkpoint: Fetch, converted: Fetch, tmp_path: Path
) -> None:
    name = "tinymoe-nvfp4-perexpert"
    assert run("convert", checkpoint(name), tmp_path / "hf", "--no-smoke", "-q").code == 0
    ours, theirs = (losses(load(path), TEXT[:1024]) for path in (tmp_path / "hf", converted(name)))
    assert list(ours) == list(theirs) == [W4A16, *W4A4]
    assert all(abs(ours[key] - theirs[key]) < 1e-3 for key in ours)
    assert len({theirs[key] for key in W4A4}) == 1, "one input scale per layer leaves nothing to choose"


# --- refused ---------------------------------------------------------------------------------------------------------


def test_gate_and_up_smoothed_apart(checkpoint: Fetch, tmp_path: Path) -> None:
    apart = damage.multiply(r".*layers\.1\.mlp\.experts\.2\.up_proj", 2, param="pre_quant_scale")
    with pytest.raises(ValueError, match=r"experts\.2: gate and up have different pre_quant_scale"):
        load(damage.damaged(checkpoint(SMALL), tmp_path / "apart", apart))


def test_experts_of_two_forms(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: damage.Editable) -> None:
        for name in ck.names(r".*layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
            ck.tensors[name] = torch.zeros(128, 256)

    with pytest.raises(ValueError, match="its experts are int4 and unquantised"):
        load(damage.damaged(checkpoint(SMALL), tmp_path / "two", change))


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def window(tmp_path: Path) -> Path:
    path = tmp_path / "text.bin"
    path.write_bytes(TEXT[:512])
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert eval_tinymoe.main([str(one) for one in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_one_directory(checkpoint: Fetch, window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, checkpoint(SMALL), "--text", window).splitlines()
    assert lines[0] == f"{checkpoint(SMALL)}: loss in nats per byte, 512 bytes"
    cells = dict(line.split("  ", 1) for line in lines[1:])
    assert list(cells) == [LABELS[key] for key in ROWS["int4"]]
    assert cells[LABELS[BF16]].strip() == "not given (--reference)"
    assert cells[LABELS[SCALE_BITS]].strip() == "not applicable: F32 group scales"
    found = losses(load(checkpoint(SMALL)), TEXT[:512])
    assert [float(cells[LABELS[key]]) for key in found] == [round(value, 4) for value in found.values()]


def test_one_directory_of_nvfp4(checkpoint: Fetch, window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, checkpoint("qwen3moe-nvfp4-perexpert"), "--text", window).splitlines()
    labels = [line.split("  ")[0] for line in lines[1:]]
    assert labels == [*(LABELS[key] for key in ROWS["NVFP4"]), "spread of the five W4A4 rows"]
    assert lines[-2].endswith("not applicable: equal halves")
    assert len({line.rindex("  ") for line in lines[3:8]}) == 1


def test_several_directories_are_columns(
    checkpoint: Fetch, converted: Fetch, window: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SRC next to OUT next to NVFP4: the rows of all, "-" where one has none."""
    folders = [checkpoint(SMALL), checkpoint("qwen3moe-int4awq"), checkpoint("qwen3moe-nvfp4-perexpert")]
    lines = printed(capsys, *folders, "--text", window).splitlines()
    assert lines[0] == "loss in nats per byte, 512 bytes"
    assert lines[1].split() == [folder.name for folder in folders]
    starts = [lines[1].index(folder.name) for folder in folders]
    cells = {
        line[: starts[0]].strip(): [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines[2:]
    }
    assert list(cells) == [*LABELS.values(), "spread of the five W4A4 rows"]
    assert cells[LABELS[BF16]] == cells[LABELS[MISREAD]] == ["-"] * 3
    for folder, column in zip(folders, zip(*cells.values(), strict=True), strict=True):
        found = losses(load(folder), TEXT[:512])
        shown = dict(zip(cells, column, strict=True))
        assert {key for key, label in LABELS.items() if shown[label] != "-"} == set(found)
        assert all(shown[LABELS[key]] == f"{value:.4f}" for key, value in found.items())
    assert cells["spread of the five W4A4 rows"][:2] == ["-", "-"]
    same_name = [checkpoint(SMALL), converted(SMALL)]
    heading = printed(capsys, *same_name, "--text", window).splitlines()[1]
    assert heading.split() == [str(folder) for folder in same_name], "names that are the same would tell nothing"


def test_json_of_one_and_of_several(
    checkpoint: Fetch, converted: Fetch, window: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = strict_json(printed(capsys, checkpoint(SMALL), "--text", window, "--json"))
    assert list(alone) == ["source", "bytes", "loss", "spread"]
    assert list(alone["loss"]) == list(LABELS) and alone["bytes"] == 512 and alone["spread"] is None
    both = json.loads(printed(capsys, checkpoint(SMALL), converted(SMALL), "--text", window, "--json"))
    assert both[0] == alone
    assert both[1]["source"] == str(converted(SMALL))
    assert both[1]["loss"][SCALE_BITS] is not None and both[1]["loss"]["w4a8-own"] is None


def test_a_loss_that_is_not_finite_is_shown(
    checkpoint: Fetch, window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two F16 of 65504 are one F32 of 2.7e36."""

    def change(ck: damage.Editable) -> None:
        for name in ck.scales("weight_scale"):
            fill = 65504.0 if ".v_proj." in name else 0.01
            ck.tensors[name] = torch.full_like(ck.tensors[name], fill, dtype=torch.float16)

    folder = damage.damaged(checkpoint(SMALL), tmp_path / "huge", change)
    found = losses(load(folder), TEXT[:512])
    assert math.isfinite(found[W4A16]) and not math.isfinite(found[SCALE_BITS])
    text = printed(capsys, folder, "--text", window)
    assert f"{LABELS[SCALE_BITS]}  " in text and text.rstrip().endswith(("nan", "inf"))
    assert strict_json(printed(capsys, folder, "--text", window, "--json"))["loss"][SCALE_BITS] in ("nan", "inf")


def test_the_reference_is_in_every_column(
    checkpoint: Fetch, window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dequantised weights themselves, saved as an unquantised model, have the loss of W4A16."""

    def plain(ck: damage.Editable) -> None:
        for name in [name for name, tensor in ck.tensors.items() if tensor.dtype == torch.uint8]:
            module = name.removesuffix(".weight")
            weight = eval_tinymoe.dequantize_int4(ck.tensors[name], ck.tensors[f"{module}.weight_scale"], None)
            ck.tensors[name] = weight * ck.tensors.get(f"{module}.pre_quant_scale", torch.ones(())).float()
        ck.remove([name for name in ck.tensors if name.endswith(("_scale", "_scale_2"))])

    reference = damage.damaged(checkpoint(SMALL), tmp_path / "plain", plain)
    sources = [checkpoint(SMALL), checkpoint("qwen3moe-int4awq")]
    columns = json.loads(printed(capsys, *sources, "--reference", reference, "--text", window, "--json"))
    assert columns[0]["loss"][BF16] == columns[1]["loss"][BF16]
    assert columns[0]["loss"][BF16] == pytest.approx(columns[0]["loss"][W4A16], abs=1e-4)
    assert eval_tinymoe.main([str(reference), "--text", str(window)]) == 3
    assert "its experts are not quantised" in capsys.readouterr().err


def test_exit_codes_name_the_directory(
    checkpoint: Fetch, window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = str(checkpoint(SMALL))
    dense = str(checkpoint("qwen3-dense-nvfp4"))
    assert eval_tinymoe.main([good, dense, "--text", str(window)]) == 3
    assert dense in capsys.readouterr().err
    missing = str(tmp_path / "missing")
    assert eval_tinymoe.main([good, missing, "--text", str(window)]) == 4
    out, err = capsys.readouterr()
    assert out == "" and missing in err
