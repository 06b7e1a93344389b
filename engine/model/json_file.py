"""The JSON files of a checkpoint (config, index, tokenizer settings): read with an error that names the file."""

import json
from pathlib import Path
from typing import Any

_MAX_JSON = 1 << 26  # bytes; a config or an index is far smaller


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ValueError, naming it, where there is none."""
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    if path.stat().st_size > _MAX_JSON:
        raise ValueError(f"{path}: larger than {_MAX_JSON} bytes, which is no configuration")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
