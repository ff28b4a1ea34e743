from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import bench_plan
import pytest
from safetensors import safe_open

from nvfp4prep.convert import prepare
from nvfp4prep.options import Options
from nvfp4prep.schema import Format

LAYERS, EXPERTS = 5, 4
MOE_LAYERS = LAYERS - bench_plan.DENSE + 1  # the MTP layer has experts too


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    bench_plan.generate(folder, LAYERS, EXPERTS)
    return folder


def test_the_files_are_sparse_and_safetensors_reads_them(generated: Path) -> None:
    index = json.loads((generated / bench_plan.INDEX).read_text())
    files = sorted(generated.glob("*.safetensors"))
    stats = [file.stat() for file in files]
    assert sum(stat.st_size for stat in stats) > index["metadata"]["total_size"] > 10_000_000_000
    assert sum(stat.st_blocks * 512 for stat in stats) < 10_000_000
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names |= dict.fromkeys(opened.keys(), file.name)
            scales = [opened.get_tensor(name).item() for name in opened.keys() if name.endswith("_scale_2")]  # noqa: SIM118
            assert all(0 < scale < math.inf for scale in scales)
            assert len(set(scales)) == len(scales)
    assert names == index["weight_map"]


def test_scalar_scales_come_first_in_each_file(generated: Path) -> None:
    for file in generated.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
        sizes = [bench_plan.ITEM_BYTES[entry["dtype"]] for name, entry in header.items() if name != "__metadata__"]
        assert sizes == sorted(sizes, reverse=True)


def test_it_has_deepseek_s_shape_and_plans_without_findings(generated: Path) -> None:
    prepared = prepare(str(generated), Options())
    schema = prepared.checkpoint.schema
    assert [moe.expert_count for moe in schema.moe_layers] == [EXPERTS] * MOE_LAYERS
    assert all((moe.hidden, moe.intermediate) == (7168, 2048) for moe in schema.moe_layers)
    assert len(list(schema.of_format(Format.NVFP4))) == 3 * (bench_plan.DENSE + MOE_LAYERS * (EXPERTS + 1))
    assert set(prepared.plan.outputs) == {spec[0] for spec in bench_plan.model(LAYERS, EXPERTS)}
    assert not prepared.findings
    assert sum(len(report.pairs) for report in prepared.resolution.global_scales) == 3 + MOE_LAYERS * (EXPERTS + 1)


def test_the_default_size_is_the_one_of_the_goal() -> None:
    tensors = list(bench_plan.model(bench_plan.LAYERS, bench_plan.EXPERTS))
    assert len({spec[0] for spec in tensors}) == len(tensors) > 180_000
    assert 400e9 < sum(map(bench_plan.tensor_bytes, tensors)) < 410e9


def test_each_command_is_measured_in_a_process_of_its_own() -> None:
    ballast = bytearray(256 << 20)  # what this process holds must not count
    small = bench_plan.measure([sys.executable, "-S", "-c", "print('out')"], 2)
    assert (small.output.strip(), small.error) == ("out", None)
    large = bench_plan.measure([sys.executable, "-S", "-c", "b'1' * (128 << 20)"], 1)
    assert small.peak_bytes < 64 << 20 < 128 << 20 < large.peak_bytes < len(ballast)
    failed = bench_plan.measure([sys.executable, "-S", "-c", "raise SystemExit('no such thing')"], 3)
    assert failed.error == "exit 1: no such thing"


def test_the_script_prints_stages_and_keeps_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    command = [
        sys.executable,
        bench_plan.__file__,
        "--layers",
        "4",
        "--experts",
        "2",
        "--runs",
        "1",
        "--keep",
        str(folder),
    ]
    for _ in range(2):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "headers, schema, plan" in ran.stdout
        assert "last run: imports" in ran.stdout, ran.stdout
    assert (folder / "config.json").is_file()
    other = subprocess.run([*command, "--experts", "3"], capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert "no checkpoint of this size" in other.stderr
