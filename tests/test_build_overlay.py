from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import build_overlay
import checkpoints
import pytest
import torch
from safetensors.torch import load_file


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", checkpoints.OVERLAYS)
def test_only_the_overlay_s_tensors_differ_from_the_base(name: str, checkpoint: Callable[[str], Path]) -> None:
    overlay = load_file(checkpoints.DATA / f"{name}.overlay.safetensors")
    base, built = checkpoint(build_overlay.BASE), checkpoint(name)
    assert {file.name for file in built.iterdir()} == {file.name for file in base.iterdir()}
    seen = set()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (built / path.name).read_bytes() == path.read_bytes()
            continue
        old, new = load_file(path), load_file(built / path.name)
        assert old.keys() == new.keys()
        for tensor, value in new.items():
            assert torch.equal(raw(value), raw(overlay.get(tensor, old[tensor]))), tensor
        seen |= new.keys() & overlay.keys()
    assert seen == overlay.keys()


@pytest.mark.parametrize("name", build_overlay.NAMES)
def test_same_bytes_as_the_full_set_s_own_script(name: str, tmp_path: Path) -> None:
    script = Path(os.environ.get("NVFP4PREP_CHECKPOINTS", ""), "overlay.py")
    if not script.is_file():
        pytest.skip("the full set, which has overlay.py, is not there")
    subprocess.run([sys.executable, script, name, tmp_path / "theirs"], check=True)
    ours = build_overlay.build(name, tmp_path / "ours")
    assert contents(ours) == contents(tmp_path / "theirs")


def test_refuses_an_existing_out(tmp_path: Path) -> None:
    with pytest.raises(build_overlay.OverlayError, match="exists already"):
        build_overlay.build("fewtokens", tmp_path)


def test_refuses_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(build_overlay.OverlayError, match="fewtokens, splitscale"):
        build_overlay.build("other", tmp_path / "out")


def test_leaves_nothing_behind_when_the_base_does_not_fit(tmp_path: Path) -> None:
    data = tmp_path / "data"
    base = data / build_overlay.BASE
    base.mkdir(parents=True)
    (data / "tinymoe-nvfp4-fewtokens.overlay.safetensors").symlink_to(
        checkpoints.DATA / "tinymoe-nvfp4-fewtokens.overlay.safetensors"
    )
    for file in (checkpoints.DATA / build_overlay.BASE).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    for shard in base.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes().replace(b'"dtype":"F32","shape":[]', b'"dtype":"I32","shape":[]'))
    with pytest.raises(build_overlay.OverlayError, match=r"F32 \[\] in .* I32 \[\] in"):
        build_overlay.build("fewtokens", tmp_path / "out", data)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
