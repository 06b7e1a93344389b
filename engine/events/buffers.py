"""Bytes out and in: the cursor that refuses to read past the end, and its counterpart."""

import json
from typing import Any

import numpy as np

INTS = (np.int8, np.int16, np.int32, np.int64)
_DTYPES: dict[bytes, np.dtype] = {
    code.encode(): np.dtype(f"<{code}") for code in ("i1", "i2", "i4", "i8", "u8", "f8", "b1")
}  # fmt: skip
INT_CODES = (b"i1", b"i2", b"i4", b"i8", b"u8")


class CodecError(ValueError):
    """A file or chunk that cannot be read (or a value that cannot be written); the message says what and where."""


class Reader:
    """A cursor over bytes that refuses to read past the end."""

    __slots__ = ("data", "pos")

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.pos = 0

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.data) - self.pos:
            raise CodecError(f"truncated: {size} bytes wanted at {self.pos}, {len(self.data) - self.pos} are left")
        self.pos += size
        return self.data[self.pos - size : self.pos]

    def size(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def array(self, codes: tuple[bytes, ...], count: int) -> np.ndarray:
        code = bytes(self.take(2))
        if code not in codes:
            raise CodecError(f"unexpected array type {code!r}, allowed: {codes}")
        dtype = _DTYPES[code]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


class Writer:
    """Collects the bytes of columns."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def size(self, value: int) -> None:
        self.parts.append(value.to_bytes(4, "little"))

    def array(self, array: np.ndarray) -> None:
        code = f"{array.dtype.kind}{array.dtype.itemsize}".encode()
        self.parts += (code, array.astype(_DTYPES[code], copy=False).tobytes())


def loads(blob: bytes) -> Any:
    """JSON from an untrusted source."""
    try:
        return json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from None
