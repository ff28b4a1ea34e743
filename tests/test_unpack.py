"""`unpack`: what it refuses, with which words and exit code, and that nothing is written then."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pack_checks as packs
import pytest
import torch
from runner import Run, run, snapshot
from safetensors.torch import load_file, save_file

from nvfp4prep import unpack
from nvfp4prep.errors import EnvironmentFault

LIST = Callable[[str], Path]
RANK = "rank-01-of-02_00-of-02"
PREFIX = "model.layers.0.mlp.experts."
Damage = Callable[[Path], None]


@pytest.fixture(scope="session")
def packed(checkpoint: LIST, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed output of two TP and two EP ranks. Read only."""
    out = tmp_path_factory.mktemp("packed") / "packed"
    return packs.pack(checkpoint("qwen3moe-nvfp4-perexpert"), out, "flashinfer-trtllm", tp=2, ep=2)


def refused(packed: Path, tmp_path: Path, damage: Damage) -> Run:
    """The refusal of a damaged copy; nothing may be left or changed."""
    copied = tmp_path / "packed"
    shutil.copytree(packed, copied)
    damage(copied)
    before = snapshot(tmp_path)
    done = run("unpack", copied, tmp_path / "out", "--json")
    assert done.code == 3, done
    assert snapshot(tmp_path) == before
    assert done.stderr.startswith("error") and "Traceback" not in done.stderr
    return done


def rules(done: Run) -> set[str]:
    return {finding["rule"] for finding in done.findings}


# --- files ---


def drop_rank(folder: Path) -> None:
    shutil.rmtree(folder / RANK)


def drop_common(folder: Path) -> None:
    shutil.rmtree(folder / "common")


def drop_index(folder: Path) -> None:
    (folder / RANK / packs.INDEX).unlink()


def drop_shard(folder: Path) -> None:
    (folder / RANK / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / RANK / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    file = folder / RANK / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "rule", "message"),
    [
        (drop_rank, "rank-missing", f"{RANK}/{packs.INDEX}: not there; copy the whole output"),
        (drop_common, "rank-missing", f"common/{packs.INDEX}: not there; copy the whole output"),
        (drop_index, "rank-missing", f"{RANK}/{packs.INDEX}: not there; copy the whole output"),
        (drop_shard, "shard-missing", "not there; fetch it"),
        (cut, "bad-shard", f"{RANK}/model.safetensors: the file is cut short"),
        (cut_header, "bad-shard", f"{RANK}/model.safetensors"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_missing_and_cut_files(damage: Damage, rule: str, message: str, packed: Path, tmp_path: Path) -> None:
    done = refused(packed, tmp_path, damage)
    assert rules(done) == {rule} and message in done.stderr


def edited(change: Callable[[dict[str, torch.Tensor]], None], rank: str = RANK) -> Damage:
    """Change a rank's tensors, with an index that agrees."""

    def damage(folder: Path) -> None:
        file = folder / rank / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (folder / rank / packs.INDEX).write_text(json.dumps(index))

    return damage


def without(name: str, rank: str = RANK) -> Damage:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[PREFIX + name]

    return edited(drop, rank)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return edited(lambda tensors: tensors.update({PREFIX + name: change(tensors[PREFIX + name]).contiguous()}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("routed_experts.w13_weight"), "routed_experts.w13_weight, rank-01-of-02_00-of-02: not there"),
        (without("routed_experts.w2_weight_scale"), "routed_experts.w2_weight_scale"),
        (without("nvfp4prep.up_weight_scale_2", "rank-00-of-02_01-of-02"), "nvfp4prep.up_weight_scale_2"),
        (without("nvfp4prep.down_input_scale"), "nvfp4prep.down_input_scale"),
        (changed("routed_experts.w13_weight", lambda t: t[:2]), "U8 [2, 128, 128] where U8 [4, 128, 128] belongs"),
        (changed("routed_experts.w13_weight", lambda t: t[:, :64]), "U8 [4, 64, 128] where U8 [4, 128, 128] belongs"),
        (changed("routed_experts.w2_weight", lambda t: t.to(torch.float64)), "F64 [4, 256, 32] where U8"),
        (changed("nvfp4prep.gate_weight_scale_2", lambda t: t.to(torch.bfloat16)), "BF16 [4] where F32 [4] belongs"),
    ],
    ids=range(8),
)
def test_tensors_that_do_not_fit(damage: Damage, message: str, packed: Path, tmp_path: Path) -> None:
    done = refused(packed, tmp_path, damage)
    assert rules(done) == {"packed-tensor-bad"} and message in done.stderr


# --- files of another rank, or not as written ---


def copy_rank(folder: Path) -> None:
    shutil.rmtree(folder / RANK)
    shutil.copytree(folder / "rank-00-of-02_00-of-02", folder / RANK)


def stray(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / RANK / "z.safetensors")


def unlisted(folder: Path) -> None:
    manifest = packs.read_json(folder / packs.MANIFEST)
    del manifest["outputs"][f"{RANK}/model.safetensors"]
    (folder / packs.MANIFEST).write_text(json.dumps(manifest))


def listed(folder: Path) -> None:
    manifest = packs.read_json(folder / packs.MANIFEST)
    manifest["outputs"][f"{RANK}/z.safetensors"] = {"bytes": 1, "digest": ""}
    manifest["outputs"]["common/model.safetensors"]["bytes"] += 1
    (folder / packs.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (copy_rank, "says it is of flashinfer-trtllm/vllm/1 rank 0 of 2, 0 of 2; flashinfer-trtllm/vllm/1 rank 1"),
        (stray, "the manifest does not list this file"),
        (unlisted, "the manifest does not list this file"),
        (listed, "z.safetensors: the manifest lists it, but it is not there"),
        (listed, "bytes; the manifest says"),
    ],
)
def test_files_that_are_not_the_manifest_s(damage: Damage, message: str, packed: Path, tmp_path: Path) -> None:
    done = refused(packed, tmp_path, damage)
    assert rules(done) == {"packed-file-bad"} and message in done.stderr


@pytest.mark.parametrize("outputs", [None, [], {"a": 1}, {"a": {"bytes": "1", "digest": ""}}, {"a": {"bytes": 1}}])
def test_outputs_that_are_no_table(outputs: Any, packed: Path, tmp_path: Path) -> None:
    done = refused(packed, tmp_path, put(("outputs",), outputs))
    assert rules(done) == {"manifest-bad"}


@pytest.mark.parametrize("folder", [RANK, "common"])
@pytest.mark.parametrize("place", [-1, -5000, 0.5])
def test_changed_bytes_fail_the_digest(folder: str, place: float, packed: Path, tmp_path: Path) -> None:
    copied = tmp_path / "packed"
    shutil.copytree(packed, copied)
    file = copied / folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[int(place) if place < 0 else int(len(data) * place)] ^= 1
    file.write_bytes(data)
    done = run("unpack", copied, tmp_path / "out", "--json")
    assert done.code == 1 and f"{folder}/model.safetensors: not the bytes that were written" in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_packed_output_that_changes_during_the_run(packed: Path, tmp_path: Path) -> None:
    copied, out = tmp_path / "packed", tmp_path / "out"
    shutil.copytree(packed, copied)
    prepared = unpack.prepare(copied, out, overwrite=False)

    def progress(_: int) -> None:
        (copied / RANK / "model.safetensors").touch()

    with pytest.raises(EnvironmentFault, match=f"{RANK}/model.safetensors: changed since its header was read"):
        unpack.write(prepared, out, overwrite=False, workers=1, progress=progress)
    assert {path.name for path in tmp_path.iterdir()} == {"packed"}


# --- the manifest ---

GONE = object()


def put(path: tuple[Any, ...], value: Any) -> Damage:
    """Set an entry of the manifest, or remove it."""

    def damage(folder: Path) -> None:
        manifest = packs.read_json(folder / packs.MANIFEST)
        table = manifest
        for key in path[:-1]:
            table = table[key]
        if value is GONE:
            del table[path[-1]]
        else:
            table[path[-1]] = copy.deepcopy(value)
        (folder / packs.MANIFEST).write_text(json.dumps(manifest))

    return damage


MOE = ("logical", "moe", 0)
GATE = (*MOE, "projections", "gate")
NONSENSE = (GONE, None, [], "x", -1, 1.5, True)
HUGE = (10**9, 10**30, float("inf"))
TAMPERED: list[tuple[tuple[Any, ...], Any]] = [
    *((("packed", "layout"), value) for value in (*NONSENSE, "nope/vllm/1", "flashinfer-trtllm/vllm", "a/b/c/d")),
    *((("packed", "layout"), f"{name}/1") for name in ("flashinfer-trtllm/sglang", "vllm-cutlass/vllm")),
    *((("packed", key), value) for key in ("tp", "ep") for value in (*NONSENSE, *HUGE, 0, "2", 2.0, [2])),
    *((("packed", "activation_dtype"), value) for value in (*NONSENSE, "fp16", "fp32")),
    *((("packed", "engine"), value) for value in (GONE, "sglang", 1)),
    *((("packed", "layers"), value) for value in (*NONSENSE, {})),
    *((("packed",), value) for value in (*NONSENSE[1:], {})),
    *((("logical",), value) for value in (*NONSENSE, {})),
    *((("logical", "metadata"), value) for value in (*NONSENSE, {"format": 1})),
    *((("logical", "max_shard_bytes"), value) for value in (*NONSENSE, *HUGE[1:], 0)),
    *((("logical", "quantization_config"), value) for value in NONSENSE),
    *((("logical", "hf_quant_config"), value) for value in NONSENSE),
    *((("logical", "moe"), value) for value in (*NONSENSE, {})),
    *(((*MOE, "path"), value) for value in (*NONSENSE, "model.layers.7.mlp", "model.layers.1.mlp", "")),
    *(((*MOE, "dialect"), value) for value in (*NONSENSE, "fused", "other")),
    *(((*MOE, "experts"), value) for value in (*NONSENSE, *HUGE, 0, 7, 9, 10**7)),
    *(((*MOE, "projections"), value) for value in (*NONSENSE, {})),
    *((GATE, value) for value in (*NONSENSE, {})),
    *(((*MOE, "projections", "up"), value) for value in (GONE, {})),
    *(((*MOE, "projections", name), {}) for name in ("gate_up", "other")),
    *(
        ((*GATE, "weight"), value)
        for value in (
            *NONSENSE,
            ["U8"],
            ["Q9", [128, 128]],
            ["F32", [128, 128]],
            ["U8", [64, 128]],
            ["U8", [128, 64]],
            ["U8", [-1, 128]],
            ["U8", [10**18, 10**18]],
            ["U8", [128, 128.0]],
            ["U8", ["128", 128]],
            ["U8", 128],
        )
    ),
    *(
        ((*GATE, param), value)
        for param in ("weight_scale_2", "input_scale")
        for value in (GONE, ["F32", [1]], ["F32", [8]], ["BF16", []], ["U8", []])
    ),
    *(((*GATE, param), ["F32", [128]]) for param in ("bias", "pre_quant_scale", "zero_point")),
    (("geometry",), 5),
]


def test_a_tampered_manifest(packed: Path, tmp_path: Path) -> None:
    """Every nonsense value is refused with a rule of its own, quickly, and nothing is written."""
    for number, (path, value) in enumerate(TAMPERED):
        folder = tmp_path / str(number)
        copied = folder / "packed"
        shutil.copytree(packed, copied, copy_function=lambda a, b: Path(b).hardlink_to(a))
        for name in (packs.MANIFEST,):
            text = (copied / name).read_bytes()
            (copied / name).unlink()
            (copied / name).write_bytes(text)
        put(path, value)(copied)
        done = run("unpack", copied, folder / "out", "--json")
        label = (".".join(map(str, path)), "removed" if value is GONE else value)
        assert done.code == 3, (label, done)
        expected = {"manifest-bad", "rank-missing", "packed-tensor-bad"}
        unread = path[0] == "packed" or value == float("inf")  # which is no JSON
        assert rules(done) <= expected | ({"not-packed"} if unread else set()), (label, done.stderr)
        assert [entry.name for entry in folder.iterdir()] == ["packed"], label
        shutil.rmtree(folder)


def test_another_layout_version(packed: Path, tmp_path: Path) -> None:
    done = refused(packed, tmp_path, put(("packed", "layout"), "flashinfer-trtllm/vllm/2"))
    assert rules(done) == {"layout-unknown"}
    assert "packed as flashinfer-trtllm/vllm/2; this version knows flashinfer-trtllm/vllm/1" in done.stderr


def test_a_forgotten_layer(packed: Path, tmp_path: Path) -> None:
    """Tensors of a layer that the manifest no longer names are not dropped in silence."""

    def forget(folder: Path) -> None:
        manifest = packs.read_json(folder / packs.MANIFEST)
        gone = manifest["logical"]["moe"].pop()["path"]
        del manifest["packed"]["layers"][gone]
        (folder / packs.MANIFEST).write_text(json.dumps(manifest))

    done = refused(packed, tmp_path, forget)
    assert "the manifest does not name this layer" in done.stderr


@pytest.mark.parametrize(
    ("file", "text", "rule", "message"),
    [
        (packs.MANIFEST, None, "not-packed", "no packed output of convert"),
        (packs.MANIFEST, "{", "not-packed", "not valid JSON"),
        (packs.MANIFEST, "[]", "not-packed", "a JSON list, not an object"),
        (packs.MANIFEST, '{"format": 2}', "not-packed", "not a manifest that this version understands"),
        ("config.json", None, "not-packed", "no packed output of convert"),
        ("config.json", "{}", "manifest-bad", "but not by this"),
        ("config.json", "[]", "bad-json", "a JSON list"),
    ],
)
def test_manifest_and_config_as_files(
    file: str, text: str | None, rule: str, message: str, packed: Path, tmp_path: Path
) -> None:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        if text is not None:
            (folder / file).write_text(text)

    done = refused(packed, tmp_path, damage)
    assert rules(done) == {rule} and message in done.stderr


def test_what_is_no_packed_output(packed: Path, checkpoint: LIST, tmp_path: Path) -> None:
    hf = packs.pack(checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "hf", "hf")
    for path in (checkpoint("qwen3moe-nvfp4-i96"), hf, tmp_path / "nowhere", packed / "config.json"):
        done = run("unpack", path, tmp_path / "out", "--json")
        assert done.code == 3 and rules(done) == {"not-packed"}
    assert not (tmp_path / "out").exists()


def test_destinations(packed: Path, tmp_path: Path) -> None:
    before = snapshot(packed)
    for out in (packed, packed / "out", packed / RANK / "out"):
        done = run("unpack", packed, out)
        assert done.code == 2 and "is the source or lies inside it" in done.stderr
    for out in (packed.parent,):
        done = run("unpack", packed, out)
        assert done.code == 2 and "the source lies inside it" in done.stderr
    assert snapshot(packed) == before
    (tmp_path / "out").mkdir()
    done = run("unpack", packed, tmp_path / "out")
    assert done.code == 2 and "exists; choose another OUT" in done.stderr
    (tmp_path / "out" / "mine.txt").write_text("kept")
    done = run("unpack", packed, tmp_path / "out", "--overwrite")
    assert done.code == 2 and "holds no checkpoint" in done.stderr
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "out") and (tmp_path / "out" / "mine.txt").is_file()


# --- and what it does ---


def test_the_command_and_its_manifest(packed: Path, checkpoint: LIST, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("unpack", packed, out)
    assert done.code == 0 and f"Done: {out}; unpacked from flashinfer-trtllm/vllm/1." in done.stdout
    manifest = packs.read_json(out / packs.MANIFEST)
    before = packs.read_json(packed / packs.MANIFEST)
    assert manifest["target"] == "hf" and "packed" not in manifest and "logical" not in manifest
    assert manifest["source"] == before["source"]
    assert [entry["options"]["target"] for entry in manifest["runs"]] == ["flashinfer-trtllm", "hf"]
    assert manifest["runs"][-1]["options"]["unpacked_from"] == "flashinfer-trtllm/vllm/1"
    assert {name: entry["bytes"] for name, entry in manifest["outputs"].items()} == {
        path.name: path.stat().st_size for path in out.glob("*.safetensors")
    }
    # Digests are those of the hf output, which is the same file.
    hf = packs.pack(checkpoint("qwen3moe-nvfp4-perexpert"), tmp_path / "hf", "hf", w13_scale="split")
    assert manifest["outputs"] == packs.read_json(hf / packs.MANIFEST)["outputs"]
    again = run("unpack", packed, out, "--overwrite", "--json", "--workers", 1)
    assert again.code == 0 and again.json["manifest"] == manifest
    assert snapshot(tmp_path)["out"] == "folder" and not list(tmp_path.glob("out.*"))


def test_the_result_can_be_converted_again(checkpoint: LIST, tmp_path: Path) -> None:
    """As split into files before, and packed again it is what the source packed was."""
    source = checkpoint("qwen3moe-nvfp4-perexpert")
    options = {"tp": 2, "max_shard_bytes": 300_000}
    first = packs.pack(source, tmp_path / "first", "flashinfer-cutlass", **options)
    back = packs.unpacked(first, tmp_path / "back")
    assert len(list(back.glob("*.safetensors"))) > 2
    same = packs.pack(back, tmp_path / "same", "hf")
    assert packs.differences(packs.contents(same), packs.contents(back)) == []
    second = packs.pack(back, tmp_path / "second", "flashinfer-cutlass", tp=2)
    different = packs.differences(packs.contents(second), packs.contents(first))
    # raw_input_scale in the ranks' files is of the source: it was normalised on the way.
    assert {name.split("/")[0] for name in different} <= {"rank-00-of-02_00-of-01", "rank-01-of-02_00-of-01"}
    for folder in ("rank-00-of-02_00-of-01", "rank-01-of-02_00-of-01", "common"):
        ours, theirs = packs.tensors_of(second / folder), packs.tensors_of(first / folder)
        assert ours.keys() == theirs.keys()
        names = {name for name in ours if not packs.same_bytes(ours[name], theirs[name])}
        assert all(".nvfp4prep.raw_" in name for name in names)


def test_side_files_come_along(checkpoint: LIST, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("qwen3moe-nvfp4-i96"), source)
    (source / "assets").mkdir()
    (source / "assets" / "merges.txt").write_text("a b\n")
    (source / "chat_template.jinja").write_text("{{ x }}")
    for tp in (1, 2):
        out = packs.pack(source, tmp_path / f"packed{tp}", "vllm-marlin", tp=tp)
        back = packs.unpacked(out, tmp_path / f"back{tp}")
        for folder in (out, back):
            assert (folder / "assets" / "merges.txt").read_text() == "a b\n"
            assert (folder / "chat_template.jinja").read_text() == "{{ x }}"
