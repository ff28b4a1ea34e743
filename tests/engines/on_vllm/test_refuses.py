"""vLLM 0.33.0 as it comes refuses a packed output, instead of serving its bytes as something else."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pack_checks as packs
import pytest
import vllm_moe
from pydantic import ValidationError

from nvfp4prep.layouts.logical import ENGINE_VERSIONS

SOURCE = "qwen3moe-nvfp4-perexpert"


def parse(folder: Path, quantization: str | None = None) -> str | None:
    found: str | None = vllm_moe.ModelConfig(
        model=str(folder), quantization=quantization, skip_tokenizer_init=True
    ).quantization
    return found


@pytest.mark.parametrize("layout", vllm_moe.BACKENDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_packed_is_an_unknown_quantisation(
    checkpoint: Callable[[str], Path], tmp_path: Path, layout: str, tp: int
) -> None:
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", layout, tp=tp)
    with pytest.raises(ValidationError, match="Unknown quantization method: nvfp4prep"):
        parse(packed)


@pytest.mark.parametrize("method", ["modelopt_fp4", "modelopt", "modelopt_mixed", "compressed-tensors"])
def test_no_method_that_is_asked_for_reads_it(checkpoint: Callable[[str], Path], tmp_path: Path, method: str) -> None:
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", "flashinfer-trtllm")
    with pytest.raises(ValidationError, match=rf"\(nvfp4prep\) does not match .* argument \({method}\)"):
        parse(packed, method)


def test_humming_asks_no_config(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """`--quantization humming` takes whatever config.json names, as docs/serving.md warns. What follows needs a GPU."""
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "out", "flashinfer-trtllm")
    assert parse(packed, "humming") == "humming"


def test_hf_is_accepted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    assert parse(packs.pack(checkpoint(SOURCE), tmp_path / "out", "hf")) == "modelopt_fp4"


def test_it_is_the_version_that_layouts_were_read_from() -> None:
    assert version("vllm") == ENGINE_VERSIONS["vllm"]
