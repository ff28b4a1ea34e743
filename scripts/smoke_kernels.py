#!/usr/bin/env python3
"""Run every kernel that this machine's GPU has on small random layers, and Marlin on the golden vectors. Prints JSON.

Usage: smoke_kernels.py [--backend NAME ...] [--out FILE]

Needs torch and the kernel's own library (see --help of `nvfp4prep smoke`), no other package: from the repository's root
it also runs as

    NVFP4PREP_MOE_LIBRARY=/path/to/_moe_C_stable_libtorch.abi3.so python scripts/smoke_kernels.py --backend marlin

Each result is compared with the emulator (the same quantisation, tight) and with F32. For FlashInfer its activation
quantiser is compared with the emulator's, and its 128x4 swizzle with this project's, bit by bit.
Exit 0: everything that could run agrees. 1: something does not. 4: nothing could run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from layout_layers import OAI, Case, make_layer  # noqa: E402
from smoke_layers import LAYERS, distance, inputs, layer_of, packed_layer, reference  # noqa: E402

from nvfp4prep.layouts.permutations import swizzle  # noqa: E402
from nvfp4prep.smoke import emulator  # noqa: E402
from nvfp4prep.smoke.kernels import BACKENDS, common, marlin  # noqa: E402

GOLDEN = ROOT / "tests/data/golden/marlin_moe_sm90.safetensors"
TOKENS = (1, 7, 64, 1024)
EXPERTS, TOP_K = 8, 3

EMULATOR_LIMIT = {"marlin": 1e-3, "flashinfer-trtllm": 2e-2, "flashinfer-cutlass": 2e-2, "flashinfer-cutedsl": 2e-2}
"""Relative L2 to the emulator. Marlin: a few 16-bit roundings that go the other way. FlashInfer: also codes near a tie
of the requantisation, whose steps are up to a third of a value. A wrong layout gives about 1."""
RANKS_ROUND = 4e-3
"""What rounding each rank's output to BF16 may add."""
F32_LIMIT = {"marlin": 0.012, "flashinfer-trtllm": 0.25, "flashinfer-cutlass": 0.25, "flashinfer-cutedsl": 0.25}
"""Relative L2 to F32: BF16, or NVFP4 activations twice (0.1 each on Gaussian values, more where they are clipped)."""


def attempt(check: Any, *arguments: Any) -> dict[str, Any]:
    """What a check says, or the exception it ended with."""
    started = time.monotonic()
    try:
        result: dict[str, Any] = check(*arguments)
    except Exception as error:  # a kernel may raise anything: the others still run
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    return {**result, "seconds": round(time.monotonic() - started, 2)}


def run_case(name: str, case: Case, activation: Any, tokens: int) -> dict[str, Any]:
    """One layer and token count, whole and as two EP ranks."""
    made = layer_of(case, EXPERTS, activation)
    layer = packed_layer(made, activation)
    x, routing = inputs(case, tokens, TOP_K, EXPERTS)
    if layer.scales.w13_input is not None:  # as calibrated: the largest magnitude is 6 · 448 · input_scale
        x = (x / x.abs().max() * 6 * 448 * layer.scales.w13_input[0]).to(torch.bfloat16)
    else:
        x = x * 0.25
    ours = BACKENDS[name].run(layer, x, routing)
    ranks = sum(BACKENDS[name].run(packed_layer(made, activation, 2, rank), x, routing) for rank in range(2))
    assert isinstance(ranks, torch.Tensor)
    emulated = emulator.emulate(layer, x, routing)
    result = {
        "case": str(case),
        "activation": activation.kind,
        "tokens": tokens,
        "to_emulator": distance(ours, emulated),
        "ranks_to_emulator": distance(ranks, emulated),
        "to_f32": distance(ours, reference(made, activation, x, routing)),
        "emulator_to_f32": distance(emulated, reference(made, activation, x, routing)),
        "not_finite": int((~ours.isfinite()).sum()),
        "zeros": int((ours == 0).sum()),
        "elements": ours.numel(),
        "identical_to_emulator": int((ours == emulated).sum()),
    }
    limit = EMULATOR_LIMIT[name]
    ok = result["not_finite"] == 0 and result["to_emulator"] < limit
    ok = ok and result["ranks_to_emulator"] < limit + RANKS_ROUND and result["to_f32"] < F32_LIMIT[name]
    return {**result, "ok": ok}


def golden() -> dict[str, Any]:
    """Marlin's golden vectors: see `marlin.reproduce_golden`."""
    return marlin.reproduce_golden(GOLDEN)


def biased_by_kernel() -> dict[str, Any]:
    """What the op makes of a bias when it also multiplies by the routing weights: why `marlin` does not let it.

    A statement about vLLM, not about packed bytes: never a failure.
    """
    case = Case("vllm-marlin", "vllm", 128, 64, True, biased=True)
    made = make_layer(case, experts=4, activation=OAI)
    x, routing = inputs(case, 7, 2, 4)
    layer, where = packed_layer(made, OAI), common.device()
    own = marlin.stages(layer, x, routing, where).gemm2.float()
    by_kernel = marlin.stages(layer, x, routing, where, kernel_weighs=True).gemm2.float()
    return {"ok": True, "own_largest": float(own.abs().max()), "by_kernel_largest": float(by_kernel.abs().max())}


def quantiser(swizzled: bool) -> dict[str, Any]:
    """FlashInfer's fp4_quantize against the emulator's values, and its swizzled scales against ours."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(130, 512, generator=generator).to(torch.bfloat16)
    x[5, :16] = 0
    scale = 6 * 448 / x.abs().max().float().view(1)
    codes, block = common.quantize(x.cuda(), scale.cuda(), swizzled)
    codes, block = codes.cpu(), block.cpu().view(torch.uint8)
    if swizzled:
        _, linear = common.quantize(x.cuda(), scale.cuda(), False)
        wanted = swizzle(linear.cpu().view(torch.uint8).reshape(130, -1))
        # rows and columns of padding may hold anything
        real = swizzle(torch.ones(130, 32, dtype=torch.uint8)).bool()
        differing = int((block.reshape(wanted.shape) != wanted)[real].sum())
        return {"ok": differing == 0, "differing_scales": differing}
    from nvfp4prep.numerics import decode_e2m1, decode_e4m3, unpack_nibbles

    theirs = decode_e2m1(unpack_nibbles(codes)) * decode_e4m3(block.reshape(130, -1)).repeat_interleave(16, 1)
    ours = emulator.quantise(x.float(), scale)
    differing = int((theirs != ours).sum())
    return {"ok": differing <= ours.numel() // 1000, "differing": differing, "elements": ours.numel()}


def run_backend(name: str) -> dict[str, Any]:
    """Everything about one backend; only why not where it can't run."""
    backend = BACKENDS[name]
    problem = backend.available()
    if problem is not None:
        return {"available": problem}
    report: dict[str, Any] = {"available": None, "versions": backend.VERSIONS()}
    if name == "marlin":
        report["golden"] = attempt(golden)
        report["bias_multiplied_by_kernel"] = attempt(biased_by_kernel)
    else:
        report["quantiser"] = attempt(quantiser, False)
        report["swizzled_scales"] = attempt(quantiser, True)
    report["layers"] = [
        {"case": str(case), "tokens": tokens, **attempt(run_case, name, case, activation, tokens)}
        for case, activation in LAYERS[name]
        for tokens in TOKENS
    ]
    checks = [value for value in report.values() if isinstance(value, dict) and "ok" in value]
    report["ok"] = all(check["ok"] for check in (*checks, *report["layers"]))
    return report


def plain(value: Any) -> Any:
    """JSON has no NaN: as text."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), help="default: all")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    options = parser.parse_args()
    report = {name: run_backend(name) for name in options.backend or BACKENDS}
    text = json.dumps(plain(report), indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")
    ran = [entry for entry in report.values() if entry["available"] is None]
    if not ran:
        return 4
    return 0 if all(entry["ok"] for entry in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
