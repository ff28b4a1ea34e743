"""A whole Qwen3-MoE in vLLM: loaded packed, it holds what it holds once vLLM has converted the hf output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pack_checks as packs
import pytest
import vllm_moe

PROGRAM = Path(__file__).parent.parent / "vllm_model.py"
SOURCE = "qwen3moe-nvfp4-expertsonly-fp8kv"
"""Only its experts are quantised: vLLM has no NVFP4 linear kernel for a CPU."""


@pytest.mark.parametrize("layout", vllm_moe.BACKENDS)
def test_every_tensor_of_the_model(checkpoint: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    hf = packs.pack(checkpoint(SOURCE), tmp_path / "hf", "hf")
    packed = packs.pack(checkpoint(SOURCE), tmp_path / "packed", layout)
    paths = [PROGRAM.parent, PROGRAM.parents[1], PROGRAM.parents[2] / "scripts"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(hf), str(packed), layout],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == "Qwen3MoeForCausalLM"
    assert found["tensors"] > 30
    assert found["differing"] == []
