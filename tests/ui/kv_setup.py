"""Run by ``panel serve --setup``: an engine without a model behind the app, whose block pool and prefix index are the real ones."""

import time
from typing import Any

from engine.config import EngineConfig
from engine.events.types import CacheTimed, KnobChanged, PoolResized
from engine.kvcache.pool import BlockPool
from engine.messages import Events, LoopState, Ready
from engine.request import SamplingParams
from explorer.session import Session
from tests.explorer.kv_cache.pool_events import BYTES_PER_TOKEN, PoolSim

STEP_S = 0.04


class PoolProcess:
    """The interface of ``engine.process.EngineProcess``. Words are tokens; every request decodes one token a step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.alive = self.paused = False
        self.number = 0
        self.waiting: list[tuple[str, SamplingParams]] = []
        self.left: dict[str, int] = {}  # request -> tokens still to come

    def start(self) -> None:
        self.alive = True
        self.sim = PoolSim(self.config.num_kv_blocks or 64, self.config.block_size, max_model_len=2048)
        self.delivered = 0
        self.sim.step()
        self.ready = True

    def stop(self) -> None:
        self.alive = False

    restart = start

    def add_request(self, prompt: Any, params: SamplingParams, *, owner: str = "local", **_more: Any) -> str:
        request_id = f"req-{self.number}"
        self.number += 1
        self.sim.add(request_id, [hash(word) % 1000 for word in str(prompt).split()], owner, params.n)
        self.waiting.append((request_id, params))
        return request_id

    def add_chat(self, messages: list[dict[str, str]], params: SamplingParams, *, owner: str = "local", **_more: Any) -> str:
        return self.add_request(" ".join(each["content"] for each in messages), params, owner=owner)

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        for name, value in knobs.items():
            draining = name in ("num_kv_blocks", "block_size") and bool(self.left)
            self.sim.recorder.emit(KnobChanged, name=name, old=getattr(self.config, name), new=value, by=by, draining=draining)
        self.config = self.config.changed(**knobs)
        self._resize()

    def measure_cache(self, lengths: list[int]) -> None:
        self.sim.recorder.emit(
            CacheTimed, lengths=lengths, with_ms=[5.0] * len(lengths), without_ms=[5.0 + t / 10 for t in lengths]
        )

    def abort(self, request_id: str) -> None:
        self._end([request_id])

    def abort_owner(self, _owner: str) -> None:
        self._end(list(self.left))

    def watch(self, kind: str, **_more: Any) -> None: ...

    unwatch = update_sampling = watch

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def poll(self, timeout: float) -> list[Any]:
        time.sleep(STEP_S)
        if not self.paused:
            self._step()
        events, self.delivered = self.sim.events[self.delivered :], len(self.sim.events)
        messages: list[Any] = [Ready(events[0]), LoopState(False, 0)] if self.ready else []  # type: ignore[arg-type]
        self.ready = False
        return [*messages, Events(events)] if events else messages

    # -- its steps ---------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        pool, sim = self.sim.pool, self.sim
        self._end([name for name, left in self.left.items() if left <= 0])
        self._resize()
        draining = (pool.num_blocks, pool.block_size) != (self.config.num_kv_blocks, self.config.block_size)
        while self.waiting and not draining and pool.num_free > len(sim.tokens[self.waiting[0][0]]) // pool.block_size + 1:
            name, params = self.waiting.pop(0)
            sim.prefill(name)
            self.left[name] = params.max_tokens
            for i in range(1, params.n):
                sim.fork(name, f"{name}#{i}")
                self.left[f"{name}#{i}"] = params.max_tokens
        for name in list(self.left):
            while name in self.left and pool.num_free < 2:  # one for growth, one for a copy
                victim = list(self.left)[-1]
                sim.preempt(victim, name)
                self.waiting.insert(0, (victim, SamplingParams(max_tokens=self.left.pop(victim))))
            if name in self.left:
                sim.decode(name, 7)
                self.left[name] -= 1
        if self.left:
            sim.step()

    def _end(self, names: list[str]) -> None:
        for name in names:
            if self.left.pop(name, None) is not None:
                self.sim.finish(name)

    def _resize(self) -> None:
        blocks, size = self.config.num_kv_blocks or 64, self.config.block_size
        if self.left or (blocks, size) == (self.sim.pool.num_blocks, self.sim.pool.block_size):
            return
        self.sim.pool = BlockPool(blocks, size, self.sim.recorder)
        self.sim.recorder.emit(
            PoolResized, num_blocks=blocks, block_size=size, kv_bytes_per_block=size * BYTES_PER_TOKEN,
            kv_pool_bytes=blocks * size * BYTES_PER_TOKEN,
        )  # fmt: skip


Session._shared = Session(PoolProcess(EngineConfig(num_kv_blocks=128)))
