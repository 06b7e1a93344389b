"""What a launch checks before the kernel runs. Nothing here looks at the values of a CUDA tensor unless it is told to:
that would wait for the device."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_power_of_two(name: str, value: int, low: int, high: int) -> None:
    """ValueError unless ``value`` is a power of two in [low, high]."""
    if not isinstance(value, int) or value < 1 or value & (value - 1) or not low <= value <= high:
        raise ValueError(f"{name} must be a power of two in [{low}, {high}], got {value!r}")


def check_tensor(
    name: str,
    tensor: Any,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor | None = None,
    dense: bool = True,
) -> None:
    """ValueError unless ``tensor`` has that shape (None: any size), one of the dtypes, and the device of ``like``.

    ``dense``: contiguous; otherwise only its last dimension has to be.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    wanted = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
    if tensor.dim() != len(shape) or any(w not in (None, got) for w, got in zip(shape, tensor.shape, strict=True)):
        raise ValueError(f"{name} must have shape {wanted}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {tensor.dtype}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, as the other tensors are, got {tensor.device}")
    if dense and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())} for shape {list(tensor.shape)}")
    if not dense and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, got strides {list(tensor.stride())}")


def check_group(heads: int, kv_heads: int) -> int:
    """Query heads to a KV head. ValueError unless that is a whole number."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the query heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    return heads // kv_heads


def check_runs_here(tensor: torch.Tensor, interpreted: bool) -> None:
    """RuntimeError for tensors on the CPU in a process whose kernels are compiled ones."""
    if tensor.device.type == "cpu" and not interpreted:
        raise RuntimeError(
            "the tensors are on the CPU, where the kernels run only under Triton's interpreter: "
            "start the process with TRITON_INTERPRET=1 in its environment"
        )


def on_device(tensor: torch.Tensor) -> Any:
    """A context in which Triton launches on the device of ``tensor``."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def wants_values(tensor: torch.Tensor, validate: bool | None) -> bool:
    """Whether a launch looks at the values of its indices: where asked to, or where that does not wait for a device."""
    return tensor.device.type == "cpu" if validate is None else validate


def check_offsets(name: str, cu: torch.Tensor, total: int) -> None:
    """ValueError unless ``cu`` [B + 1] rises from 0 to ``total``. Looks at values."""
    values = cu.tolist()
    if values[0] != 0 or values[-1] != total or any(b < a for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must rise from 0 to {total}, the number of rows, got {_some(values)}")


def check_block_tables(block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int, num_blocks: int) -> None:
    """ValueError unless every block that the lengths make a kernel read is in the pool. Looks at values."""
    lengths = seq_lens.tolist()
    width = block_tables.shape[1]
    for i, (row, length) in enumerate(zip(block_tables.tolist(), lengths, strict=True)):
        need = -(-length // block_size)
        if length < 0 or need > width:
            raise ValueError(
                f"request {i}: {length} tokens in blocks of {block_size} take {need} blocks, its block table has {width}"
            )
        bad = [b for b in row[:need] if not 0 <= b < num_blocks]
        if bad:
            raise ValueError(f"request {i}: its block table points outside the pool of {num_blocks} blocks: {_some(bad)}")


def _some(values: list[Any]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
