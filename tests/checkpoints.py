"""Names of the checkpoints that tests use. tests/data/README.md says what each one is."""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"

NVFP4 = (
    "dsv3-nvfp4",
    "gptoss-nvfp4",
    "llama4-nvfp4",
    "mixtral-nvfp4",
    "nemotronh-nvfp4",
    "qwen3-dense-nvfp4",
    "qwen3moe-mixed-fp8attn",
    "qwen3moe-nvfp4-awqlite",
    "qwen3moe-nvfp4-expertsonly-fp8kv",
    "qwen3moe-nvfp4-i96",
    "qwen3moe-nvfp4-perexpert",
    "qwen3moe-nvfp4-sharded",
    "qwen3moe-w4a16nvfp4",
    "tinymoe-nvfp4-perexpert",
)
"""Shipped in tests/data."""

OVERLAYS = ("tinymoe-nvfp4-fewtokens", "tinymoe-nvfp4-splitscale")
"""Rebuilt from tests/data by scripts/build_overlay.py."""

INT4 = ("qwen3moe-int4awq", "qwen3moe-w4a8awq", "tinymoe-int4awq", "tinymoe-w4a8awq")
"""Shipped in tests/data; not NVFP4."""

FULL_SET = (
    *NVFP4,
    *INT4,
    "dsv3-int4awq",
    "gptoss-nvfp4-bf16",
    "llama4-nvfp4-bf16",
    "mixtral-nvfp4-bf16",
    "nemotronh-nvfp4-bf16",
    "qwen3moe-nvfp4-perexpert-bf16",
    "tinymoe-bf16",
)
"""What the folder named by NVFP4PREP_CHECKPOINTS holds when it is complete."""


def full_set() -> dict[str, Path]:
    """Name -> path of the full-set checkpoints that are there; empty when NVFP4PREP_CHECKPOINTS is not set."""
    folder = os.environ.get("NVFP4PREP_CHECKPOINTS")
    if not folder:
        return {}
    return {name: Path(folder, name) for name in FULL_SET if Path(folder, name, "config.json").is_file()}
