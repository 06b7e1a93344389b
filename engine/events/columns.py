"""Columns: how lists of typed values become bytes and come back exactly.

A column is built from a type annotation: ``int``, ``float``, ``bool``, ``str``, ``bytes``, ``X | None``, ``list[X]``,
``dict[int, int]``, a msgspec struct (one column a field) and ``Any`` or ``dict[str, ...]`` (plain JSON values). Numbers are
little-endian arrays of the narrowest type that holds them, optionally as differences; lists are their lengths and one
flat column; repeated strings are stored once.

Reading trusts nothing: every length is checked against the bytes that are left before anything is allocated, and no
element takes less than a byte, so memory is bounded by a small multiple of the input.
"""

import inspect
import json
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.events.buffers import INT_CODES, INTS, CodecError, Reader, Writer, loads

__all__ = ["CodecError", "Column", "Reader", "StructColumn", "Writer", "column_of", "loads"]

MAX_PLAIN_BYTES = 8 << 20  # of one column of plain values: the form that can blow up most when it is read


class Column:
    """One type's way to bytes. ``signature`` names the layout: files carry it, and equal signatures mean equal layouts."""

    signature: str

    def write(self, w: Writer, values: list[Any]) -> None:
        raise NotImplementedError

    def read(self, r: Reader, count: int) -> list[Any]:
        raise NotImplementedError

    def check(self, r: Reader, count: int) -> None:
        """Read past the column, checking all that ``read`` checks, without making the values (where that is quicker)."""
        self.read(r, count)


def _narrow(array: np.ndarray) -> np.ndarray:
    low, high = int(array.min()), int(array.max())
    for dtype in INTS:
        info = np.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return array.astype(dtype)
    return array


class IntColumn(Column):
    signature = "int"

    def write(self, w: Writer, values: list[int]) -> None:
        if not values:
            return
        array = np.array(values)
        if (
            array.dtype.kind not in "iu"
        ):  # numpy's answer to a mixture that fits no 64-bit type, or to something that is no integer
            if not all(type(v) is int for v in values):
                raise CodecError(f"integers expected, got {[v for v in values if type(v) is not int][:3]!r}")
            w.parts.append(b"J")
            _PLAIN.write(w, values)
            return
        plain = array if array.dtype == np.uint64 else _narrow(array.astype(np.int64))
        if plain.dtype.itemsize > 1 and len(plain) > 8 and plain.dtype != np.uint64:
            wide = array.astype(np.int64)
            steps = _narrow(np.diff(wide))  # wraps, and the sum wraps back
            if steps.dtype.itemsize < plain.dtype.itemsize:
                w.parts += (b"D", int(wide[0]).to_bytes(8, "little", signed=True))
                w.array(steps)
                return
        w.parts.append(b"P")
        w.array(plain)

    def array(self, r: Reader, count: int) -> np.ndarray | list[int]:
        if not count:
            return np.zeros(0, np.int64)
        form = bytes(r.take(1))
        if form == b"P":
            return r.array(INT_CODES, count)
        if form == b"D":
            first = int.from_bytes(r.take(8), "little", signed=True)
            steps = r.array(INT_CODES, count - 1)
            out = np.empty(count, np.int64)
            out[0] = first
            np.cumsum(steps, dtype=np.int64, out=out[1:])
            out[1:] += first
            return out
        if form == b"J":
            numbers = _PLAIN.read(r, count)
            if not all(type(v) is int for v in numbers):
                raise CodecError("integers expected in a column of plain values")
            return numbers
        raise CodecError(f"unknown form of integers {form!r}")

    def read(self, r: Reader, count: int) -> list[int]:
        array = self.array(r, count)
        return array if isinstance(array, list) else array.tolist()

    def check(self, r: Reader, count: int) -> None:
        self.array(r, count)

    def indices(self, r: Reader, count: int, limit: int, what: str) -> np.ndarray:
        """Integers that must lie in [0, limit)."""
        array: np.ndarray = np.asarray(self.array(r, count))
        if count and not (array.dtype.kind in "iu" and int(array.min()) >= 0 and int(array.max()) < limit):
            raise CodecError(f"{what} out of range")
        return array


class FloatColumn(Column):
    signature = "float"

    def write(self, w: Writer, values: list[float]) -> None:
        try:
            w.array(np.array(values, np.float64))
        except (TypeError, ValueError, OverflowError) as error:
            raise CodecError(f"numbers expected: {error}") from None

    def read(self, r: Reader, count: int) -> list[float]:
        return r.array((b"f8",), count).tolist()

    def check(self, r: Reader, count: int) -> None:
        r.array((b"f8",), count)


class BoolColumn(Column):
    signature = "bool"

    def write(self, w: Writer, values: list[bool]) -> None:
        w.array(np.array(values, np.bool_))

    def read(self, r: Reader, count: int) -> list[bool]:
        return (np.frombuffer(r.array((b"b1",), count), np.uint8) != 0).tolist()


class StrColumn(Column):
    """Characters, not bytes, are counted, so that one decoding serves the whole column. Lone surrogates survive."""

    signature = "str"

    def write(self, w: Writer, values: list[str]) -> None:
        codes = {v: i for i, v in enumerate(dict.fromkeys(values))}
        if len(codes) * 2 <= len(values):
            w.parts.append(b"C")
            w.size(len(codes))
            self._write_texts(w, list(codes))
            _INT.write(w, [codes[v] for v in values])
        else:
            w.parts.append(b"T")
            self._write_texts(w, values)

    def read(self, r: Reader, count: int) -> list[str]:
        if self._coded(r):
            texts = _pieces(*self._texts(r, r.size()))
            return [texts[i] for i in _INT.indices(r, count, len(texts), "string code").tolist()]
        return _pieces(*self._texts(r, count))

    def check(self, r: Reader, count: int) -> None:
        if self._coded(r):
            size = r.size()
            _pieces(*self._texts(r, size))
            _INT.indices(r, count, size, "string code")
        else:
            text, lengths = self._texts(r, count)
            if int(lengths.sum()) != len(text):
                raise CodecError("text lengths do not add up")

    def _coded(self, r: Reader) -> bool:
        form = bytes(r.take(1))
        if form not in (b"T", b"C"):
            raise CodecError(f"unknown form of strings {form!r}")
        return form == b"C"

    def _write_texts(self, w: Writer, values: list[str]) -> None:
        try:
            blob = "".join(values).encode("utf-8", "surrogatepass")
        except TypeError as error:
            raise CodecError(f"strings expected: {error}") from None
        w.size(len(blob))
        w.parts.append(blob)
        _INT.write(w, list(map(len, values)))

    def _texts(self, r: Reader, count: int) -> tuple[str, np.ndarray]:
        """All texts in one, and their lengths."""
        try:
            text = str(r.take(r.size()), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CodecError(f"text is not UTF-8: {error}") from None
        return text, _INT.indices(r, count, len(text) + 1, "text length")


class BytesColumn(Column):
    signature = "bytes"

    def write(self, w: Writer, values: list[bytes]) -> None:
        w.size(sum(map(len, values)))
        w.parts += values
        _INT.write(w, list(map(len, values)))

    def read(self, r: Reader, count: int) -> list[bytes]:
        blob = bytes(r.take(r.size()))
        return _pieces(blob, _INT.indices(r, count, len(blob) + 1, "length"))


def _pieces(whole: Any, lengths: np.ndarray) -> list[Any]:
    """Cut ``whole`` (a str, bytes or list) into consecutive pieces; they must use it up."""
    out, pos = [], 0
    for n in lengths.tolist():
        out.append(whole[pos : pos + n])
        pos += n
    if pos != len(whole):
        raise CodecError(f"pieces of {pos} elements in all cut from {len(whole)}")
    return out


class OptionalColumn(Column):
    def __init__(self, inner: Column) -> None:
        self.inner = inner
        self.signature = f"{inner.signature}?"

    def write(self, w: Writer, values: list[Any]) -> None:
        _BOOL.write(w, [v is not None for v in values])
        self.inner.write(w, [v for v in values if v is not None])

    def read(self, r: Reader, count: int) -> list[Any]:
        there = _BOOL.read(r, count)
        values = iter(self.inner.read(r, sum(there)))
        return [next(values) if t else None for t in there]


class ListColumn(Column):
    def __init__(self, inner: Column) -> None:
        self.inner = inner
        self.signature = f"list[{inner.signature}]"

    def write(self, w: Writer, values: list[list[Any]]) -> None:
        _INT.write(w, list(map(len, values)))
        self.inner.write(w, [x for v in values for x in v])

    def read(self, r: Reader, count: int) -> list[list[Any]]:
        lengths = self._lengths(r, count)
        return _pieces(self.inner.read(r, int(lengths.sum())), lengths)

    def check(self, r: Reader, count: int) -> None:
        self.inner.check(r, int(self._lengths(r, count).sum()))

    def _lengths(self, r: Reader, count: int) -> np.ndarray:
        return _INT.indices(r, count, len(r.data) - r.pos + 1, "list length")


class IntMapColumn(Column):
    signature = "dict[int,int]"

    def write(self, w: Writer, values: list[dict[int, int]]) -> None:
        _INT_LIST.write(w, [list(v) for v in values])
        _INT.write(w, [x for v in values for x in v.values()])

    def read(self, r: Reader, count: int) -> list[dict[int, int]]:
        keys = _INT_LIST.read(r, count)
        items = iter(_INT.read(r, sum(map(len, keys))))
        return [dict(zip(k, items, strict=False)) for k in keys]  # keys first: zip must not eat one item too many


class PlainColumn(Column):
    """None, bools, ints, floats, strings, and lists and string-keyed dicts of them (a tuple comes back as a list)."""

    signature = "plain"

    def write(self, w: Writer, values: list[Any]) -> None:
        for v in values:
            _check_plain(v, 0)
        blob = json.dumps(values, separators=(",", ":")).encode()  # NaN and the infinities included
        if len(blob) > MAX_PLAIN_BYTES:
            raise CodecError(f"a column of plain values takes {len(blob)} bytes, at most {MAX_PLAIN_BYTES} are allowed")
        w.size(len(blob))
        w.parts.append(blob)

    def read(self, r: Reader, count: int) -> list[Any]:
        size = r.size()
        if size > MAX_PLAIN_BYTES:
            raise CodecError(f"a column of plain values takes {size} bytes, at most {MAX_PLAIN_BYTES} are allowed")
        values = loads(bytes(r.take(size)))
        if not isinstance(values, list) or len(values) != count:
            raise CodecError(f"a column of {count} plain values expected")
        return values


def _check_plain(value: Any, depth: int) -> None:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return
    if depth > 50:
        raise CodecError("plain values are nested more than 50 deep")
    if kind is dict and all(type(k) is str for k in value):
        for v in value.values():
            _check_plain(v, depth + 1)
    elif kind in (list, tuple):
        for v in value:
            _check_plain(v, depth + 1)
    else:
        raise CodecError(f"not a plain value: {kind.__name__} {value!r:.80}")


class StructColumn(Column):
    """One column a field.

    ``fields``: those that the bytes hold; the struct's other fields take their defaults. ``keep``: those that reading
    makes; the others are checked and get an empty value of their type (quicker, for who only wants some).
    """

    def __init__(
        self, struct: type[msgspec.Struct], fields: list[str] | None = None, keep: frozenset[str] | None = None,
        columns: list[Column] | None = None,
    ) -> None:  # fmt: skip
        hints = typing.get_type_hints(struct)
        self.struct = struct
        self.names = list(struct.__struct_fields__) if fields is None else fields
        self.columns = [column_of(hints[name]) for name in self.names] if columns is None else columns
        self.keep = frozenset(self.names) if keep is None else keep
        self.signature = "{" + ",".join(f"{n}:{c.signature}" for n, c in zip(self.names, self.columns)) + "}"
        self._build = _constructor(struct, self.names, {n: _empty_of(hints[n]) for n in self.names if n not in self.keep})
        self._getters = [operator.attrgetter(name) for name in self.names]

    def write(self, w: Writer, values: list[Any]) -> None:
        for name, column, getter in zip(self.names, self.columns, self._getters):
            try:
                column.write(w, list(map(getter, values)))  # not rows that are zipped: a tuple each would wake the collector
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from None

    def read(self, r: Reader, count: int) -> list[Any]:
        columns = []
        for name, column in zip(self.names, self.columns):
            try:
                if name in self.keep:
                    columns.append(column.read(r, count))
                else:
                    column.check(r, count)
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from None
        return list(map(self._build, *columns))

    def check(self, r: Reader, count: int) -> None:
        for column in self.columns:
            column.check(r, count)


def _constructor(struct: type[msgspec.Struct], names: list[str], empty: dict[str, Any]) -> Callable[..., Any]:
    """``struct`` from positional values of ``names`` without those of ``empty``, which are given.

    Generated, as dataclasses do: a dict a struct takes twice as long.
    """
    if tuple(names) == struct.__struct_fields__ and not empty and "*" not in str(inspect.signature(struct)):
        return struct
    assert all(n.isidentifier() for n in names)
    taken = ",".join(n for n in names if n not in empty)
    passed = ",".join(f"{n}=_empty[{n!r}]" if n in empty else f"{n}={n}" for n in names)
    return eval(f"lambda {taken}: _struct({passed})", {"_struct": struct, "_empty": empty})


_INT = IntColumn()
_FLOAT = FloatColumn()
_BOOL = BoolColumn()
_STR = StrColumn()
_PLAIN = PlainColumn()
_INT_LIST = ListColumn(_INT)
_SIMPLE: dict[Any, Column] = {
    int: _INT, float: _FLOAT, bool: _BOOL, str: _STR, bytes: BytesColumn(), Any: _PLAIN, dict[int, int]: IntMapColumn(),
}  # fmt: skip
_EMPTY: dict[Any, Any] = {int: 0, float: 0.0, bool: False, str: "", bytes: b""}


def _empty_of(hint: Any) -> Any:
    return [] if typing.get_origin(hint) is list else _EMPTY.get(hint)


def column_of(hint: Any) -> Column:
    """The column for a type annotation; TypeError for one that has none."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return ListColumn(column_of(args[0]))
    if origin is dict and args[0] is str:
        return _PLAIN
    if origin in (types.UnionType, typing.Union) and len(args) == 2 and type(None) in args:
        return OptionalColumn(column_of(args[0] if args[1] is type(None) else args[1]))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return StructColumn(hint)
    raise TypeError(f"no column for type {hint!r}")
