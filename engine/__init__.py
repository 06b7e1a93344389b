"""Cutaway's inference engine.

    from engine import Engine, EngineConfig, SamplingParams
    engine = Engine(EngineConfig(model="smollm2-135m"))
    engine.generate(["The capital of France is"], SamplingParams(temperature=0))[0].text

Names are loaded when they are first used: reading a saved run needs ``engine.events`` and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.version import __version__

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.events.log import EventLog
    from engine.request import CompletionOutput, RequestOutput, SamplingParams
    from engine.speculation.config import SpeculativeConfig

_HOME = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EventLog": "engine.events.log",
    "SamplingParams": "engine.request",
    "RequestOutput": "engine.request",
    "CompletionOutput": "engine.request",
    "SpeculativeConfig": "engine.speculation.config",
}

__all__ = [
    "CompletionOutput", "Engine", "EngineConfig", "EventLog", "RequestOutput", "SamplingParams", "SpeculativeConfig", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
