"""The quant method of packed routed experts in SGLang."""

from __future__ import annotations

from typing import Any

import sglang
import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, should_use_flashinfer_cutlass_moe_fp4_allgather
from sglang.srt.layers.quantization import marlin_utils_fp4, modelopt_quant
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from torch import Tensor, nn

from nvfp4prep.errors import UsageFault
from nvfp4prep.loading import PackedCheckpoint, PackedExperts, PackedLayer
from nvfp4prep.serving import Module, Running, check_module, check_running

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class PackedModelOptNvFp4FusedMoEMethod(ModelOptNvFp4FusedMoEMethod):
    """SGLang's method, which sets what its conversion leaves from a packed output. `hold` makes instances this."""

    held: PackedExperts | None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Parameters as packed, and beside them what `ModelOptNvFp4FusedMoEMethod` of SGLang 0.5.23 sets."""
        held, self.held = self.held, None
        if held is None:
            raise UsageFault(f"{layer.layer_name}: packed experts are loaded once; start SGLang again to load others")
        for name, value in held.parameters.items():
            _put(layer, name, value)
        if held.layout == "vllm-marlin":
            layer.workspace = marlin_utils_fp4.marlin_make_workspace(layer.w13_weight.device, 4)
            return
        fp4_dispatch = modelopt_quant._use_nvfp4_dispatch() or should_use_flashinfer_cutlass_moe_fp4_allgather()
        layer.dispatcher.set_quant_config({"input_global_scale": layer.w13_input_scale_quant if fp4_dispatch else None})
        if held.layout == "flashinfer-trtllm":
            layer.w13_blockscale_swizzled = layer.w13_weight_scale
            layer.w2_blockscale_swizzled = layer.w2_weight_scale
            layer.trtllm_padded_hidden_size = None
            layer.intermediate_size_per_partition = held.geometry.padded_intermediate
            return
        _put(layer, "g1_alphas_up", layer.g1_alphas.data.clone())  # kernels of one alpha
        for gemm in ("w13", "w2"):  # SGLang's own names for one tensor
            layer.register_parameter(f"{gemm}_weight_scale", getattr(layer, f"{gemm}_blockscale_swizzled"))
        if held.layout == "flashinfer-cutlass":
            from sglang.srt.layers.moe.moe_runner.flashinfer_cutlass import materialize_swiglu_params_for_cutlass

            layer._cutlass_swiglu_params = materialize_swiglu_params_for_cutlass(
                layer.moe_runner_config, int(layer.num_local_experts), layer.w13_weight.device
            )
        else:
            for gemm in ("w13", "w2"):
                _put(layer, f"{gemm}_blockscale_mma", mma_view(layer, gemm))


def mma_view(layer: Any, gemm: str) -> Tensor:
    """CuteDSL's strided view of swizzled block scales, by FlashInfer's own function, as SGLang makes it."""
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout

    weight, scale = getattr(layer, f"{gemm}_weight"), getattr(layer, f"{gemm}_blockscale_swizzled")
    found: Tensor = convert_sf_to_mma_layout(
        scale.contiguous().view(torch.uint8).reshape(-1),
        m=weight.shape[1],
        k=weight.shape[2] * 2,
        num_groups=weight.shape[0],
        sf_vec_size=16,
    )
    return found


def hold(module: Any, packed: PackedCheckpoint, layer: PackedLayer) -> None:
    """Free the parameters that a module made, and load a layer's packed ones for its method to set.

    Raises:
        UsageFault: the module, or the way SGLang runs, is not what the output is packed for.
        EnvironmentFault: I/O.
    """
    method = module.quant_method
    place = f"{packed.path}: {layer.path}"
    backend = str(method._moe_runner_backend.value)
    running = Running(
        "sglang",
        sglang.__version__,
        "flashinfer_trtllm" if backend == "flashinfer_trtllm_routed" else backend,  # one form of weights
        module.moe_tp_size,
        module.moe_ep_size,
        _DTYPES.get(module.params_dtype, str(module.params_dtype)),
    )
    check_running(packed, running)
    _check_way(module, place)
    ours = packed.packed.target.geometry(_moe(packed, layer), module.moe_tp_rank)
    inner = module.moe_tp_size * module.intermediate_size_per_partition
    if packed.layout == "flashinfer-trtllm" and module.intermediate_size_per_partition == ours.padded_intermediate:
        inner = layer.intermediate  # SGLang has rounded each rank's up
    sizes = Module(module.num_experts, module.hidden_size_unpadded, inner, module.moe_runner_config.is_gated)
    check_module(packed, layer, sizes)
    device = module.w13_weight.device
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        delattr(module, name)
    held = packed.load_experts(layer.path, (module.moe_tp_rank, module.moe_ep_rank), device)
    _check_activation(module, held, place)
    method.__class__ = PackedModelOptNvFp4FusedMoEMethod
    method.held = held


def _check_way(module: Any, place: str) -> None:
    """Refuse what makes SGLang want other weights than its conversion gives by default."""
    if module.num_fused_shared_experts:
        raise UsageFault(f"{place}: packed without shared experts; start SGLang with --disable-shared-experts-fusion")
    if get_moe_a2a_backend().is_megamoe() or module.quant_method._is_cutedsl_v1_deepep:
        raise UsageFault(f"{place}: not packed for --moe-a2a-backend {get_moe_a2a_backend().value}; use none")
    if module.quant_method._is_cutedsl_v2_standard and modelopt_quant._use_nvfp4_dispatch():
        raise UsageFault(f"{place}: not packed for dispatch in NVFP4; start SGLang without it")
    if module.quant_method.quant_config.use_per_token_activation or envs.SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16.get():
        raise UsageFault(f"{place}: packed with the checkpoint's input scales, and SGLang is told to use none of them")
    where = get_global_expert_location_metadata() if module.uses_expert_location else None
    if where is not None:
        held = where.physical_to_logical_map[module.layer_id].tolist()
        if held != list(range(module.num_experts)):
            raise UsageFault(f"{place}: packed experts stay where they are; start SGLang without EPLB's placement")


def _check_activation(module: Any, held: PackedExperts, place: str) -> None:
    """trtllm's clamp, alpha and beta are packed as config.json says; SGLang's model must mean the same."""
    if held.layout != "flashinfer-trtllm" or not held.geometry.gated:
        return
    config = module.moe_runner_config
    theirs = {
        "gemm1_clamp_limit": config.gemm1_clamp_limit or config.swiglu_limit,
        "gemm1_alpha": config.gemm1_alpha,
        "gemm1_beta": config.gemm1_alpha,  # SGLang sets beta where there is an alpha
    }
    found = {name for name, value in theirs.items() if value is not None}
    ours = {name for name in theirs if name in held.parameters}
    if found != ours:
        raise UsageFault(f"{place}: packed with {sorted(ours)}, and SGLang's model computes with {sorted(found)}")


def _moe(packed: PackedCheckpoint, layer: PackedLayer) -> Any:
    return next(moe for moe in packed.packed.layers if moe.path == layer.path)


def _put(layer: Any, name: str, value: Tensor) -> None:
    """Set a parameter, whatever stands under its name."""
    if hasattr(layer, name):
        delattr(layer, name)
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
