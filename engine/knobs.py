"""The knobs of an engine: what changes at the next step, what waits until the running requests have drained.

The draining ones (block size, pool size, the KV cache's dtype) rebuild the pool, empty: running requests finish with the old one
first, as they began; those that wait are computed with the new one, and nothing cached is carried over.

Those of the weights (``WEIGHT_KNOBS``) change together. Running requests are computed again under the new weights; see
``engine.weights.requantizer``.
"""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.config import DRAINING_KNOBS, LIVE_KNOBS, WEIGHT_KNOBS
from engine.events.types import KnobChanged, PoolResized
from engine.speculation.config import SpeculativeConfig
from engine.weights.plan import WeightPlan, make_plan

if TYPE_CHECKING:
    from engine.engine import Engine

_log = logging.getLogger(__name__)
_FIXED_SAMPLING = (
    "n",
    "stop",
    "logprobs",
    "beam_width",
    "length_penalty",
    "early_stopping",
)  # cannot change while a request runs


def plain(value: Any) -> Any:
    """A knob's value as events carry it."""
    return asdict(value) if isinstance(value, SpeculativeConfig) else value


class Knobs:
    """Moves the knobs of one engine, and says so. See ``Engine.reconfigure`` and ``Engine.update_sampling``."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.draining: dict[str, tuple[Any, str]] = {}  # knob -> (value, who), waiting for the running requests

    def reconfigure(self, by: str, knobs: dict[str, Any], wait: bool = True) -> None:
        engine = self.engine
        allowed = LIVE_KNOBS + DRAINING_KNOBS + WEIGHT_KNOBS
        weights = {name: knobs.pop(name) for name in WEIGHT_KNOBS if name in knobs}
        plan = self._plan(weights) if weights else None
        for name in knobs:
            engine.config.changed(**{name: knobs[name]})  # an unknown name or a bad value says so itself
            if name not in allowed:
                raise ValueError(f"{name} cannot be changed while the engine runs; knobs: {', '.join(allowed)}")
        if any(knobs.get(name, 0) is None for name in DRAINING_KNOBS):
            raise ValueError("num_kv_blocks must be a number here, got None")
        coming = {name: value for name, (value, _) in self.draining.items()}  # is rebuilt together with what is asked now
        coming |= {name: value for name, value in knobs.items() if name in DRAINING_KNOBS}
        engine.parts.check_pool_fits(engine.config.changed(**coming), held=engine.kv.nbytes)
        if "speculative" in knobs:
            wanted = engine.config.changed(speculative=knobs["speculative"]).speculative
            knobs["speculative"] = wanted
            if wanted != engine.config.speculative:
                engine.speculate(wanted)  # ValueError where the drafter does not fit: before anything is changed
        for name, value in knobs.items():
            if name in DRAINING_KNOBS:
                if value == getattr(engine.config, name):
                    given_up = self.draining.pop(name, None)
                    if given_up is not None:  # it was on its way to another value: everybody sees that it stays
                        self._record(name, given_up[0], value, by)
                    continue
                self.draining[name] = (value, by)
                self._record(name, getattr(engine.config, name), value, by, draining=True)
            elif value != getattr(engine.config, name):
                old, changed = engine.config, engine.config.changed(**{name: value})
                self._record(name, plain(getattr(old, name)), plain(getattr(changed, name)), by)
                engine.config = changed
                if name != "speculative":
                    setattr(engine.scheduler, name, value)
                if name == "enable_prefix_caching" and not value:
                    engine.pool.forget_all()
        engine.scheduler.draining = bool(self.draining)
        self.apply_draining()
        engine.keep_outputs()  # of requests that no longer fit
        if plan is not None:
            self._change_weights(plan, by, wait)

    # -- weights -----------------------------------------------------------------------------------------------------------

    def _plan(self, changes: dict[str, Any]) -> WeightPlan:
        """The plan with these changes: another method comes without the old one's group size and options."""
        config = self.engine.config
        wanted = {name: getattr(config, name) for name in WEIGHT_KNOBS}
        if "quantization" in changes and changes["quantization"] != config.quantization:
            wanted = dict.fromkeys(WEIGHT_KNOBS)
        wanted |= changes
        method, group_size, options = (wanted[name] for name in WEIGHT_KNOBS)
        plan = make_plan(method, group_size, options, self.engine.model_config.num_layers)
        config.changed(**wanted)  # what is wrong with it in itself
        return plan

    def _change_weights(self, plan: WeightPlan, by: str, wait: bool) -> None:
        requantizer = self.engine.requantizer
        if plan == requantizer.plan:
            return
        if not (wait or self.engine.config.quantization == plan.method):
            self._record("quantization", self.engine.config.quantization, plan.method, by, draining=True)
        requantizer.start(plan, by, wait)

    def weights_changed(self, plan: WeightPlan, by: str) -> None:
        """Other weights run: the configuration says so from here on."""
        old = self.engine.config
        values = {
            "quantization": plan.method,
            "quantization_group_size": plan.group_size,
            "quantization_options": dict(plan.options) or None,
        }
        self.engine.config = old.changed(**values)
        for name, value in values.items():
            if name == "quantization" or value != getattr(old, name):
                self._record(name, getattr(old, name), value, by)

    def weights_stay(self, by: str) -> None:
        """Nothing came of a change that was on its way."""
        current = self.engine.config.quantization
        self._record("quantization", current, current, by)

    def _record(self, name: str, old: Any, new: Any, by: str, request_id: str | None = None, draining: bool = False) -> None:
        recorder = self.engine.recorder
        if recorder.on:
            recorder.emit(KnobChanged, name=name, old=old, new=new, by=by, request_id=request_id, draining=draining)

    def apply_draining(self) -> None:
        engine = self.engine
        if not self.draining or engine.scheduler.running:
            return
        old = engine.config
        engine.config = old.changed(**{name: value for name, (value, _) in self.draining.items()})
        try:
            engine.build_cache()
        except (RuntimeError, MemoryError):  # the memory was free when it was asked for: the knobs fall back, for all to see
            _log.exception("the KV pool stays as it is")
            engine.config = old
            engine.build_cache()
        if engine.recorder.on:
            engine.recorder.emit(
                PoolResized, num_blocks=engine.pool.num_blocks, block_size=engine.pool.block_size,
                kv_bytes_per_block=engine.kv.bytes_per_block, kv_pool_bytes=engine.kv.nbytes,
            )  # fmt: skip
        for name, (value, by) in self.draining.items():
            self._record(name, getattr(old, name) if engine.config is not old else value, getattr(engine.config, name), by)
        self.draining = {}
        for request in list(engine.scheduler.waiting):
            limit = engine.most_tokens(request)
            if request.num_tokens >= limit:
                done = request.num_tokens > request.num_prompt_tokens
                message = f"the KV pool now holds {limit} tokens, this request has {request.num_tokens}"
                engine.committer.finish(request, "length" if done else "error", message)

    def update_sampling(self, request_id: str, by: str, changes: dict[str, Any]) -> None:
        group = self.engine.unfinished(request_id)
        for name in changes:
            if name in _FIXED_SAMPLING:
                raise ValueError(f"{name} cannot be changed while a request runs")
        if changes.get("seed", 0) is None:
            raise ValueError("seed must be a number here, got None")
        new = [request.params.changed(**changes) for request in group]
        for request, params in zip(group, new, strict=True):
            for name in changes:
                old, value = getattr(request.params, name), getattr(params, name)
                if name == "seed":
                    old, request.seed = request.seed, value
                if old != value:
                    self._record(name, old, value, by, request.request_id)
            request.params = params
