"""Naive packers of each layout, one code at a time, and one linear layer in a safetensors file of its own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.model.safetensors_file import open_tensors
from engine.quantization.base import QuantizedWeight
from engine.quantization.external import open_quantized, read_layout

DATA = Path(__file__).parents[3] / "data" / "quantized"
NAME = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shape: tuple[int, int], name: str = NAME
) -> QuantizedWeight:
    """The layer ``name`` whose ``tensors`` (by suffix) are written to a file, read back as ``config`` says."""
    save_file({f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    _, found = open_tensors(directory)
    layout = read_layout({"quantization_config": config}, directory / "config.json", found)
    assert layout is not None
    weights, left = open_quantized(layout, found, {f"{name}.weight": shape})
    assert not left, left
    return weights[f"{name}.weight"]()


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Each row of ``codes`` as one long integer, its first code lowest, cut into int32 words: [rows, ceil(columns bits / 32)]."""
    count = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * j) for j, code in enumerate(row))
        rows.append([(number >> (32 * w)) & 0xFFFFFFFF for w in range(count)])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).astype(np.int32)).view(len(rows), count)


def gptq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray, bits: int, v2: bool
) -> dict[str, torch.Tensor]:
    """``codes`` [N, K], ``zeros`` and ``scales`` [N, G], ``groups`` [K]."""
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    return {
        "qweight": words(codes, bits).t(),
        "qzeros": words(stored.T, bits),
        "scales": torch.from_numpy(scales.T.astype(np.float16)),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, torch.Tensor]:
    """``codes`` [N, K], ``zeros`` and ``scales`` [N, G]; N a multiple of 8."""
    order = [8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(codes.shape[0])]
    return {
        "qweight": words(codes.T[:, order], 4),
        "qzeros": words(zeros.T[:, order], 4),
        "scales": torch.from_numpy(scales.T.astype(np.float16)),
    }


def packed(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, bits: int) -> dict[str, torch.Tensor]:
    """compressed-tensors: ``codes`` [N, K] already offset, ``zeros`` likewise, ``scales`` [N, G]."""
    held = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales.astype(np.float16)),
        "weight_shape": torch.tensor(codes.shape),
    }
    return held if zeros is None else {**held, "weight_zero_point": words(zeros.T, bits).t()}


def dequantized(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    """(code - zero) * scale in float64, one weight at a time; exact in float32 where scales are float16."""
    weight = np.empty(codes.shape)
    for n, k in np.ndindex(*codes.shape):
        weight[n, k] = (int(codes[n, k]) - int(zeros[n, groups[k]])) * float(np.float16(scales[n, groups[k]]))
    return torch.from_numpy(weight.astype(np.float32))


def cases(file: str) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]]:
    """Of each case that a library wrote into ``file``: configuration, tensors, and the weight as the library dequantises it."""
    found = {}
    with safe_open(DATA / file, framework="pt") as handle:
        keys = list(handle.keys())
        for case, config in json.loads(handle.metadata()["cases"]).items():
            mine = [key for key in keys if key.startswith(f"{case}/")]
            tensors = {key.removeprefix(f"{case}/"): handle.get_tensor(key) for key in mine}
            expected = tensors.pop("expected")
            found[case] = config, tensors, expected
    return found
