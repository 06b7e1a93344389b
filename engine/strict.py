"""A dataclass whose unknown arguments are answered like its other mistakes."""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def strict(cls: type[T]) -> type[T]:
    """Class decorator of a keyword-only dataclass: an unknown name is a ValueError that lists the known ones, not a TypeError."""
    init: Callable[..., None] = cls.__init__
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise ValueError(f"unknown {cls.__name__} field {name!r}; known: {', '.join(known)}")
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls
