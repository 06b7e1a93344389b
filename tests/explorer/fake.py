"""A stand-in for an engine process, for tests of the screen: it answers commands with events that are consistent, not real.

Its scheduler is the simplest that shows every phase: a batch size, a token budget, and a pool that can run out. Nothing of this ships.
"""

import itertools
import math
import random
import threading
import time
from typing import Any

from engine.config import EngineConfig
from engine.events.types import (
    BlockAllocated,
    BlockFreed,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    Run,
    Snapshot,
    StepDone,
    TokenSampled,
)
from engine.messages import Died, Events, LoopState, Ready, Rejected
from engine.request import SamplingParams

WORDS = (
    " the",
    " a",
    " river",
    " runs",
    " under",
    "\n",
    " bridge",
    ",",
    " and",
    " stone",
    " light",
    ".",
    " 时间",
    " 🙂",
    " <b>",
    " of",
)
FACTS = {"name": "test-model", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "num_parameters": 1000}


class _Request:
    def __init__(self, request_id: str, owner: str, prompt: str, params: SamplingParams) -> None:
        self.request_id, self.owner, self.prompt, self.params = request_id, owner, prompt, params
        self.tokens = list(range(max(1, len(prompt) // 4)))
        self.computed = 0
        self.outputs = 0
        self.blocks: list[int] = []
        self.random = random.Random(params.seed or request_id)


class FakeProcess:
    """The interface of ``engine.process.EngineProcess``, with ``advance(steps)`` instead of a loop unless ``auto``."""

    def __init__(self, config: EngineConfig | None = None, *, auto: bool = False, step_s: float = 0.02) -> None:
        self.config = config or EngineConfig(num_kv_blocks=128)
        self.auto, self.step_s = auto, step_s
        self.alive = self.paused = False
        self.calls: list[tuple[str, Any]] = []
        self._lock = threading.RLock()
        self._messages: list[Any] = []
        self._ids = itertools.count()
        self.last_step = 0

    # -- the handle's interface ------------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._lock:
            self.alive, self.step_number, self.waiting, self.running = True, 0, [], []
            self.free = list(range(self.config.num_kv_blocks or 128))
            self.refs = [0] * len(self.free)
            c = self.config
            knobs = {n: getattr(c, n) for n in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size")}
            started = self._event(
                EngineStarted, config=c.as_dict(), model=FACTS, device={"device": "cpu", "dtype": "float32", "why": "a test"},
                versions={}, kv_bytes_per_block=1024, kv_pool_bytes=1024 * len(self.free),
            )  # fmt: skip
            snapshot = self._event(
                Snapshot, num_blocks=len(self.free), block_size=c.block_size, ref_counts=self.refs.copy(), cached={}, lru=[],
                requests=[], knobs={**knobs, "num_kv_blocks": len(self.free), "enable_chunked_prefill": True},
            )  # fmt: skip
            self._messages += [Ready(started), Events([started, snapshot])]

    restart = start

    def stop(self) -> None:
        self.alive = False

    def die(self, message: str) -> None:
        with self._lock:
            self.alive = False
            self._messages.append(Died(message, -9, "", []))

    def poll(self, timeout: float) -> list[Any]:
        if self.auto and self.alive and not self.paused:
            self.advance(1)
            time.sleep(self.step_s)
        elif timeout:
            time.sleep(min(timeout, 0.02))
        with self._lock:
            messages, self._messages = self._messages, []
        return messages

    def add_request(self, prompt: Any, params: SamplingParams, *, owner: str = "local", **_more: Any) -> str:
        with self._lock:
            request_id = f"r{next(self._ids)}"
            text = prompt if isinstance(prompt, str) else str(prompt)
            if len(text) > 100_000:
                self._messages.append(
                    Rejected("AddRequest", request_id, f"the prompt has {len(text):,} characters; 2,048 tokens fit")
                )
                return request_id
            request = _Request(request_id, owner, text, params)
            self.waiting.append(request)
            facts = {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "max_tokens": params.max_tokens,
                "seed": params.seed or 1,
            }
            self._emit(
                RequestAdded,
                request_id=request_id,
                owner=owner,
                prompt_token_ids=request.tokens,
                prompt_text=text,
                sampling=facts,
            )
            return request_id

    def add_chat(self, messages: list[dict[str, str]], params: SamplingParams, *, owner: str = "local", **_more: Any) -> str:
        return self.add_request("".join(f"<|{each['role']}|>{each['content']}" for each in messages), params, owner=owner)

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))
        with self._lock:
            for request in [r for r in (*self.running, *self.waiting) if r.request_id == request_id]:
                self._finish(request, "abort")

    def abort_owner(self, owner: str) -> None:
        self.calls.append(("abort_owner", owner))
        with self._lock:
            for request in [r for r in (*self.running, *self.waiting) if r.owner == owner]:
                self._finish(request, "abort")

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        self.calls.append(("reconfigure", (by, knobs)))
        with self._lock:
            for name, value in knobs.items():
                self._emit(KnobChanged, name=name, old=getattr(self.config, name), new=value, by=by)
            self.config = self.config.changed(**knobs)

    def update_sampling(self, request_id: str, *, by: str = "", **changes: Any) -> None:
        self.calls.append(("update_sampling", (request_id, changes)))

    def watch(self, kind: str, **more: Any) -> None:
        self.calls.append(("watch", kind))

    def unwatch(self, kind: str) -> None:
        self.calls.append(("unwatch", kind))

    def observe(self, on: bool) -> None:
        self.calls.append(("observe", on))

    def measure_cache(self, lengths: list[int]) -> None:
        self.calls.append(("measure_cache", lengths))

    def study(self, what: str, **options: Any) -> None:
        self.calls.append(("study", (what, options)))

    def pause(self) -> None:
        self.paused = True
        self._messages.append(LoopState(True, self.step_number))

    def resume(self) -> None:
        self.paused = False
        self._messages.append(LoopState(False, self.step_number))

    def step(self, n: int = 1) -> None:
        self.advance(n)

    # -- its steps ---------------------------------------------------------------------------------------------------------

    def advance(self, steps: int) -> None:
        with self._lock:
            for _ in range(steps):
                if self.waiting or self.running:
                    self._step()

    def _step(self) -> None:
        self.step_number += 1
        budget = self.config.max_num_batched_tokens
        runs: list[Run] = []
        while self.waiting and len(self.running) < self.config.max_num_seqs and len(self.free) > 2:
            self.running.append(self.waiting.pop(0))
        for request in list(self.running):
            if request not in self.running:
                continue
            left = len(request.tokens) + request.outputs - request.computed
            count = min(left, budget)
            if count == 0 or not self._room(request, request.computed + count):
                continue
            budget -= count
            sampled = count == left
            phase = "decode" if request.computed >= len(request.tokens) else "prefill"
            runs.append(Run(request.request_id, phase, request.computed, count, sampled))
            request.computed += count
            if sampled:
                self._sample(request)
        for request in [r for r in self.running if r.outputs >= r.params.max_tokens]:
            self._finish(request, "length")
        ms = 4.0 + len(runs)
        self._emit(
            StepDone, runs=runs, num_waiting=len(self.waiting), num_running=len(self.running),
            token_budget=self.config.max_num_batched_tokens, max_num_seqs=self.config.max_num_seqs,
            used_blocks=sum(1 for r in self.refs if r), cached_free_blocks=0, schedule_ms=0.1, forward_ms=ms - 0.5, sample_ms=0.3,
            commit_ms=0.1, step_ms=ms, record_ms=0.05, flops=1e9, weight_bytes=1e8, kv_read_bytes=1e6, kv_write_bytes=1e4,
        )  # fmt: skip
        self.last_step = self.step_number

    def _room(self, request: _Request, tokens: int) -> bool:
        need = math.ceil(tokens / self.config.block_size) - len(request.blocks)
        while need > len(self.free):
            victim = self.running[-1]
            self._give_back(victim)
            victim.computed = 0
            self.running.remove(victim)
            self.waiting.insert(0, victim)
            self._emit(RequestPreempted, request_id=victim.request_id, num_computed_tokens=0, for_request_id=request.request_id)
            if victim is request:
                return False
        if need > 0:
            taken, self.free = self.free[:need], self.free[need:]
            for block in taken:
                self.refs[block] = 1
            self._emit(BlockAllocated, request_id=request.request_id, first_index=len(request.blocks), block_ids=taken)
            request.blocks += taken
        return True

    def _sample(self, request: _Request) -> None:
        p = request.random.betavariate(1.2, 0.6)
        self._emit(
            TokenSampled, request_id=request.request_id, position=len(request.tokens) + request.outputs, index=request.outputs,
            token_id=request.random.randrange(len(WORDS)), text=request.random.choice(WORDS), logprob=math.log(max(p, 1e-5)),
            rank=1 if p > 0.5 else 2, u=0.5, prob=p, nucleus_size=3, nucleus_mass=0.95, entropy=1.0, step_ms=6.0,
        )  # fmt: skip
        request.outputs += 1

    def _finish(self, request: _Request, reason: str) -> None:
        self._give_back(request)
        (self.running if request in self.running else self.waiting).remove(request)
        self._emit(RequestFinished, request_id=request.request_id, reason=reason, num_output_tokens=request.outputs)

    def _give_back(self, request: _Request) -> None:
        if request.blocks:
            for block in request.blocks:
                self.refs[block] = 0
            self._emit(BlockFreed, request_id=request.request_id, block_ids=request.blocks, ref_counts=[0] * len(request.blocks))
            self.free += request.blocks
            request.blocks = []

    def _event(self, kind: type[Event], **fields: Any) -> Event:
        return kind(step=self.step_number, time_ns=time.monotonic_ns(), **fields)

    def _emit(self, kind: type[Event], **fields: Any) -> None:
        self._messages.append(Events([self._event(kind, **fields)]))
