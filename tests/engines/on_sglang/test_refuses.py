"""SGLang 0.5.23 as it comes refuses a packed output, instead of serving its bytes as something else."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pack_checks as packs
import pytest
import sglang_moe

from nvfp4prep.layouts.logical import ENGINE_VERSIONS

SOURCE = "qwen3moe-nvfp4-perexpert"


def parse(folder: Path, quantization: str | None = None) -> str | None:
    found: str | None = sglang_moe.ModelConfig(str(folder), quantization=quantization).quantization
    return found


@pytest.mark.parametrize("layout", sglang_moe.BACKENDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_packed_is_an_unknown_quantisation(
    checkpoint: Callable[[str], Path], tmp_path: Path, layout: str, tp: int
) -> None:
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", layout, engine="sglang", tp=tp)
    with pytest.raises(ValueError, match="Unknown quantization method: nvfp4prep"):
        parse(packed)


@pytest.mark.parametrize("method", ["modelopt_fp4", "modelopt", "modelopt_mixed", "compressed-tensors"])
def test_no_method_that_is_asked_for_reads_it(checkpoint: Callable[[str], Path], tmp_path: Path, method: str) -> None:
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", "flashinfer-trtllm", engine="sglang")
    with pytest.raises(ValueError, match=rf"\(nvfp4prep\) does not match .* argument \({method}\)"):
        parse(packed, method)


@pytest.mark.parametrize("method", ["humming", "quark_mxfp4"])
def test_two_methods_ask_no_config(checkpoint: Callable[[str], Path], tmp_path: Path, method: str) -> None:
    """They take whatever config.json names, as docs/serving.md warns. What follows needs a GPU."""
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", "flashinfer-trtllm", engine="sglang")
    assert parse(packed, method) == method


def test_hf_is_accepted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    assert parse(packs.pack(checkpoint(SOURCE), tmp_path / "out", "hf")) == "modelopt_fp4"


def test_it_is_the_version_that_layouts_were_read_from() -> None:
    assert version("sglang") == ENGINE_VERSIONS["sglang"]
