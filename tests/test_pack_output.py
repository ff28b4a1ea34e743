"""What a packed output holds: names, dtypes, shapes, scalars, files, configs, manifest; and how it was made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pack_checks as packs
import pytest
import torch
from damage import Editable, damaged
from pack_checks import Logical, Packed, Sizes, up
from runner import run, snapshot
from safetensors import safe_open
from safetensors.torch import save_file

from nvfp4prep import convert
from nvfp4prep.checkpoint import read_checkpoint

LIST = Callable[[str], Path]
E4M3 = "F8_E4M3"
VLLM_BACKENDS = {
    "flashinfer-trtllm": "trtllm_fp4_block_scale_moe",
    "flashinfer-cutlass": "cutlass_fused_moe",
    "flashinfer-cutedsl": "CuteDslMoEWrapper",
    "vllm-cutlass": "cutlass_fp4_moe_mm",
    "vllm-marlin": "moe_wna16_marlin_gemm",
}

Spec = tuple[str, tuple[int, ...]]


def stored_specs(folder: Path) -> dict[str, Spec]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def expected_specs(sizes: Sizes, experts: int, biased: bool, clamped: bool, dtype: str = "bf16") -> dict[str, Spec]:
    """A layer's tensors on one rank, names below `<moe>.experts.`, from the issue and SGLang's sources."""
    layout, engine = sizes.layout, sizes.engine
    rows, hidden, inner = sizes.w13_rows, sizes.padded_hidden, sizes.padded
    e, vec = experts, ("F32", (experts,))
    params: dict[str, Spec] = {}
    own: dict[str, Spec] = {}
    scale = "weight_scale"
    if layout == "vllm-marlin":
        kind = "F32" if engine == "vllm" else {"bf16": "BF16", "fp16": "F16"}[dtype]
        params |= {
            "w13_weight": ("I32", (e, hidden // 16, 2 * rows)),
            "w13_weight_scale": (E4M3, (e, hidden // 16, rows)),
            "w2_weight": ("I32", (e, inner // 16, 2 * hidden)),
            "w2_weight_scale": (E4M3, (e, inner // 16, hidden)),
            "w13_weight_scale_2": (kind, (e,)),
            "w2_weight_scale_2": (kind, (e,)),
        }
        own |= dict.fromkeys(("g1_alphas", "g2_alphas", "w13_scale_factor", "w2_scale_factor"), vec)
    else:
        swizzled = layout != "flashinfer-trtllm"
        if engine == "sglang" and swizzled:
            scale = "blockscale_swizzled"
        params |= {
            "w13_weight": ("U8", (e, rows, hidden // 2)),
            "w2_weight": ("U8", (e, hidden, inner // 2)),
            f"w13_{scale}": (E4M3, (e, up(rows, 128) if swizzled else rows, up(hidden // 16, 4))),
            f"w2_{scale}": (E4M3, (e, up(hidden, 128) if swizzled else hidden, up(inner // 16, 4))),
        }
        own |= dict.fromkeys(("g1_alphas", "g2_alphas", "w13_input_scale_quant", "w2_input_scale_quant"), vec)
        vllm_names = ("w13_weight_scale_2", "w13_input_scale", "w2_weight_scale_2", "w2_input_scale")
        one: dict[str, Spec] = dict.fromkeys(("w13_input_scale_quant", "w2_input_scale_quant"), ("F32", ()))
        if engine == "vllm":
            params |= dict.fromkeys(vllm_names, vec)
        elif layout == "flashinfer-cutlass":
            params |= one | dict.fromkeys(("g1_alphas", "g2_alphas"), vec)
        elif layout == "flashinfer-cutedsl":
            params |= dict.fromkeys(("g1_alphas", "g2_alphas", "w13_input_scale_quant", "w2_input_scale_quant"), vec)
            params |= {
                "w13_weight_scale_2": ("F32", (e, 2) if sizes.gated else (e,)),
                "w2_weight_scale_2": vec,
            }
        else:
            params |= one
        if layout == "flashinfer-trtllm":
            own |= dict.fromkeys(("g1_alphas_up", "g1_scale_c"), vec)
            names = ("g1_scale_c",) if engine == "vllm" else ("g1_alphas", "g1_alphas_up", "g1_scale_c", "g2_alphas")
            params |= dict.fromkeys(names, vec)
    if clamped:
        names = ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta")
        if layout != "flashinfer-trtllm":
            names = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        else:
            params |= dict.fromkeys(names, vec)
        own |= dict.fromkeys(names, vec)
    if biased:
        prefix = {"flashinfer-trtllm": "gemm{}_bias", "flashinfer-cutlass": "fc{}_expert_biases", "vllm-marlin": ""}
        first, second = (prefix[layout].format(n) or f"w{'13' if n == 1 else '2'}_bias" for n in (1, 2))
        own |= {first: ("F32", (e, rows)), second: ("F32", (e, hidden))}
    halves = ("gate", "up", "down") if sizes.gated else ("up", "down")
    for half in halves:
        own |= {f"{half}_weight_scale_2": vec, f"{half}_input_scale": vec}
    own |= {"raw_input_scale": vec, "raw_w2_input_scale": vec}
    middle = "routed_experts." if engine == "vllm" else ""
    return {middle + name: spec for name, spec in params.items()} | {
        "nvfp4prep." + name: spec for name, spec in own.items()
    }


def plain_names(source: Path, moes: set[str]) -> set[str]:
    """Names of the source that belong to no packed expert."""
    names = packs.tensors_of(source)
    return {name for name in names if not any(name.startswith(f"{moe}.experts.") for moe in moes)}


@pytest.mark.parametrize(("layout", "engine"), packs.PAIRS)
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("qwen3moe-nvfp4-perexpert", 2, 2),
        ("qwen3moe-nvfp4-i96", 1, 1),
        ("nemotronh-nvfp4", 1, 4),
        ("dsv3-nvfp4", 4, 1),
        ("gptoss-nvfp4", 2, 1),
    ],
)
def test_names_dtypes_shapes_and_files(
    name: str, tp: int, ep: int, layout: str, engine: str, checkpoint: LIST, tmp_path: Path
) -> None:
    """A rank's files hold just its experts' tensors, common/ the rest once, and a flat output both."""
    if name == "gptoss-nvfp4" and layout in ("flashinfer-cutedsl", "vllm-cutlass"):
        return  # refused: test_pack_roundtrip
    source = checkpoint(name)
    out = packs.pack(source, tmp_path / "out", layout, engine=engine, tp=tp, ep=ep)
    hf = packs.pack(source, tmp_path / "hf", "hf")
    logical = Logical.read(hf)
    packed = Packed(out, layout, engine, tp, ep)
    gptoss = name == "gptoss-nvfp4"
    moes = set(logical.names)
    mine = {
        f"{moe}.experts.{tensor}": spec
        for moe in moes
        for tensor, spec in expected_specs(packed.sizes(logical, moe), logical.count(moe) // ep, gptoss, gptoss).items()
    }
    other = {
        tensor: spec
        for tensor, spec in stored_specs(hf).items()
        if not any(tensor.startswith(f"{moe}.experts.") for moe in moes)
    }
    assert set(other) == plain_names(source, moes) and other
    folders = {str(path.parent.relative_to(out)) for path in out.rglob("*.safetensors")}
    if tp == ep == 1:
        assert folders == {"."}
        assert stored_specs(out) == {**mine, **other}
        common = packs.tensors_of(out)
    else:
        ranks = {f"rank-{t:02d}-of-{tp:02d}_{e:02d}-of-{ep:02d}" for t in range(tp) for e in range(ep)}
        assert folders == ranks | {"common"}
        for folder in sorted(ranks):
            assert stored_specs(out / folder) == mine, folder
            assert sorted(path.name for path in (out / folder).iterdir()) == [
                "model.safetensors",
                "model.safetensors.index.json",
            ]
        common = packs.tensors_of(out / "common")
        assert stored_specs(out / "common") == other
    plain = packs.tensors_of(hf)
    for tensor in other:
        assert packs.same_bytes(common[tensor], plain[tensor]), tensor
    for folder in folders:
        assert (out / folder / packs.INDEX).is_file()
        index = packs.read_json(out / folder / packs.INDEX)
        total = sum(tensor.nbytes for tensor in packs.tensors_of(out / folder).values())
        assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("layout", packs.LAYOUTS)
def test_load_order(layout: str, checkpoint: LIST, tmp_path: Path) -> None:
    """Layer after layer, each layer's stacked tensors together and in one order; then the small ones."""
    source = checkpoint("tinymoe-nvfp4-perexpert")
    out = packs.pack(source, tmp_path / "out", layout, tp=2, ep=2, max_shard_bytes=300_000)
    for folder in sorted(out.glob("rank-*")):
        offsets = []
        for path in sorted(folder.glob("*.safetensors")):
            raw = path.read_bytes()
            table = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            for tensor, entry in table.items():
                if tensor != "__metadata__":
                    offsets.append((path.name, entry["data_offsets"], tensor, entry["shape"]))
        offsets.sort()
        ends: dict[str, int] = {}
        for file, (start, end), tensor, _ in offsets:
            assert start == ends.get(file, 0), tensor  # no holes
            ends[file] = end
        big = [tensor for _, _, tensor, shape in offsets if len(shape) == 3]
        assert [tensor for *_, tensor, _ in offsets][: len(big)] == big
        wanted = [
            f"model.layers.{layer}.mlp.experts.routed_experts.{part}"
            for layer in range(4)
            for part in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        ]
        assert big == wanted
        assert len(ends) > 4


# --- scalars ---


def test_maxima_run_over_all_experts(checkpoint: LIST, tmp_path: Path) -> None:
    """Every EP rank has the layer's a1 and a2; raw values are those stored, of its own experts in order."""
    source, moe = checkpoint("qwen3moe-nvfp4-perexpert"), "model.layers.1.mlp"
    stored = Logical.read(source)

    def column(kind: str, param: str) -> list[float]:
        return [stored.scale(moe, expert, kind, param) for expert in range(8)]

    w13 = np.maximum(column("gate", "input_scale"), column("up", "input_scale")).astype(np.float32)
    w2 = np.array(column("down", "input_scale"), dtype=np.float32)
    assert len(set(w13.tolist())) > 1 and len(set(w2.tolist())) > 1
    s1, s2 = (np.array(column(kind, "weight_scale_2"), dtype=np.float32) for kind in ("gate", "down"))
    assert column("gate", "weight_scale_2") == column("up", "weight_scale_2")
    for layout, engine in packs.PAIRS:
        packed = Packed(
            packs.pack(source, tmp_path / f"{layout}-{engine}", layout, engine=engine, tp=2, ep=4),
            layout,
            engine,
            2,
            4,
        )
        for (_, ep), rank in packed.ranks.items():
            own = slice(2 * ep, 2 * ep + 2)
            got = {name: rank.own(moe, name).numpy() for name in ("g1_alphas", "g2_alphas", "raw_input_scale")}
            assert (got["raw_input_scale"] == w13[own]).all()
            assert (rank.own(moe, "raw_w2_input_scale").numpy() == w2[own]).all()
            if layout == "vllm-marlin":
                factors = [rank.own(moe, f"{gemm}_scale_factor").numpy() for gemm in ("w13", "w2")]
                values = [s1[own] * np.float32(2.0**119) / factors[0], s2[own] * np.float32(2.0**119) / factors[1]]
                if engine == "vllm":
                    assert (got["g1_alphas"] == values[0]).all() and (got["g2_alphas"] == values[1]).all()
                continue
            assert (got["g1_alphas"] == w13.max() * s1[own]).all(), (layout, engine, ep)
            assert (got["g2_alphas"] == w2.max() * s2[own]).all(), (layout, engine, ep)
            assert (rank.own(moe, "w13_input_scale_quant").numpy() == 1 / w13.max()).all()
            assert (rank.own(moe, "w2_input_scale_quant").numpy() == 1 / w2.max()).all()
            if layout == "flashinfer-trtllm":
                assert (rank.own(moe, "g1_scale_c").numpy() == w13.max() * s1[own] * (1 / w2.max())).all()


def test_keep_is_for_vllm_cutlass(checkpoint: LIST, tmp_path: Path) -> None:
    source, moe = checkpoint("qwen3moe-nvfp4-perexpert"), "model.layers.0.mlp"
    stored = Logical.read(source)
    out = packs.pack(source, tmp_path / "out", "vllm-cutlass", input_scale="keep", ep=2)
    packed = Packed(out, "vllm-cutlass", "vllm", 1, 2)
    for expert in range(8):
        rank, local = packed.ranks[0, expert // 4], expert % 4
        a1 = max(stored.scale(moe, expert, kind, "input_scale") for kind in ("gate", "up"))
        a2 = stored.scale(moe, expert, "down", "input_scale")
        assert float(rank.engine(moe, "w13_input_scale")[local]) == a1
        assert float(rank.engine(moe, "w2_input_scale")[local]) == a2
        alpha = np.float32(a1) * np.float32(stored.scale(moe, expert, "up"))
        assert float(rank.own(moe, "g1_alphas")[local]) == alpha
        assert float(rank.own(moe, "w2_input_scale_quant")[local]) == np.float32(1) / np.float32(a2)
    assert len(set(packed.ranks[0, 0].own(moe, "w13_input_scale_quant").tolist())) > 1
    for target in ("flashinfer-trtllm", "flashinfer-cutlass", "flashinfer-cutedsl"):
        done = run("convert", source, tmp_path / target, "--target", target, "--input-scale", "keep")
        assert done.code == 3 and "--input-scale keep is for vllm-cutlass" in done.stderr
        assert not (tmp_path / target).exists()


def test_split_is_for_two_alphas_and_no_clamp(checkpoint: LIST, tmp_path: Path) -> None:
    source = checkpoint("qwen3moe-nvfp4-perexpert")
    for target in packs.LAYOUTS[1:]:
        done = run("convert", source, tmp_path / "out", "--target", target, "--w13-scale", "split")
        assert done.code == 3 and f"--w13-scale split: {target} takes one alpha for both" in done.stderr
    clamped = run(
        "convert", checkpoint("gptoss-nvfp4"), tmp_path / "out", "--target", "flashinfer-trtllm", "--w13-scale", "split"
    )
    assert clamped.code == 3 and "clamps raw accumulators of both halves alike" in clamped.stderr
    fine = run("convert", source, tmp_path / "out", "--target", "flashinfer-trtllm", "--w13-scale", "split", "-q")
    assert fine.code == 0


# --- configs and manifest ---


@pytest.mark.parametrize(("layout", "engine"), packs.PAIRS)
def test_config_and_manifest(layout: str, engine: str, checkpoint: LIST, tmp_path: Path) -> None:
    source, out = checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "out"
    done = run("convert", source, out, "--target", layout, "--engine", engine, "--tp", 2, "--ep", 2, "--json")
    assert done.code == 0
    version = {"vllm": "0.33.0", "sglang": "0.5.23"}[engine]
    config, before = packs.read_json(out / "config.json"), packs.read_json(source / "config.json")
    facts = {
        "layout": f"{layout}/{engine}/1",
        "engine": engine,
        "engine_version": version,
        "tp": 2,
        "ep": 2,
        "activation_dtype": "bf16",
    }
    assert config.pop("quantization_config") == {"quant_method": "nvfp4prep", **facts}
    before.pop("quantization_config")
    assert config == before
    assert not list(out.rglob("hf_quant_config.json"))
    manifest = packs.read_json(out / packs.MANIFEST)
    assert done.json["manifest"] == manifest
    assert manifest["target"] == layout == manifest["runs"][-1]["options"]["target"]
    sizes = Sizes(layout, engine, 256, 96, True, 2)
    shares = [end - start for start, end in (sizes.share(0), sizes.share(1))]
    layer = {
        "experts": 8,
        "hidden": 256,
        "intermediate": 96,
        "gated": True,
        "padded_hidden": 256,
        "intermediate_per_rank": shares,
        "padded_intermediate_per_rank": 64,
    }
    kernel = VLLM_BACKENDS[layout]
    layers = {f"model.layers.{n}.mlp": layer for n in (0, 1)}
    assert manifest["packed"] == {**facts, "kernel": kernel, "layers": layers}
    files = {str(path.relative_to(out)): path.stat().st_size for path in out.rglob("*.safetensors")}
    assert {file: entry["bytes"] for file, entry in manifest["outputs"].items()} == files
    assert len({entry["digest"] for entry in manifest["outputs"].values()}) == 5
    for command in (("convert", out, tmp_path / "again"), ("inspect", out)):
        refused = run(*command, "--json")
        assert refused.code == 3
        (finding,) = refused.findings
        assert finding["rule"] == "already-packed"
        assert f"{layout}/{engine}/1 for {engine}" in finding["message"]
    assert not (tmp_path / "again").exists()


def test_padded_hidden_in_the_manifest(checkpoint: LIST, tmp_path: Path) -> None:
    """nemotron-h: not gated, padded to 128 per rank."""
    out = packs.pack(checkpoint("nemotronh-nvfp4"), tmp_path / "out", "flashinfer-cutedsl", tp=2)
    (layer, *_) = packs.read_json(out / packs.MANIFEST)["packed"]["layers"].values()
    assert layer["gated"] is False
    assert layer["intermediate_per_rank"] == [64, 64] and layer["padded_intermediate_per_rank"] == 128


# --- several targets, auto, the list ---


@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-perexpert", "llama4-nvfp4"])
def test_several_targets_equal_single_runs(name: str, checkpoint: LIST, tmp_path: Path) -> None:
    """Byte for byte, manifests too."""
    source, names = checkpoint(name), ("flashinfer-trtllm", "hf", "vllm-marlin", "flashinfer-cutedsl")
    asked = [word for target in (*names, "hf") for word in ("--target", target)]
    done = run("convert", source, tmp_path / "all", *asked, "--tp", 2, "--ep", 2)
    assert done.code == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == sorted(names)
    for target in names:
        single = tmp_path / target
        ranks = () if target == "hf" else ("--tp", 2, "--ep", 2)
        assert run("convert", source, single, "--target", target, *ranks, "-q").code == 0
        assert snapshot(tmp_path / "all" / target) == snapshot(single)
    listed = run("convert", source, tmp_path / "json", "--target", "hf", "--target", "vllm-marlin", "--json").json
    assert [manifest["target"] for manifest in listed["manifests"]] == ["hf", "vllm-marlin"]
    assert len(listed["targets"]) == 2


def test_one_refused_target_writes_none(checkpoint: LIST, tmp_path: Path) -> None:
    source = checkpoint("gptoss-nvfp4")
    done = run("convert", source, tmp_path / "out", "--target", "flashinfer-trtllm", "--target", "vllm-cutlass")
    assert done.code == 3 and "vllm-cutlass/vllm" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpu", "target"),
    [
        ("b200", "flashinfer-trtllm"),
        ("b300", "flashinfer-trtllm"),
        ("rtx50", "flashinfer-cutlass"),
        ("h200", "vllm-marlin"),
        ("h100", "vllm-marlin"),
        ("a100", "vllm-marlin"),
    ],
)
def test_auto(gpu: str, target: str, checkpoint: LIST, tmp_path: Path) -> None:
    source = checkpoint("qwen3moe-nvfp4-i96")
    done = run("convert", source, tmp_path / "out", "--target", "auto", "--gpu", gpu, "-q")
    assert done.code == 0 and f"--target auto: {target}" in done.stderr
    assert packs.read_json(tmp_path / "out" / packs.MANIFEST)["target"] == target
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        (None, "hf"),
        ((7, 0), "hf"),
        ((7, 5), "vllm-marlin"),
        ((8, 9), "vllm-marlin"),
        ((9, 0), "vllm-marlin"),
        ((10, 0), "flashinfer-trtllm"),
        ((10, 3), "flashinfer-trtllm"),
        ((12, 0), "flashinfer-cutlass"),
        ((12, 1), "flashinfer-cutlass"),
    ],
)
def test_auto_without_gpu_option(
    capability: tuple[int, int] | None,
    target: str,
    checkpoint: LIST,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU that is present decides."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    done = run(
        "convert", checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "out", "--target", "auto", "--no-smoke", "--json"
    )
    assert done.code == 0 and done.json["manifest"]["target"] == target


@pytest.mark.parametrize("gpu", [(), ("--gpu", "b200"), ("--gpu", "h200")])
def test_auto_of_int4_is_what_engines_load(gpu: tuple[str, ...], checkpoint: LIST, tmp_path: Path) -> None:
    options = ("--target", "auto", *gpu, "--pre-quant-scale", "fold")
    done = run("convert", checkpoint("qwen3moe-int4awq"), tmp_path / "out", *options, "--json")
    assert done.code == 0 and done.json["manifest"]["target"] == "compressed-tensors"
    assert "--target auto: compressed-tensors (int4 experts)" in done.stderr
    told = run("validate", checkpoint("qwen3moe-int4awq"), *options, "--format", "json")
    assert told.code == 0 and told.json["targets"] == ["compressed-tensors"]
    assert run("validate", tmp_path, "--target", "auto").code == 3


def test_gpu_is_for_auto(checkpoint: LIST, tmp_path: Path) -> None:
    done = run("convert", checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "out", "--target", "hf", "--gpu", "b200")
    assert done.code == 2 and "--gpu is for --target auto" in done.stderr


def test_plain_convert_names_the_target_for_blackwell(checkpoint: LIST, tmp_path: Path) -> None:
    done = run("convert", checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "out")
    assert "--target flashinfer-trtllm" in done.stdout.strip().splitlines()[-1]


def test_targets_lists_every_pair() -> None:
    every = run("targets", "--json").json["targets"]
    rows = [row for row in every if row["experts"] == "NVFP4"]
    assert [row["layout_id"] for row in every if row["experts"] == "int4"] == [
        "vllm-marlin-int4/vllm/1",
        "vllm-marlin-int4/sglang/1",
        "moe-wna16/vllm/1",
        "moe-wna16/sglang/1",
        "flashinfer-sm90-w4a8/flashinfer/1",
        "sglang-w4afp8/sglang/1",
        "flashinfer-mxint4/vllm/1",
        "flashinfer-mxint4/sglang/1",
    ]
    assert [(row["target"], row["engine"].split()[0]) for row in rows] == list(packs.PAIRS)
    by_id = {row["layout_id"]: row for row in rows}
    assert by_id["flashinfer-trtllm/vllm/1"]["alphas"] == "two, exact"
    assert {row["alphas"] for row in rows if row["target"] != "flashinfer-trtllm"} == {"one, unified"}
    assert {row["target"] for row in rows if row["input_scale"] == "not used"} == {"vllm-marlin"}
    assert by_id["vllm-marlin/vllm/1"]["gpus"] == "SM75 SM80 SM86 SM89 SM90"
    assert by_id["flashinfer-trtllm/sglang/1"]["engine"] == "sglang 0.5.23"
    shown = re.sub(r"\s+", " ", run("targets").stdout)
    for word in (
        *packs.LAYOUTS,
        *VLLM_BACKENDS.values(),
        *by_id,
        "vllm 0.33.0",
        "sglang 0.5.23",
        "SM100",
        "two, exact",
    ):
        assert word in shown, word


# --- Marlin's small block scales ---


@pytest.mark.parametrize(("engine", "dtype"), [(e, d) for e in packs.ENGINES for d in ("bf16", "fp16")])
def test_flushed_block_scales_are_counted(engine: str, dtype: str, checkpoint: LIST, tmp_path: Path) -> None:
    """vLLM with fp16: everything subnormal. With bf16 the layer's factor decides. SGLang keeps all bytes."""
    moe, planted = "model.layers.0.mlp", (1, 3, 7, 8, 9)

    def plant(ck: Editable) -> None:
        for kind in ("gate", "up", "down"):
            scale = ck.tensors[f"{moe}.experts.4.{kind}_proj.weight_scale"].view(torch.uint8)
            scale.view(-1)[: len(planted)] = torch.tensor(planted, dtype=torch.uint8)
        ck.tensors[f"{moe}.experts.4.down_proj.weight_scale"].view(torch.uint8).view(-1)[9] = 126  # factor 1 for w2

    source = damaged(checkpoint("qwen3moe-w4a16nvfp4"), tmp_path / "source", plant)
    logical = Logical.read(source)
    out = tmp_path / "out"
    done = run("convert", source, out, "--target", "vllm-marlin", "--engine", engine, "--activation-dtype", dtype)
    assert done.code == 0
    packed, expected = Packed(out, "vllm-marlin", engine, 1, 1, dtype), {}
    for path in logical.names:
        count = 0
        for expert in range(8):
            found = logical.matrices(path, expert)
            assert found.gate is not None
            for gemm, codes in (("w13", found.gate[1]), ("w13", found.up[1]), ("w2", found.down[1])):
                factor = float(packed.ranks[0, 0].own(path, f"{gemm}_scale_factor")[expert])
                values = packs.E4M3[codes] * factor
                count += int(((values > 0) & (values < 2**-6)).sum()) if engine == "vllm" else 0
        if count:
            expected[path] = count
    assert bool(expected) == (engine == "vllm")
    if (engine, dtype) == ("vllm", "fp16"):
        assert expected[moe] >= 9
    manifest = packs.read_json(out / packs.MANIFEST)
    assert manifest["runs"][-1].get("block_scales_flushed", {}) == expected
    shown = f"{sum(expected.values()):,} block scales are too small for this kernel and became zero"
    assert (shown in done.stdout) == bool(expected)
    assert manifest["packed"]["activation_dtype"] == dtype
    # What comes back is the same but for those, which are zero.
    back = Logical.read(packs.unpacked(out, tmp_path / "back"))
    lost = 0
    for path in logical.names:
        for expert in range(8):
            for _, ours, theirs in back.matrices(path, expert).pairs(logical.matrices(path, expert)):
                assert ours is not None and theirs is not None
                assert (ours[0] == theirs[0]).all()
                different = ours[1] != theirs[1]
                assert not ours[1][different].any()
                lost += int(different.sum())
    assert lost == sum(expected.values())


@pytest.mark.parametrize("engine", packs.ENGINES)
def test_marlins_factor_is_of_the_ranks_own_blocks(engine: str, checkpoint: LIST, tmp_path: Path) -> None:
    """vLLM sees the largest block scale of what a rank loads; four ranks with four different maxima."""
    moe, tops = "model.layers.0.mlp", {(0, 0): 16.0, (1, 0): 64.0, (0, 1): 128.0, (1, 1): 448.0}

    def plant(ck: Editable) -> None:
        for name in ck.names(rf"{moe}\.experts\.\d+\.(gate|up|down)_proj\.weight_scale"):
            scale = ck.tensors[name]
            low = torch.minimum(scale.float(), torch.tensor(8.0))
            expert = int(name.split(".")[5])
            for tp in (0, 1):
                if expert in (1, 4):  # not the last expert of its rank
                    row, column = (0, 4 * tp) if "down" in name else (64 * tp, 3)
                    low[row, column] = tops[tp, expert // 4]
            ck.tensors[name] = low.to(torch.float8_e4m3fn)

    source = damaged(checkpoint("qwen3moe-w4a16nvfp4"), tmp_path / "source", plant)
    packed = Packed(
        packs.pack(source, tmp_path / "out", "vllm-marlin", engine=engine, tp=2, ep=2), "vllm-marlin", engine, 2, 2
    )
    for at, top in tops.items():
        factor = {16.0: 16.0, 64.0: 4.0, 128.0: 2.0, 448.0: 1.0}[top] if engine == "vllm" else 1.0
        for gemm in ("w13", "w2"):
            assert packed.ranks[at].own(moe, f"{gemm}_scale_factor").tolist() == [factor] * 4, (at, gemm)


# --- which layers ---


def with_more_layers(ck: Editable) -> None:
    """Layer 2: an MTP layer with NVFP4 experts, other bytes than layer 1's. Layer 3: experts in BF16."""
    for name in ck.names(r"model\.layers\.1\.mlp\.experts\..*"):
        tensor = ck.tensors[name]
        copy = name.replace("layers.1.", "layers.2.")
        ck.tensors[copy] = tensor.flip(0).contiguous() if tensor.dtype == torch.uint8 else tensor.clone()
    for expert in range(8):
        for kind, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            weight = torch.full(shape, 0.5 + expert, dtype=torch.bfloat16)
            ck.tensors[f"model.layers.3.mlp.experts.{expert}.{kind}_proj.weight"] = weight
    ck.tensors["model.layers.2.eh_proj.weight"] = torch.ones(256, 512, dtype=torch.bfloat16)
    for section, key in zip(ck.sections, ("ignore", "exclude_modules"), strict=False):
        section[key] = [*section[key], "model.layers.3.mlp.experts*", "model.layers.2.eh_proj"]
    ck.config["num_nextn_predict_layers"] = 1


@pytest.mark.parametrize(("layout", "engine"), packs.PAIRS)
def test_mtp_layers_are_packed_and_bf16_ones_are_not(
    layout: str, engine: str, checkpoint: LIST, tmp_path: Path
) -> None:
    source = damaged(checkpoint("dsv3-nvfp4"), tmp_path / "source", with_more_layers)
    split = "split" if layout == "flashinfer-trtllm" else "unify"
    hf = packs.pack(source, tmp_path / "hf", "hf", w13_scale=split)
    out = packs.pack(source, tmp_path / "out", layout, engine=engine, tp=2, ep=2)
    logical, packed = Logical.read(hf), Packed(out, layout, engine, 2, 2)
    assert "model.layers.2.mlp" in logical.names and "model.layers.3.mlp" not in logical.names
    assert list(packs.read_json(out / packs.MANIFEST)["packed"]["layers"]) == sorted(logical.names)
    for expert in (0, 3, 4, 7):
        ours = packed.whole("model.layers.2.mlp", expert, logical)
        packs.assert_same(ours, logical.matrices("model.layers.2.mlp", expert), str(expert))
    common = packs.tensors_of(out / "common")
    kept = [name for name in common if name.startswith("model.layers.3.mlp.experts.")]
    assert len(kept) == 24
    assert all(float(common[name][0, 0]) == 0.5 + int(name.split(".")[5]) for name in kept)
    assert not any("layers.3." in name for rank in packed.ranks.values() for name in rank.tensors)
    shared = [name for name in common if ".shared_experts." in name]
    assert shared and not any(".experts." in name and "layers.3." not in name for name in common)
    back = packs.unpacked(out, tmp_path / "back")
    assert packs.differences(packs.contents(back), packs.contents(hf)) == []


# --- reading and memory ---


def reads_of(source: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> dict[str, np.ndarray]:
    """How often each byte of each file is read during a call."""
    counts = {path.name: np.zeros(path.stat().st_size, dtype=np.int16) for path in source.glob("*.safetensors")}
    pread, preadv = os.pread, os.preadv

    def count(descriptor: int, length: int, start: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name in counts and path.parent.samefile(source):  # not the output's own
            counts[path.name][start : start + length] += 1

    def one(descriptor: int, length: int, start: int) -> bytes:
        data = pread(descriptor, length, start)
        count(descriptor, len(data), start)
        return data

    def into(descriptor: int, buffers: list[memoryview], start: int) -> int:
        length = preadv(descriptor, buffers, start)
        count(descriptor, length, start)
        return length

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", one)
        patched.setattr(os, "preadv", into)
        call()
    return counts


def data_of(source: Path, pattern: str = ".*") -> Mapping[str, list[tuple[int, int, str]]]:
    """Byte ranges of tensors by file."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(length))
        for name, entry in table.items():
            if name != "__metadata__" and re.fullmatch(pattern, name):
                start, end = entry["data_offsets"]
                found.setdefault(path.name, []).append((8 + length + start, 8 + length + end, name))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to tell files apart")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3moe-nvfp4-sharded", ("flashinfer-trtllm",)),
        ("qwen3moe-nvfp4-sharded", ("hf", "flashinfer-trtllm", "flashinfer-cutlass", "vllm-cutlass")),
        ("qwen3moe-nvfp4-perexpert", ("hf", "vllm-marlin", "flashinfer-cutedsl")),
        ("tinymoe-nvfp4-splitscale", ("flashinfer-cutlass", "hf", "flashinfer-trtllm")),
        ("llama4-nvfp4", ("flashinfer-trtllm", "flashinfer-cutedsl")),
        ("llama4-nvfp4", ("hf", "flashinfer-trtllm", "flashinfer-cutedsl")),
        ("gptoss-nvfp4", ("flashinfer-trtllm", "flashinfer-cutlass")),
    ],
)
def test_each_byte_is_read_once(
    name: str, targets: tuple[str, ...], checkpoint: LIST, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While writing, whatever the number of targets. Scales are surveyed before, and the plan holds their values.

    Two exceptions: block scales of dense linears that share a GEMM are read once for each target; fused experts once
    for `hf` and once for all packed targets.
    """
    source = checkpoint(name)
    ready = read_checkpoint(str(source))
    prepared = [
        convert.decide(ready, convert.Options(target, tp=2, ep=2), target, number)
        for number, target in enumerate(targets)
    ]

    def write() -> None:
        with packs.unsynced():
            convert.write_all(prepared, tmp_path / "out", overwrite=False, workers=3, progress=lambda _: None)

    counts = reads_of(source, monkeypatch, write)
    scalars = re.compile(r".*[._](weight_scale_2|input_scale)")
    checked = 0
    for file, ranges in data_of(source).items():
        for start, end, tensor in ranges:
            here = counts[file][start:end]
            most = 1
            if ".experts." not in tensor and re.fullmatch(r".*(self_attn|shared_expert)\..*\.weight_scale", tensor):
                most = len(targets)
            elif ".experts." in tensor and "hf" in targets and name == "llama4-nvfp4":
                most = 2
            assert here.max(initial=0) <= most, (tensor, int(here.max()))
            assert scalars.fullmatch(tensor) or here.min(initial=99) >= 1, tensor
            checked += end > start
    assert checked > 100 or "gptoss" in name or "llama4" in name


@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-perexpert", "gptoss-nvfp4", "llama4-nvfp4"])
def test_marlin_decides_without_weights(
    name: str, checkpoint: LIST, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads all block scales before it packs, fused ones too, and no byte of a weight."""
    source = checkpoint(name)
    ready = read_checkpoint(str(source))
    counts = reads_of(source, monkeypatch, lambda: convert.decide(ready, convert.Options("vllm-marlin")))
    experts = data_of(source, r".*\.experts\..*(proj|w\d)(\.weight|\.weight_scale|_weight_scale)?")
    parts = [(tensor, counts[file][start:end]) for file, ranges in experts.items() for start, end, tensor in ranges]
    assert {int(count.min()) for tensor, count in parts if tensor.endswith("weight_scale")} == {1}
    assert {int(count.max()) for tensor, count in parts if not tensor.endswith("weight_scale")} == {0}


WATCHED = """
import sys, threading
from pathlib import Path
from nvfp4prep import convert
source, warm, out, target = sys.argv[1:]
def resident():
    line = next(l for l in Path('/proc/self/status').read_text().splitlines() if l.startswith('VmRSS'))
    return int(line.split()[1])
def write(path, to):
    prepared = convert.prepare(path, convert.Options(target, tp=2, ep=2))
    convert.write(prepared, Path(to), overwrite=False, workers=2, progress=lambda n: None)
write(warm, out + '-warm')
before = resident()
peak, stop = [before], threading.Event()
def watch():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], resident())
thread = threading.Thread(target=watch)
thread.start()
write(source, out)
stop.set()
thread.join()
print(peak[0] - before)
"""
"""Writes a small checkpoint first, so that libraries and pools are there; prints what the second adds, in KiB."""


def large(folder: Path, experts: int, base: Path) -> Path:
    """One MoE layer with experts of 3.4 MB each."""
    folder.mkdir()
    config = packs.read_json(base / "config.json")
    hidden, inner = 2048, 1024
    config |= {
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_local_experts": experts,
        "num_hidden_layers": 1,
    }
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for expert in range(experts):
        for kind, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            module = f"model.layers.0.mlp.experts.{expert}.{kind}_proj"
            tensors[f"{module}.weight"] = torch.full((rows, columns // 2), 0x21, dtype=torch.uint8)
            tensors[f"{module}.weight_scale"] = torch.full((rows, columns // 16), 1.0).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale_2"] = torch.tensor(1e-3 * (1 + (kind == "up")))
            tensors[f"{module}.input_scale"] = torch.tensor(1e-2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_bytes((base / "hf_quant_config.json").read_bytes())
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the resident set from /proc")
@pytest.mark.parametrize("target", ["flashinfer-trtllm", "vllm-marlin"])
def test_a_layers_output_is_never_held_whole(target: str, checkpoint: LIST, tmp_path: Path) -> None:
    """From 4 to 32 experts output grows by 96 MB, and what writing adds to the resident set by less than half of it."""
    base, grown = checkpoint("qwen3moe-nvfp4-perexpert"), {}
    warm = large(tmp_path / "warm", 4, base)
    for experts in (4, 32):
        source, out = large(tmp_path / f"source{experts}", experts, base), tmp_path / f"out{experts}"
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, str(source), str(warm), str(out), target],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        grown[experts] = int(done.stdout) / 1024
        assert sum(path.stat().st_size for path in out.rglob("*.safetensors")) > experts * 3.3e6
    assert grown[32] < grown[4] + 48, grown
