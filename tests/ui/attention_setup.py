"""Run by ``panel serve --setup``: a stand-in engine behind the app that answers a trace of its attention at once."""

from typing import Any

from engine.config import EngineConfig
from explorer.session import Session
from tests.explorer.attention.made import traced
from tests.explorer.fake import FakeProcess


class TracingProcess(FakeProcess):
    def study(self, what: str, **options: Any) -> None:
        self.calls.append((what, (options,)))
        if what == "trace_attention":
            with self._lock:
                event = traced(self.step_number, layer=options["layer"])
                fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("step", "time_ns")}
                self._emit(type(event), **fields)


Session._shared = Session(TracingProcess(EngineConfig(num_kv_blocks=128), auto=True))
