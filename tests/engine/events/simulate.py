"""Runs without a model: the engine's real pool and scheduler, with tokens from a random generator, recorded step by step."""

import math
import random
from collections.abc import Callable

from engine.events.recorder import Recorder, Sink
from engine.events.types import (
    Candidate,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestFinished,
    RequestForked,
    RequestState,
    Run,
    Snapshot,
    StepDone,
    TokenSampled,
)
from engine.kvcache.pool import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler import Schedule, Scheduler


class Simulation:
    """Requests arrive, run, fork, are preempted and finish; every event goes to ``sinks``. ``snapshot`` is the truth."""

    def __init__(self, seed: int = 0, *, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, tokens: bool = True,
                 top: int = 2, num_running: int = 10) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.recorder = Recorder()
        self.pool = BlockPool(num_blocks, block_size, self.recorder)
        self.scheduler = Scheduler(self.pool, self.recorder, max_num_seqs=max_num_seqs, max_num_batched_tokens=32)
        self.tokens, self.top, self.num_running = tokens, top, num_running
        self.requests: list[Request] = []
        self.added = 0
        self.knobs = {"max_num_seqs": max_num_seqs}

    def start(self, sink: Sink) -> None:
        """``sink`` gets EngineStarted, a Snapshot, and every event from now on."""
        self.recorder.attach(sink)
        config = {"num_kv_blocks": self.pool.num_blocks, "block_size": self.pool.block_size, "model": "simulated"}
        self.recorder.emit(
            EngineStarted, config=config, model={"num_layers": 2}, device={"name": "none"}, versions={"cutaway": "0"},
            kv_bytes_per_block=4096, kv_pool_bytes=4096 * self.pool.num_blocks,
        )  # fmt: skip
        sink(self.snapshot())

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.recorder.step, time_ns=0, num_blocks=self.pool.num_blocks, block_size=self.pool.block_size,
            ref_counts=list(self.pool.ref_counts), cached=self.pool.index.hashes(), lru=self.pool.lru_order(),
            requests=[_state(r) for r in self.requests], knobs=dict(self.knobs),
        )  # fmt: skip

    def step(self) -> None:
        while len(self.requests) < self.num_running:
            self.add()
        if self.random.random() < 0.02:
            self.finish(self.random.choice(self.requests), "abort")
        if self.random.random() < 0.02:
            self.scheduler.max_num_seqs = new = self.random.randint(2, 8)
            self.recorder.emit(KnobChanged, name="max_num_seqs", old=self.knobs["max_num_seqs"], new=new)
            self.knobs["max_num_seqs"] = new
        self.recorder.step += 1
        schedule = self.scheduler.schedule()
        self._commit(schedule)

    def add(self) -> None:
        shared = [7] * self.random.choice((0, 0, 9, 20))
        prompt = shared + [self.random.randrange(100) for _ in range(self.random.randint(1, 30))]
        n = 3 if self.random.random() < 0.1 else 1
        request = Request(
            f"r{self.added}", prompt, SamplingParams(max_tokens=self.random.randint(1, 40), n=n), 5, owner=f"o{self.added % 3}"
        )
        request.prompt_text = f"prompt {self.added} ✓"
        self.added += 1
        self.requests.append(request)
        self.scheduler.add(request)
        self._record_added(request)

    def finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request)
        self.requests.remove(request)
        count = request.num_tokens - request.num_prompt_tokens
        self.recorder.emit(RequestFinished, request_id=request.request_id, reason=reason, num_output_tokens=count)

    def _record_added(self, r: Request) -> None:
        self.recorder.emit(
            RequestAdded, request_id=r.request_id, owner=r.owner, prompt_token_ids=list(r.token_ids), prompt_text=r.prompt_text,
            sampling={"n": r.params.n}, parent_id=r.parent_id, sample_index=r.sample_index,
        )  # fmt: skip

    def _commit(self, schedule: Schedule) -> None:
        runs = [
            Run(s.request.request_id, "prefill" if s.num_tokens > 1 else "decode", s.start, s.num_tokens, s.sample)
            for s in schedule.runs
        ]
        sampled = []
        for s in schedule.runs:
            old = s.request.num_computed_tokens
            s.request.num_computed_tokens += s.num_tokens
            self.scheduler.cache_full_blocks(s.request, old)
            if s.sample:
                sampled.append(s.request)
                if s.request.params.n > 1 and s.request.parent_id is None and s.request.num_tokens == s.request.num_prompt_tokens:
                    sampled += [self._fork(s.request, i) for i in range(1, s.request.params.n)]
        for request in sampled:
            self._sample(request)
        self.recorder.emit(
            StepDone, runs=runs, num_waiting=len(self.scheduler.waiting), num_running=len(self.scheduler.running), token_budget=32,
            max_num_seqs=self.scheduler.max_num_seqs, used_blocks=self.pool.num_used, cached_free_blocks=self.pool.num_cached_free,
            schedule_ms=0.1, forward_ms=self.random.random() * 10, sample_ms=0.2, commit_ms=0.1, step_ms=12.5, record_ms=0.01,
            flops=1e9, weight_bytes=2.7e8, kv_read_bytes=1e6, kv_write_bytes=1e4,
        )  # fmt: skip

    def _fork(self, parent: Request, index: int) -> Request:
        child = Request(f"{parent.request_id}#{index}", parent.token_ids, parent.params, 5, owner=parent.owner, parent_id=parent.request_id,
                        sample_index=index, group_id=parent.group_id, prompt_text=parent.prompt_text)  # fmt: skip
        self.requests.append(child)
        self._record_added(child)
        self.recorder.emit(
            RequestForked, request_id=child.request_id, parent_id=parent.request_id, block_ids=list(parent.block_ids),
            num_computed_tokens=parent.num_computed_tokens,
        )  # fmt: skip
        self.scheduler.fork(parent, child)
        return child

    def _sample(self, request: Request) -> None:
        token = self.random.randrange(49152)
        request.token_ids.append(token)
        count = request.num_tokens - request.num_prompt_tokens
        if self.tokens:
            self.recorder.emit(
                TokenSampled, request_id=request.request_id, position=request.num_tokens - 1, index=count - 1, token_id=token,
                text=f" w{token % 500}", logprob=-self.random.random(), rank=1, u=self.random.random(), prob=0.5, nucleus_size=3,
                nucleus_mass=0.95, entropy=math.nan if count % 7 == 0 else 1.5,
                top=[Candidate(i, f" c{i}", -0.1 * i, 0.1) for i in range(self.top)], step_ms=1.0,
            )  # fmt: skip
        if count >= request.params.max_tokens:
            self.finish(request, "length")


def _state(r: Request) -> RequestState:
    return RequestState(
        request_id=r.request_id, owner=r.owner, status=r.status, prompt_token_ids=r.token_ids[: r.num_prompt_tokens],
        output_token_ids=r.token_ids[r.num_prompt_tokens :], prompt_text=r.prompt_text, output_text="", sampling={"n": r.params.n},
        num_computed_tokens=r.num_computed_tokens, block_ids=list(r.block_ids), num_cached_tokens=r.num_cached_tokens,
        parent_id=r.parent_id, sample_index=r.sample_index,
    )  # fmt: skip


def simulate(steps: int, seed: int = 0, each_step: Callable[[Simulation], None] | None = None, **options: int) -> list[Event]:
    """The events of ``steps`` simulated steps."""
    events: list[Event] = []
    simulation = Simulation(seed, **options)  # type: ignore[arg-type]
    simulation.start(events.append)
    for _ in range(steps):
        simulation.step()
        if each_step is not None:
            each_step(simulation)
    return events


def long_events(count: int) -> list[Event]:
    """At least ``count`` events of a busy engine of 8 requests with tokens watched (5 candidates each)."""
    events: list[Event] = []
    simulation = Simulation(1, num_blocks=2048, block_size=16, top=5, num_running=12)
    simulation.start(events.append)
    while len(events) < count:
        simulation.step()
    return events
