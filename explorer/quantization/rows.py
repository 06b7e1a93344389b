"""What the Quantisation page knows of a run: which weights ran when, what rounding did to each matrix, the matrices themselves. Pure."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.events.types import EngineStarted, Event, LayerQuantized, MatrixObserved, QuantizationProgress, WeightsChanged
from explorer.i18n import _

# A layer's matrices in the order in which a token meets them.
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEPT_MATRICES = 3  # each with its Hessian: 12 MB and more
KEPT_CHANGES = 64

Place = tuple[int, str]  # (layer, matrix)


@dataclass(frozen=True)
class Quantity:
    """What the map can show of a matrix. ``worse``: 1 where a larger number is a greater loss, -1 where a smaller one is."""

    key: str
    field: str  # of LayerQuantized
    title: str
    unit: str
    worse: int
    hint: str


QUANTITIES: dict[str, Quantity] = {
    q.key: q
    for q in (
        Quantity(
            "sqnr", "sqnr_db", _("SQNR"), "dB", -1,
            _("Signal to quantisation noise: 10 log10(Σw² / Σe²). 6 dB more is half the error; one bit more gives about 6 dB."),
        ),
        Quantity(
            "output", "output_error", _("output error"), "%", 1,
            _("‖X eᵀ‖ / ‖X Wᵀ‖ on calibration inputs X: what the next layer notices. It weighs a weight's error with the inputs that it meets."),
        ),
        Quantity(
            "outliers", "outlier_share", _("share of outliers"), "%", 1,
            _("Weights of the checkpoint further than 3 standard deviations from the mean (0.27 % of a normal distribution). One of them stretches the grid of its whole group."),
        ),
    )
}  # fmt: skip


def value_of(quantity: Quantity, event: LayerQuantized) -> float:
    """In the quantity's unit; inf or NaN as the event has it."""
    value = float(getattr(event, quantity.field))
    return 100 * value if quantity.unit == "%" else value


@dataclass
class Change:
    """Weights that ran from ``step`` on, and what is known of each matrix under them."""

    step: int
    event: WeightsChanged
    layers: dict[Place, LayerQuantized] = field(default_factory=dict)

    @property
    def num_weights(self) -> int:
        """Of the matrices that were told."""
        return sum(e.rows * e.columns for e in self.layers.values())


class QuantizationRows:
    """Fed with events, oldest first. ``changed`` says whether anything here moved since ``taken()``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.started: EngineStarted | None = None
        self.changes: list[Change] = []
        self.progress: list[QuantizationProgress] = []  # of weights being made; the last ones
        self.observed: OrderedDict[Place, MatrixObserved] = OrderedDict()
        self.changed = self.restarted = True

    def taken(self) -> None:
        self.changed = self.restarted = False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, EngineStarted):
                self.forget()
                self.started = event
            elif isinstance(event, WeightsChanged):
                self._changed_weights(event)
            elif isinstance(event, QuantizationProgress):
                if event.method:  # else of a measurement
                    self.progress = [*self.progress[-3:], event]
            elif isinstance(event, LayerQuantized):
                if self.changes and event.method == self.changes[-1].event.method:
                    self.changes[-1].layers[event.layer, event.name] = event
            elif isinstance(event, MatrixObserved):
                self.observed.pop((event.layer, event.name), None)
                self.observed[event.layer, event.name] = event
                while len(self.observed) > KEPT_MATRICES:
                    self.observed.popitem(last=False)
            else:
                continue
            self.changed = True

    def _changed_weights(self, event: WeightsChanged) -> None:
        last = self.changes[-1] if self.changes else None
        if last is not None and _same(last.event, event):  # said again, for somebody who came later
            return
        self.changes = [*self.changes[-KEPT_CHANGES + 1 :], Change(event.step, event)]

    # -- at a step ----------------------------------------------------------------------------------------------------------

    def at(self, step: int) -> Change | None:
        """What ran at ``step``; None where that is not known."""
        return next((change for change in reversed(self.changes) if change.step <= step), None)

    def making(self, step: int) -> QuantizationProgress | None:
        """The last word at ``step`` about weights that were being made; None where there is none, or they have run since."""
        last = next((p for p in reversed(self.progress) if p.step <= step), None)
        change = self.at(step)
        if last is None or (change is not None and change.event.time_ns >= last.time_ns):
            return None
        return last

    def matrix(self, place: Place, step: int) -> MatrixObserved | None:
        event = self.observed.get(place)
        return event if event is not None and event.step <= step else None

    def stale(self, place: Place) -> bool:
        """Whether other weights run than those that were observed with the matrix."""
        event = self.observed.get(place)
        return event is not None and bool(self.changes) and self.changes[-1].event.time_ns > event.time_ns

    @property
    def num_layers(self) -> int:
        """Of the model; 0 where it is not known."""
        model = self.started.model if self.started is not None else {}
        known = model.get("num_layers") or 0
        return int(known) or 1 + max((layer for change in self.changes for layer, _name in change.layers), default=-1)


def _same(a: WeightsChanged, b: WeightsChanged) -> bool:
    def key(e: WeightsChanged) -> Any:
        return e.method, e.group_size, e.options, e.forms, e.linear_bytes, e.other_bytes

    return key(a) == key(b) and not b.recomputed


def failed(progress: QuantizationProgress) -> bool:
    return progress.doing.startswith("failed")


def cancelled(progress: QuantizationProgress) -> bool:
    return progress.doing == "cancelled"


# -- the map ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """One cell a matrix, ready to be drawn. ``low`` and ``high``: the range of the finite values."""

    columns: dict[str, list[Any]]
    low: float
    high: float
    exact: bool  # nothing was lost anywhere: no cell has a finite value to be told from others


def heat_map(change: Change | None, quantity: Quantity) -> HeatMap:
    """The cells of the map: where (layer, matrix), the value, and everything that the pointer shows as text."""
    names = ("layer", "matrix", "row", "value", "text", "sqnr", "output", "outliers", "largest", "bits", "shape", "form")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for (layer, name), e in sorted(change.layers.items() if change is not None else (), key=_in_order):
        if name not in MATRICES:
            continue
        value = value_of(quantity, e)
        cells = (
            layer, name, MATRICES.index(name), value if math.isfinite(value) else math.nan, text_of(quantity, e),
            text_of(QUANTITIES["sqnr"], e), text_of(QUANTITIES["output"], e), text_of(QUANTITIES["outliers"], e),
            f"{e.max_error:.3g} (rms w {e.rms_weight:.3g})", f"{e.bits_per_weight:.3f}", f"{e.rows:,} × {e.columns:,}", e.form,
        )  # fmt: skip
        for column, cell in zip(columns.values(), cells):
            column.append(cell)
    finite = [v for v in columns["value"] if not math.isnan(v)]
    exact = bool(columns["value"]) and (not finite or (quantity.key == "output" and not any(finite)))
    if not finite:
        return HeatMap(columns, 0.0, 1.0, exact)
    low, high = min(finite), max(finite)
    return HeatMap(columns, low, high if high > low else low + 1.0, exact)


def _in_order(item: tuple[Place, Any]) -> tuple[int, int]:
    (layer, name), _event = item
    return layer, MATRICES.index(name) if name in MATRICES else -1


def text_of(quantity: Quantity, event: LayerQuantized) -> str:
    """The value with its unit."""
    value = value_of(quantity, event)
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return (
            _("∞ dB: nothing was lost")
            if quantity.key == "sqnr" and value > 0
            else f"{'' if value > 0 else '−'}∞ {quantity.unit}"
        )
    digits = 1 if quantity.key == "sqnr" else 2
    return f"{value:.{digits}f} {quantity.unit}"


def worst(change: Change, quantity: Quantity, count: int = 3) -> list[LayerQuantized]:
    """The matrices that lose most, those without a finite value left out."""
    there = [e for e in change.layers.values() if math.isfinite(value_of(quantity, e)) and value_of(quantity, e) != 0]
    return sorted(there, key=lambda e: -quantity.worse * value_of(quantity, e))[:count]
