"""The attention of the engine's own steps, as the log tells it. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.events.attention import AttentionTraced
from engine.events.types import EngineStarted, Event, Run, StepDone

KEPT, TRACES = 5000, 64  # steps, traces


@dataclass(frozen=True)
class Model:
    """What of the model attention depends on."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 30


class AttentionSteps:
    def __init__(self) -> None:
        self.steps: OrderedDict[int, list[Run]] = OrderedDict()
        self.traces: list[AttentionTraced] = []
        self.model = Model()
        self.started = False
        self.changed = False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, StepDone):
                if event.runs:
                    self.steps[event.step] = event.runs
            elif isinstance(event, AttentionTraced):
                self.traces = [*self.traces, event][-TRACES:]
                self.changed = True
            elif isinstance(event, EngineStarted):
                self.steps.clear()
                self.traces, self.started, self.changed = [], True, True
                self.model = _model(event)
        while len(self.steps) > KEPT:
            self.steps.popitem(last=False)

    def at(self, step: int) -> list[Run]:
        """Who ran in ``step``, or in the last one before it that ran anything; padding left out."""
        found = step if step in self.steps else max((s for s in self.steps if s <= step), default=None)
        return [run for run in self.steps[found] if not run.is_padding] if found is not None else []

    def decoding(self, step: int) -> list[int]:
        """Keys that each decoding request of a step attends to, the new token included."""
        return [run.start + run.num_tokens for run in self.at(step) if run.phase == "decode"]

    def traced(self, step: int) -> list[AttentionTraced]:
        """The traces until ``step``, oldest first."""
        return [event for event in self.traces if event.step <= step]


def _model(event: EngineStarted) -> Model:
    plain = Model()
    facts = event.model
    return Model(
        int(facts.get("num_attention_heads", plain.num_heads)),
        int(facts.get("num_kv_heads", plain.num_kv_heads)),
        int(facts.get("head_dim", plain.head_dim)),
        int(facts.get("num_layers", plain.num_layers)),
    )
