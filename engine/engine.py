"""The engine: requests in, tokens out, one step at a time. ``step()`` is schedule, (draft,) run, commit.

Not thread-safe: one thread owns an Engine. For an engine in a process of its own see ``engine.process``.
"""

import logging
import time
from typing import Any

from engine import reporting
from engine.admission import Admission
from engine.branching import History
from engine.committer import Committer, StepOutput
from engine.config import EngineConfig
from engine.events.recorder import Recorder
from engine.generation import Generation
from engine.interrupts import interrupts_held
from engine.knobs import Knobs
from engine.kvcache.index import make_index
from engine.kvcache.pool import BlockPool
from engine.kvcache.swap import SwapSpace
from engine.loading import Parts, load_parts, make_kv_cache, make_runner
from engine.request import Request
from engine.scheduler import Schedule, Scheduler
from engine.speculation.config import SpeculativeConfig
from engine.speculation.speculator import SpecDecodeMetrics, Speculator
from engine.studying import Studying
from engine.watching import Watching
from engine.weights.make import make_weights
from engine.weights.plan import make_plan
from engine.weights.requantizer import Requantizer
from engine.weights.studies import Studies

_log = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.005  # that a step lets pass when a batch is not full yet


class Engine(Admission, Generation, Watching, Studying):
    """A checkpoint, its KV pool and the requests that share them.

    >>> engine = Engine(EngineConfig(model="smollm2-135m", max_num_seqs=8))
    >>> engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text
    """

    def __init__(self, config: EngineConfig | None = None, *, parts: Parts | None = None) -> None:
        """``parts`` takes what ``load_parts`` gave before (tests share one loaded model). ValueError for a model that cannot run."""
        self.parts = parts if parts is not None else load_parts(config or EngineConfig())
        self.config = self.parts.resolve(config or EngineConfig())
        plan = make_plan(self.config.quantization, self.config.quantization_group_size, self.config.quantization_options,
                         self.parts.model_config.num_layers)  # fmt: skip
        if plan != self.parts.weights.plan:
            self.parts.install(make_weights(self.parts, plan))
        self.model_config = self.parts.model_config
        self.tokenizer = self.parts.tokenizer
        self.recorder = Recorder()
        self.requantizer = Requantizer(self)
        self.studies = Studies(self)
        self._next_id = 0
        self.knobs = Knobs(self)
        self.history = History()
        self._undelivered: list[StepOutput] = []
        self.kv: Any = None
        self.runner: Any = None
        self._requests: dict[str, list[Request]] = {}  # unfinished, by group: the siblings of n > 1
        self.speculator: Speculator | None = None
        self.forward_ms = 0.0
        self.spec_decode_metrics = SpecDecodeMetrics()
        self.build_cache()
        self.committer = Committer(self)

    def build_cache(self) -> None:
        """An empty pool and the tensors behind it, for the current block size and pool size."""
        assert self.config.num_kv_blocks is not None
        old = getattr(self, "scheduler", None)
        if old is not None and old.swap is not None:
            old.swap.drop_all("pool rebuilt")
            old.swap = None
        self.kv = self.runner = None  # frees the old tensors before the new ones are made
        self.kv = make_kv_cache(self.parts, self.config)
        self.runner = make_runner(self.parts, self.kv, self.config)
        self.studies.tracing.attach_again()
        index = make_index(self.config.prefix_index, self.config.block_size)
        self.pool = BlockPool(self.config.num_kv_blocks, self.config.block_size, self.recorder, index)
        self.kv.held_by(self.pool.ref_counts)
        self.scheduler = Scheduler(
            self.pool,
            self.recorder,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            enable_prefix_caching=self.config.enable_prefix_caching,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
            batching=self.config.batching,
            batching_timeout_ms=self.config.batching_timeout_ms,
            scheduling_policy=self.config.scheduling_policy,
            watermark=self.config.watermark,
            max_num_waiting=self.config.max_num_waiting,
            preemption_mode=self.config.preemption_mode,
            swap=SwapSpace(self.kv, self.recorder, self.config.swap_space),
            partial_hits=self.kv.any_offset,
        )
        if old is not None:
            self.scheduler.waiting = old.waiting
            for request in old.waiting:
                request.block_hashes = []  # another block size, other blocks
        self.speculate(self.config.speculative)

    def speculate(self, config: SpeculativeConfig | None) -> None:
        """From the next step on drafts come from this drafter; None: there are none. ValueError where it does not fit: nothing changes."""
        speculator = None if config is None else Speculator(self, config, self.spec_decode_metrics)
        self.speculator = self.scheduler.speculator = speculator

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, under vLLM's names."""
        return self.spec_decode_metrics.as_dict()

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """One step of everything that is queued. Returns what each request gained; [] when there was nothing to do.

        Ctrl-C waits for the end of the step; what the step gave is then kept for the next one.
        """
        new = self._step()
        outputs, self._undelivered = self._undelivered, []
        return outputs + new

    def step_and_keep(self) -> None:
        """One step whose outputs are for the next to ask."""
        self._undelivered += self._step()

    def _step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        try:
            with interrupts_held():
                outputs = self._whole_step()
        except KeyboardInterrupt:
            self._undelivered += outputs
            raise
        return outputs

    def _whole_step(self) -> list[StepOutput]:
        if self.busy_beside_steps:
            self.poll()
        t0 = time.perf_counter()
        if not self.scheduler.running and not self.scheduler.waiting:
            return self.committer.take_outputs()
        wait_s = self.scheduler.batcher.ready_in_s()
        if wait_s > 0:  # a dynamic batch is gathered; not for long at a time, since more may come
            time.sleep(min(wait_s, LONGEST_WAIT_S))
            return self.committer.take_outputs()
        self.recorder.step += 1
        if self.speculator is not None:
            self.speculator.begin_step()
        schedule = self.scheduler.schedule()
        t1 = time.perf_counter()
        try:
            self._copy_blocks(schedule)
            if self.speculator is not None:
                self.speculator.draft(schedule)
            t2 = time.perf_counter()
            logits, features = self._run(schedule)
        except BaseException as error:
            self.scheduler.batcher.end_padding(schedule)
            self._fail(schedule, error)
            raise
        t3 = time.perf_counter()
        self.forward_ms = 1e3 * (t3 - t2)  # of the last pass
        self.scheduler.batcher.end_padding(schedule)
        outputs, t4 = self.committer.commit(schedule, logits)
        if self.speculator is not None:
            self.speculator.observe(schedule, logits, features, step_ms=1e3 * (time.perf_counter() - t0))
        if self.recorder.on:
            reporting.record_step(self, schedule, (t0, t1, t2, t3, t4, time.perf_counter()))
        self.knobs.apply_draining()
        return outputs + self.committer.take_outputs()

    def _copy_blocks(self, schedule: Schedule) -> None:
        copies = schedule.copies + schedule.part_copies
        if copies:
            self.kv.copy_blocks([src for src, _ in copies], [dst for _, dst in copies])
        if schedule.copies and self.speculator is not None:  # of a part it would not know how much is good
            self.speculator.drafter.copy_blocks([src for src, _ in schedule.copies], [dst for _, dst in schedule.copies])
        self.scheduler.bring_back(schedule)

    def _run(self, schedule: Schedule) -> tuple[Any, Any]:
        """Logits, a row for each that is wanted; and what the head reads, where the drafter wants to know."""
        runs = [*schedule.runs, *schedule.padding]
        if not runs:
            return None, None
        if self.speculator is not None and self.speculator.needs_features:
            return self.runner.run_with_features(runs)
        return self.runner.run(runs), None

    def _fail(self, schedule: Schedule, error: BaseException) -> None:
        """The forward pass broke: those who were in it are told, the others can go on."""
        for run in schedule.runs:
            self.pool.forget(run.request.block_ids)  # [] of a beam whose search has ended with the first of them
            self.committer.finish(run.request, "error", f"the forward pass failed: {type(error).__name__}: {error}")
        self.knobs.apply_draining()
        self.keep_outputs()

    def take_outputs(self) -> list[StepOutput]:
        """What came about outside a step and was not delivered yet: the last outputs of aborted requests."""
        outputs, self._undelivered = self._undelivered + self.committer.take_outputs(), []
        return outputs

    def keep_outputs(self) -> None:
        """Keep what the committer has gathered for the next to ask."""
        self._undelivered += self.committer.take_outputs()

    def unfinished(self, request_id: str) -> list[Request]:
        """A request with its siblings or beams. ValueError when there is none of that name."""
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request {request_id!r}")
        return self._requests[request_id]

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do: requests, or outputs to hand over."""
        return bool(self._requests or self._undelivered)

    # -- siblings, finishing (called by the committer) -------------------------------------------------------------------

    def siblings(self, group_id: str) -> list[Request]:
        return self._requests[group_id]

    def drop(self, request: Request) -> None:
        """A request has finished: forget it, but for its tokens."""
        self.history.remember(request)
        self.runner.forget(request.request_id)
        if self.speculator is not None:
            self.speculator.forget(request.request_id)
        group = self._requests[request.group_id]
        group.remove(request)
        if not group:
            del self._requests[request.group_id]

    def abort(self, request_id: str, message: str = "") -> bool:
        """End a request (all its siblings) now, with what it has; its blocks come back. False when it is not there (any more)."""
        group = self._requests.get(request_id)
        if group is None:
            return False
        for request in list(group):
            self.committer.finish(request, "abort", message)
        self.knobs.apply_draining()
        self.keep_outputs()
        return True

    def abort_owner(self, owner: str) -> int:
        """Abort every request of one owner; returns how many."""
        ids = [gid for gid, group in self._requests.items() if group[0].owner == owner]
        return sum(self.abort(request_id, "its owner left") for request_id in ids)

    # -- knobs (engine.knobs) ----------------------------------------------------------------------------------------------

    def reconfigure(self, *, by: str = "", wait: bool = True, **knobs: Any) -> None:
        """Change knobs: batch size, token budget and the switches from the next step on; block size, pool size and the KV cache's dtype
        once the running requests have drained (waiting ones wait); the weights (quantization, its group size and options) as soon as
        the new ones are made, and running requests are then computed again. ``wait``: until they are made; False: they are made
        beside the running engine, which takes them between two steps. ValueError for a name that is no knob, or a value out of
        range: nothing changes."""
        self.knobs.reconfigure(by, knobs, wait)

    def update_sampling(self, request_id: str, *, by: str = "", **changes: Any) -> None:
        """Change a running request's sampling parameters from its next token on (all siblings of n > 1, all beams).

        ValueError: no such request, an unknown or fixed parameter (n, stop, logprobs, beam_width, length_penalty, early_stopping),
        a value out of range.
        """
        self.knobs.update_sampling(request_id, by, changes)

    def check_integrity(self) -> None:
        """RuntimeError unless tables, reference counts, prefix index and queues agree. Callable at any time between steps."""
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        known = [r for group in self._requests.values() for r in group]
        if {id(r) for r in queued} != {id(r) for r in known}:
            raise RuntimeError(f"queues hold {len(queued)} requests, the engine knows {len(known)}")
        for request in queued:
            blocks = -(-request.num_computed_tokens // self.pool.block_size)
            if len(request.block_ids) != blocks:
                raise RuntimeError(f"{request!r} should hold {blocks} blocks")
        ended = {f"{r.request_id}, which has ended,": r.block_ids for r in self.scheduler.batcher.ended}
        self.pool.check_integrity({r.request_id: r.block_ids for r in queued} | ended)
        self.scheduler.check_kept()

    def close(self) -> None:
        """Abort everything and free the tensors."""
        for request_id in list(self._requests):
            self.abort(request_id, "the engine was closed")
        self.requantizer.close()
        self.studies.cancel()
        self.runner = self.kv = None
