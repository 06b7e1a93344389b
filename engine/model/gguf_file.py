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
            count = math.prod(info.shape)
            return torch.frombuffer(self._data, dtype=dtype, count=count, offset=info.offset).view(info.shape)
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return torch.from_numpy(dequantize(raw, info.type_name)).view(info.shape)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2048  # blocks unpacked at a time, so that what lies between stays in the CPU's cache


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """uint8 blocks, flat -> float32 values, flat.

    The 32-element types are unpacked here, several times faster than by the gguf library and to the same bits; the K types,
    of 256 elements, by the library. In numpy, not torch: its threads would only wait for each other on pieces this small.
    """
    if type_name not in _UNPACK:
        import gguf  # costs a quarter of a second, which a file without K types does not pay

        kind = gguf.GGMLQuantizationType[type_name]
        return gguf.quants.dequantize(raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]), kind).reshape(-1)
    unpack, block_bytes = _UNPACK[type_name]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), 32), np.float32)
    for start in range(0, len(blocks), _CHUNK):
        unpack(blocks[start : start + _CHUNK], values[start : start + _CHUNK])
    return values.reshape(-1)


def _unpack_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block: float16 scale, 32 int8. value = scale * q."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]), out=out)


def _unpack_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block: float16 scale, 16 bytes of two 4-bit numbers. value = scale * (q - 8)."""
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _halves(blocks[:, :2])


def _unpack_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """A block: float16 scale and minimum, 16 bytes of two 4-bit numbers. value = scale * q + minimum."""
    scales = _halves(blocks[:, :4])
    _nibbles(blocks[:, 4:], out)
    out *= scales[:, :1]
    out += scales[:, 1:]


_UNPACK = {"Q8_0": (_unpack_q8_0, 34), "Q4_0": (_unpack_q4_0, 18), "Q4_1": (_unpack_q4_1, 20)}


def _halves(raw: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2n] -> the n float16 numbers of each block, as float32 [blocks, n]."""
    return raw.copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """uint8 [blocks, 16] -> out, float32 [blocks, 32]: the low halves of all bytes, then the high halves."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


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
            return self.strings(count, key)
        if type_id not in _SCALARS:
            raise ValueError(f"{self.path}: metadata {key!r} is an array of type {type_id}, which is not supported")
        dtype = np.dtype("<" + _SCALARS[type_id])
        self.expect(count, dtype.itemsize, f"values of {key!r}")
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += count * dtype.itemsize
        return values

    def strings(self, count: int, key: str) -> list[str]:
        """``count`` strings. A loop of its own: a vocabulary has hundreds of thousands."""
        self.expect(count, 8, f"strings of {key!r}")
        data, position, end = self.data, self.position, len(self.data)
        length_of = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_of(data, position)
                start = position + 8
                position = start + length
                if position > end:
                    raise ValueError(f"{self.path}: string {len(found)} of {key!r} has {length} bytes: truncated or damaged")
                found.append(data[start:position].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: string {len(found)} of {key!r} is damaged: {error}") from error
        self.position = position
        return found
