"""Reading GGUF files (versions 2 and 3, little-endian): header, metadata, tensors as torch tensors.

Nothing in the file is trusted: every count and offset is checked against the file's size before memory is taken.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

# GGUF value type -> struct code. Strings (8) and arrays (9) have their own readers.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class _TensorType:
    name: str
    block: int  # elements a block holds
    nbytes: int  # bytes a block takes


_TYPES = {
    0: _TensorType("F32", 1, 4),
    1: _TensorType("F16", 1, 2),
    2: _TensorType("Q4_0", 32, 18),
    3: _TensorType("Q4_1", 32, 20),
    8: _TensorType("Q8_0", 32, 34),
    12: _TensorType("Q4_K", 256, 144),
    13: _TensorType("Q5_K", 256, 176),
    14: _TensorType("Q6_K", 256, 210),
    30: _TensorType("BF16", 1, 2),
}
SUPPORTED_TYPES = tuple(sorted(kind.name for kind in _TYPES.values()))


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file. ``shape`` is torch's order, the reverse of GGUF's."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # bytes from the start of the file
    nbytes: int


class GGUFFile:
    """A GGUF file, mapped into memory. ``metadata``: numbers, strings, lists of strings, numpy arrays of numbers.

    ValueError, naming the file, for anything that is not a whole and well-formed GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != b"GGUF":
                raise ValueError(f"{self.path}: not a GGUF file (no GGUF header)")
            # A private writable mapping: torch may view it, and a write would never reach the file.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        cursor = _Cursor(self._data, self.path)
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3, little-endian")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = self._read_metadata(cursor, num_values)
        self.tensors = self._read_tensor_infos(cursor, num_tensors)

    def _read_metadata(self, cursor: "_Cursor", count: int) -> dict[str, Any]:
        cursor.expect(count, 13, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string("a metadata key")
            if key in metadata:
                raise ValueError(f"{self.path}: metadata key {key!r} occurs twice")
            metadata[key] = cursor.value(cursor.scalar("I"), key)
        return metadata

    def _read_tensor_infos(self, cursor: "_Cursor", count: int) -> dict[str, TensorInfo]:
        cursor.expect(count, 24, "tensors")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        found = []
        for _ in range(count):
            name = cursor.string("a tensor name")
            num_dims = cursor.scalar("I")
            if not 1 <= num_dims <= 4:
                raise ValueError(f"{self.path}: tensor {name!r} has {num_dims} dimensions, allowed are 1 to 4")
            shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
            found.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in found:
            if name in tensors:
                raise ValueError(f"{self.path}: tensor {name!r} occurs twice")
            tensors[name] = self._tensor_info(name, shape, type_id, start + offset)
        return tensors

    def _tensor_info(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        kind = _TYPES.get(type_id)
        if kind is None:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {_type_name(type_id)}, which is not supported; "
                f"supported: {', '.join(SUPPORTED_TYPES)}"
            )
        if shape[-1] % kind.block:
            raise ValueError(
                f"{self.path}: tensor {name!r} of shape {list(shape)} does not divide into {kind.name} blocks of {kind.block}"
            )
        nbytes = math.prod(shape) // kind.block * kind.nbytes
        if offset + nbytes > len(self._data):
            raise ValueError(
                f"{self.path}: tensor {name!r} ends at byte {offset + nbytes}, but the file has {len(self._data)}: truncated or damaged"
            )
        return TensorInfo(name, shape, kind.name, offset, nbytes)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor's values: float32 [shape], or float16/bfloat16 where the file stores that (then without a copy)."""
        info = self.tensors[name]
        dtype = _PLAIN.get(info.type_name)
        if dtype is not None:
            flat = (
                torch.frombuffer(self._data, dtype=dtype, count=math.prod(info.shape), offset=info.offset)
                if info.nbytes
                else torch.empty(0)
            )
            return flat.view(info.shape)
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return dequantize(raw, info.type_name).view(info.shape)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: torch.Tensor, type_name: str) -> torch.Tensor:
    """uint8 blocks -> float32 values, flat. The 32-element types are unpacked by torch, which is several times
    faster than the gguf library at the same bits; the K types, of 256 elements, by the library."""
    if type_name == "Q8_0":  # a block: float16 scale, 32 int8
        blocks = raw.view(-1, 34)
        return (blocks[:, 2:].view(torch.int8) * _halves(blocks[:, :2])).flatten()
    if type_name == "Q4_0":  # a block: float16 scale, 16 bytes of two 4-bit values; value = scale * (q - 8)
        blocks = raw.view(-1, 18)
        return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks[:, :2])).flatten()
    if type_name == "Q4_1":  # a block: float16 scale and minimum, 16 bytes of two 4-bit values; value = scale * q + minimum
        blocks = raw.view(-1, 20)
        scales = _halves(blocks[:, :4])
        return _nibbles(blocks[:, 4:]).mul_(scales[:, :1]).add_(scales[:, 1:]).flatten()
    import gguf  # costs a quarter of a second, which a file without K types does not pay

    kind = gguf.GGMLQuantizationType[type_name]
    rows = raw.numpy().reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    return torch.from_numpy(gguf.quants.dequantize(rows, kind)).flatten()


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 2n] -> the n float16 values in each, as float32 [blocks, n]."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 16] -> float32 [blocks, 32]: low halves of all bytes first, then the high halves."""
    values = torch.empty(packed.shape[0], 32, dtype=torch.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _type_name(type_id: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return str(type_id)


class _Cursor:
    """Reads the file from front to back; running past its end is a ValueError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 4

    def expect(self, count: int, smallest: int, what: str) -> None:
        """Refuse ``count`` items of at least ``smallest`` bytes each where the rest of the file cannot hold them."""
        if count * smallest > len(self.data) - self.position:
            raise ValueError(
                f"{self.path}: {count} {what} do not fit in the {len(self.data) - self.position} bytes that are left: truncated or damaged"
            )

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.expect(1, size, "value")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q")
        self.expect(length, 1, f"bytes of {what}")
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from error

    def value(self, type_id: int, key: str) -> Any:
        if type_id == _STRING:
            return self.string(key)
        if type_id == _ARRAY:
            return self.array(key)
        if type_id not in _SCALARS:
            raise ValueError(f"{self.path}: metadata {key!r} has unknown type {type_id}")
        return self.scalar(_SCALARS[type_id])

    def array(self, key: str) -> Any:
        type_id, count = self.scalar("I"), self.scalar("Q")
        if type_id == _STRING:
            self.expect(count, 8, f"strings of {key!r}")
            return [self.string(key) for _ in range(count)]
        if type_id not in _SCALARS:
            raise ValueError(f"{self.path}: metadata {key!r} is an array of type {type_id}, which is not supported")
        dtype = np.dtype("<" + _SCALARS[type_id])
        self.expect(count, dtype.itemsize, f"values of {key!r}")
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += count * dtype.itemsize
        return values
