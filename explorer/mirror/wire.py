"""Specs and operations as JSON: bytes travel beside it as buffers, or inside it as base64."""

import base64
import json
from collections.abc import Callable
from typing import Any

Bytes = bytes | bytearray | memoryview


def to_message(value: Any) -> tuple[Any, list[Bytes]]:
    """(``value`` with every bytes object replaced by {"$buffer": index}, the buffers)."""
    buffers: list[Bytes] = []

    def keep(data: Bytes) -> dict[str, Any]:
        buffers.append(data)
        return {"$buffer": len(buffers) - 1}

    return _replaced(value, keep), buffers


def to_text(value: Any) -> str:
    """``value`` as JSON text in which bytes stand as {"$base64": text}. Safe inside an HTML script element."""
    plain = _replaced(value, lambda data: {"$base64": base64.b64encode(data).decode("ascii")})
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _replaced(value: Any, keep: Callable[[Bytes], Any]) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return keep(value)
    if isinstance(value, dict):
        return {str(key): _replaced(each, keep) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, keep) for each in value]
    return value
