"""So that the engine is imported where there is only Python, torch, Triton, numpy and pytest: small stand-ins for the libraries that it
imports at its start, each only where the real one is missing.

They do what a run of the engine on token ids needs: structs that hold events, how much memory is free, safetensors files read. What
they do not (sending messages between processes, tokenizers) says so when it is used.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
               "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}  # fmt: skip


def install() -> list[str]:
    """Put stand-ins for what is missing into ``sys.modules``; returns their names."""
    made = []
    for name, make in (("msgspec", _msgspec), ("psutil", _psutil), ("safetensors", _safetensors), ("tokenizers", _tokenizers)):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            for module in make():
                sys.modules[module.__name__] = module
            made.append(name)
    return made


def _missing(what: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{what} is not installed here: this part of Cutaway needs it")

    return refuse


class StructMeta(type):
    """Fields from annotations, base classes' first; their defaults from the class body."""

    def __new__(mcs, name: str, bases: tuple[type, ...], space: dict[str, Any], **options: Any) -> type:
        fields: dict[str, Any] = {}
        for base in reversed(bases):
            fields |= getattr(base, "_fields", {})
        own = [n for n, kind in space.get("__annotations__", {}).items() if "ClassVar" not in str(kind)]
        fields |= {n: space.pop(n, ...) for n in own}
        made = super().__new__(mcs, name, bases, {**space, "_fields": fields})
        made.__struct_fields__ = tuple(fields)  # type: ignore[attr-defined]
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, space)


class Struct(metaclass=StructMeta):
    _fields: ClassVar[dict[str, Any]] = {}
    __struct_fields__: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        given = {**dict(zip(self._fields, values, strict=False)), **named}
        unknown = set(given) - set(self._fields)
        if unknown or len(values) > len(self._fields):
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        for name, default in self._fields.items():
            if name not in given and default is ...:
                raise TypeError(f"{type(self).__name__} needs {name}")
            value = given.get(name, default)
            self.__dict__[name] = type(value)(value) if name not in given and isinstance(value, list | dict) else value

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


class _Field:
    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default, self.required = name, default, default is ...


def _msgspec() -> list[types.ModuleType]:
    msgspec, packed, structs = (types.ModuleType(n) for n in ("msgspec", "msgspec.msgpack", "msgspec.structs"))

    class MsgspecError(Exception):
        pass

    class Coder:
        def __init__(self, *kinds: Any, **options: Any) -> None:
            self.encode = self.decode = _missing("msgspec")

    members: dict[str, Any] = {
        "Struct": Struct, "MsgspecError": MsgspecError, "ValidationError": MsgspecError, "msgpack": packed, "structs": structs,
        "convert": _missing("msgspec"),
    }  # fmt: skip
    vars(msgspec).update(members)
    vars(packed).update(Encoder=Coder, Decoder=Coder)
    vars(structs).update(fields=lambda kind: tuple(_Field(n, d) for n, d in kind._fields.items()))
    return [msgspec, packed, structs]


def _psutil() -> list[types.ModuleType]:
    module = types.ModuleType("psutil")

    def virtual_memory() -> Any:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        return types.SimpleNamespace(total=total, available=available)

    vars(module).update(virtual_memory=virtual_memory, Process=_missing("psutil"))
    return [module]


class _File:
    """A safetensors file: 8 bytes of the header's length, the header in JSON, the numbers."""

    def __init__(self, path: Any, framework: str = "pt", device: str = "cpu") -> None:
        self.path = str(path)
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.header = json.loads(file.read(length))
        self.start = 8 + length
        self.header.pop("__metadata__", None)

    def keys(self) -> list[str]:
        return list(self.header)

    def get_slice(self, name: str) -> Any:
        found = self.header[name]
        return types.SimpleNamespace(get_dtype=lambda: found["dtype"], get_shape=lambda: found["shape"])

    def get_tensor(self, name: str) -> torch.Tensor:
        found = self.header[name]
        first, last = found["data_offsets"]
        with open(self.path, "rb") as file:
            file.seek(self.start + first)
            data = bytearray(file.read(last - first))
        return torch.frombuffer(data, dtype=SAFETENSORS[found["dtype"]]).view(found["shape"])


def _safetensors() -> list[types.ModuleType]:
    module, torch_part = types.ModuleType("safetensors"), types.ModuleType("safetensors.torch")

    class SafetensorError(Exception):
        pass

    vars(module).update(SafetensorError=SafetensorError, safe_open=_File, torch=torch_part)
    vars(torch_part).update(save_file=_missing("safetensors"), load_file=_missing("safetensors"))
    return [module, torch_part]


def _any_class(name: str) -> type:
    """A module's ``__getattr__``: a class for any name but those that Python itself asks for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": _missing("tokenizers")})


def _tokenizers() -> list[types.ModuleType]:
    module = types.ModuleType("tokenizers")
    names = ("Tokenizer", "AddedToken", "Regex")
    parts = ("models", "decoders", "normalizers", "pre_tokenizers")
    vars(module).update({name: type(name, (), {"__init__": _missing("tokenizers")}) for name in names})
    submodules = [types.ModuleType(f"tokenizers.{name}") for name in parts]
    for made in submodules:
        vars(made)["__getattr__"] = _any_class
    vars(module).update(dict(zip(parts, submodules, strict=True)))
    return [module, *submodules]


def checkpoint_folder() -> Path | None:
    """The folder that CUTAWAY_CHECKPOINT names, of config.json and safetensors. ValueError where it is none."""
    named = os.environ.get("CUTAWAY_CHECKPOINT", "")
    if not named:
        return None
    if not (Path(named) / "config.json").is_file():
        raise ValueError(f"CUTAWAY_CHECKPOINT must name a folder with config.json and safetensors, got {named!r}")
    return Path(named)
