"""A quantised weight as numbers, and the product with it."""

import torch


def naive_dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    *,
    bits: int,
    group_size: int,
    zero_points: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
    levels: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """[N, K] in ``dtype``: level(code) * scale + minimum, as ``dequant_matmul`` has it."""
    number = codes if bits == 8 else torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :columns]
    group = torch.arange(columns) // group_size
    if levels is not None:
        level = levels.to(dtype)[number.long()]
    elif zero_points is not None:
        level = number.to(dtype) - zero_points.to(dtype)[:, group]
    else:
        level = number.to(dtype) - (0 if minima is not None else 1 << (bits - 1))
    weight = level * scales.to(dtype)[:, group]
    return weight if minima is None else weight + minima.to(dtype)[:, group]


def naive_dequant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K] as ``naive_dequantize`` gives it -> x W^T + bias [T, N], in the dtype of the weight."""
    out = x.to(weight.dtype) @ weight.T
    return out if bias is None else out + bias.to(weight.dtype)
