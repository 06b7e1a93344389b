"""Writes the checkpoints of this directory with the field's own libraries, and what those libraries say they stand for.

Run by hand, in an environment of its own (none of this is needed for the tests). Made with Python 3.11, torch 2.13.0 (CPU) and

    transformers 5.24.0, gptqmodel 7.7.0, auto-gptq 0.7.1, autoawq 0.2.9, compressed-tensors 0.20.1
    pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9    (both want an old transformers, so only one file of each is imported)

    python make.py               everything but the next
    python make.py actorder      with compressed-tensors 0.9.4, the last line of versions that reads weight_g_idx

Each directory is a checkpoint of a tiny Llama beside ``expected.safetensors``: two weights as the library dequantises them, and the
logits of transformers' model (float32) with all weights dequantised so. ``*_matrices.safetensors`` hold single matrices in the other
layouts: ``<case>/<tensor>`` and ``<case>/expected``, with the configurations in the file's metadata. Scales are made float32 before
the libraries dequantise, so that nothing is rounded and the expectation is exact.
"""

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
GROUP = 32
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TOKENS = [1, 17, 93, 4, 60, 60, 31, 8, 77, 25, 2, 50]
SHOWN = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # the tensors of a layer, and its weight dequantised, float32 [N, K]


def one_file(name: str) -> Any:
    """The module ``name`` without what its packages import on the way (which needs a transformers of their time)."""
    if name in sys.modules:
        return sys.modules[name]
    parts = name.split(".")
    path = list(importlib.util.find_spec(parts[0]).submodule_search_locations)
    for i in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:i]))
        package.__path__ = path
        sys.modules.setdefault(package.__name__, package)
        path = [f"{entry}/{parts[i]}" for entry in path]
    return importlib.import_module(name)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def grid(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (values of float16) and zero points by minimum and maximum, float32 [N, G]."""
    groups = weight.view(weight.shape[0], -1, group)
    if symmetric:
        scales = (groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).half().float()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(0, 2**bits - 1)


def auto_gptq(weight: torch.Tensor, bits: int = 4, symmetric: bool = False) -> Packed:
    """v1, columns in order."""
    module = one_file("auto_gptq.nn_modules.qlinear.qlinear_cuda_old").QuantLinear(
        bits, GROUP, weight.shape[1], weight.shape[0], False
    )
    scales, zeros = grid(weight, bits, GROUP, symmetric)
    if not symmetric:
        zeros = zeros.clamp(min=1)  # a zero of 0 less one spills over the neighbours in AutoGPTQ's v1
    module.pack(linear(weight), scales, zeros, None)
    module.scales = module.scales.float()
    expected = module(torch.eye(weight.shape[1])).t()
    return {
        "qweight": module.qweight,
        "qzeros": module.qzeros,
        "scales": module.scales.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, expected


def gptqmodel(weight: torch.Tensor, bits: int = 4, symmetric: bool = False, act_order: bool = False, v1: bool = False) -> Packed:
    """v2, or v1 as GPTQModel takes 1 from the zeros."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = weight.shape
    order = torch.argsort(torch.rand(columns, generator=torch.Generator().manual_seed(columns)))
    order = order if act_order else torch.arange(columns)
    g_idx = torch.empty(columns, dtype=torch.int32)
    g_idx[order] = torch.arange(columns, dtype=torch.int32) // GROUP
    scales, zeros = grid(weight[:, order].contiguous(), bits, GROUP, symmetric)
    module = TorchLinear(bits, GROUP, symmetric, act_order, columns, rows, False, register_buffers=True)
    module.pack_original(linear(weight), scales, zeros, g_idx)
    half = module.scales
    module.post_init()
    module.scales = half.float()
    expected = TorchLinear.__mro__[1].dequantize_weight(module).float().t()
    if v1:
        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits))
    return {"qweight": module.qweight, "qzeros": module.qzeros, "scales": half, "g_idx": g_idx}, expected


def autoawq(weight: torch.Tensor) -> Packed:
    gemm = one_file("awq.modules.linear.gemm")
    scales, zeros = grid(weight, 4, GROUP, False)
    module = gemm.WQLinear_GEMM.from_linear(
        linear(weight), 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    expected = gemm.dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, GROUP).t()
    return {"qweight": module.qweight, "qzeros": module.qzeros, "scales": module.scales}, expected


def compressed(weight: torch.Tensor, format: str, scheme: dict[str, Any], g_idx: torch.Tensor | None = None) -> Packed:
    """compressed-tensors' own scales, codes and way back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    read = QuantizationScheme(targets=["Linear"], format=format, **scheme)
    args = read.weights
    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        parts = weight.view(rows // height, height, columns // width, width)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        parts = {"tensor": weight.view(1, -1), "channel": weight[:, None], "group": weight.view(rows, -1, args.group_size or 1)}
        low, high = parts[args.strategy].amin(-1), parts[args.strategy].amax(-1)
    scale, zero = calculate_qparams(low.half(), high.half(), args)
    state = {"weight": weight.half(), "weight_scale": scale.half(), "weight_zero_point": zero.to(args.pytorch_dtype())}
    compressor = BaseCompressor.get_value_from_registry(format)
    held = compressor.compress(state, read)
    exact = compressor.decompress({**held, "weight_scale": held["weight_scale"].float()}, read)["weight"]
    return {name: tensor.contiguous() for name, tensor in held.items()}, exact


W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
F8A8 = {**W8A8, "type": "float"}
INT4 = {"weights": {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": GROUP}}
INT8 = {"weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"}, "input_activations": W8A8}
FP8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": F8A8}


def compressed_config(format: str, scheme: dict[str, Any]) -> dict[str, Any]:
    """As the library writes it into config.json."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "format": format, **scheme}},
        format=format,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    written = {"version": compressed_tensors.__version__, "sparsity_config": {}, "transform_config": {}}
    return {**written, **json.loads(config.model_dump_json())}


def checkpoint(name: str, config: dict[str, Any], pack: Callable[[torch.Tensor], Packed]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = HERE / name
    directory.mkdir(exist_ok=True)
    llama = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama).float().eval()
    tensors, shown = {}, {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if key.endswith("norm.weight") else parameter.normal_(std=0.15)
            parameter.copy_(parameter.half())
            module = key.removesuffix(".weight")
            if not module.endswith("_proj"):
                tensors[key] = parameter.half().contiguous()
                continue
            held, expected = pack(parameter.detach().clone())
            tensors.update({f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in held.items()})
            parameter.copy_(expected)
            if module in SHOWN:
                shown[key] = expected.contiguous().clone()
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_file({**shown, "logits": logits, "token_ids": torch.tensor(TOKENS)}, directory / "expected.safetensors")
    written = {**json.loads(llama.to_json_string()), "torch_dtype": "float16", "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(written, indent=1) + "\n")


def matrices(file: str, cases: dict[str, tuple[dict[str, Any], Packed]]) -> None:
    tensors = {}
    for case, (_, (held, expected)) in cases.items():
        tensors.update({f"{case}/{suffix}": tensor.contiguous() for suffix, tensor in held.items()})
        tensors[f"{case}/expected"] = expected.float().contiguous()
    save_file(tensors, HERE / file, metadata={"cases": json.dumps({case: config for case, (config, _) in cases.items()})})


def gptq_config(bits: int, symmetric: bool, act_order: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order, **more}


def scheme_of(bits: int, symmetric: bool, strategy: str, type: str = "int", **more: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": bits, "type": type, "symmetric": symmetric, "strategy": strategy, **more}}


def everything() -> None:
    made_by = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    checkpoint("gptq_v1", gptq_config(4, False, False), auto_gptq)
    v2 = gptq_config(4, False, True, checkpoint_format="gptq_v2", pack_dtype="int32", **made_by)
    checkpoint("gptq_v2_act_order", v2, lambda weight: gptqmodel(weight, act_order=True))
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    checkpoint("awq", {**awq, "modules_to_not_convert": None}, autoawq)
    for name, format, scheme in (
        ("compressed_int4", "pack-quantized", INT4),
        ("compressed_int8", "int-quantized", INT8),
        ("compressed_fp8", "float-quantized", FP8),
    ):
        checkpoint(name, compressed_config(format, scheme), lambda w, f=format, s=scheme: compressed(w, f, s))

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 0.2
    positive = weight.abs()  # every zero point is 0
    mixed = torch.where(torch.arange(32)[:, None] % 2 == 0, positive, weight)
    cases: dict[str, tuple[dict[str, Any], Packed]] = {}
    for bits in (2, 3, 4, 8):
        cases[f"auto_gptq_{bits}"] = gptq_config(bits, True, False), auto_gptq(weight, bits, True)
        config = gptq_config(bits, False, False, checkpoint_format="gptq_v2", **made_by)
        cases[f"gptqmodel_{bits}"] = config, gptqmodel(mixed, bits)
        config = gptq_config(bits, False, False, checkpoint_format="gptq", **made_by)
        cases[f"gptqmodel_{bits}_v1"] = config, gptqmodel(mixed, bits, v1=True)
    matrices("gptq_matrices.safetensors", cases)
    cases = {}
    for case, format, scheme in (
        ("packed_2", "pack-quantized", scheme_of(2, True, "group", group_size=16)),
        ("packed_3", "pack-quantized", scheme_of(3, False, "channel")),
        ("packed_4_symmetric", "pack-quantized", scheme_of(4, True, "channel")),
        ("packed_4_tensor", "pack-quantized", scheme_of(4, False, "tensor")),
        ("packed_8", "pack-quantized", scheme_of(8, False, "group", group_size=GROUP)),
        ("naive_4", "naive-quantized", scheme_of(4, False, "group", group_size=GROUP)),
        ("int_8_tensor", "int-quantized", scheme_of(8, False, "tensor")),
        ("fp8_tensor", "float-quantized", scheme_of(8, True, "tensor", "float")),
        ("fp8_block", "float-quantized", scheme_of(8, True, "block", "float", block_structure=[16, 32])),
    ):
        config = {"quant_method": "compressed-tensors", **compressed_config(format, scheme)}
        cases[case] = config, compressed(weight, format, scheme)
    matrices("compressed_matrices.safetensors", cases)


def act_order() -> None:
    import compressed_tensors
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * 0.2
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    g_idx = torch.empty(64, dtype=torch.int32)
    g_idx[order] = torch.arange(64, dtype=torch.int32) // GROUP
    scales, _ = grid(weight[:, order].contiguous(), 4, GROUP, True)
    written = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP, "actorder": "group"}
    args, zeros = QuantizationArgs(**written), torch.zeros_like(scales, dtype=torch.int8)
    codes = quantize(weight, scales, zeros, args, dtype=torch.int8, g_idx=g_idx)
    held = {
        "weight_packed": pack_to_int32(codes, 4),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": g_idx,
    }
    config = {
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": written}},
    }
    matrices(
        "compressed_act_order.safetensors",
        {"packed_4_act_order": (config, (held, dequantize(codes, scales, zeros, args, g_idx=g_idx)))},
    )


if __name__ == "__main__":
    act_order() if sys.argv[1:] == ["actorder"] else everything()
