"""Columns for the layouts of older files: what a type had then, its later fields filled with their defaults.

A layout is a column's ``signature``: ``int``, ``list[int]``, ``str?``, ``{token_id:int,text:str}``, nested as they come.
"""

import typing
from typing import Any

import msgspec

from engine.events.columns import CodecError, Column, ListColumn, OptionalColumn, StructColumn, column_of

MAX_DEPTH = 8  # of a layout; what this program writes has 3


def column_like(hint: Any, layout: str, depth: int = 0) -> Column:
    """The column that reads ``layout`` into values of ``hint``. CodecError when the two do not fit."""
    current = column_of(hint)
    if current.signature == layout:
        return current
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if depth < MAX_DEPTH:
        if origin is list and layout.startswith("list[") and layout.endswith("]"):
            return ListColumn(column_like(args[0], layout[5:-1], depth + 1))
        if type(None) in args and len(args) == 2 and layout.endswith("?"):
            return OptionalColumn(column_like(args[args[0] is type(None)], layout[:-1], depth + 1))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and layout[:1] == "{" and layout[-1:] == "}":
            return struct_like(hint, _fields(layout[1:-1]), depth + 1)
    raise CodecError(f"{layout:.60} where {current.signature:.60} is known")


def struct_like(struct: type[msgspec.Struct], fields: list[tuple[str, str]], depth: int = 0) -> StructColumn:
    """The column that reads these (name, layout) into ``struct``. CodecError for an unknown field, one named twice, or one missing."""
    hints = typing.get_type_hints(struct)
    columns = []
    for name, layout in fields:
        if name not in struct.__struct_fields__:
            raise CodecError(f"field {struct.__name__}.{name:.60} is not known here: the file was written by another version")
        try:
            columns.append(column_like(hints[name], layout, depth))
        except CodecError as error:
            raise CodecError(
                f"field {struct.__name__}.{name:.60} is not known here in this form ({error}): the file was written by another version"
            ) from None
    names = [name for name, _ in fields]
    lacking = {f.name for f in msgspec.structs.fields(struct) if f.required} - set(names)
    if lacking or len(set(names)) != len(names):
        raise CodecError(f"{struct.__name__} lacks {sorted(lacking)} or names a field twice")
    return StructColumn(struct, names, columns=columns)


def _fields(text: str) -> list[tuple[str, str]]:
    """``a:int,b:list[{c:str}]`` as pairs."""
    parts, level, start = [], 0, 0
    for i, sign in enumerate(text):
        level += (sign in "[{") - (sign in "]}")
        if sign == "," and level == 0:
            parts.append(text[start:i])
            start = i + 1
    pairs = [part.partition(":") for part in [*parts, text[start:]]]
    return [(name, layout) for name, _, layout in pairs]
