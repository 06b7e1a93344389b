"""The engine: requests in, tokens out, one step at a time. ``step()`` is schedule, run, commit.

Not thread-safe: one thread owns an Engine. For an engine in a process of its own see ``engine.process``.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine import reporting
from engine.committer import Committer, StepOutput
from engine.config import DRAINING_KNOBS, LIVE_KNOBS, EngineConfig
from engine.events.log import EventLog
from engine.events.recorder import Recorder
from engine.events.types import EngineStarted, KnobChanged, PoolResized, Snapshot
from engine.generation import Generation
from engine.interrupts import interrupts_held
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import salt_root
from engine.loading import Parts, load_parts, make_kv_cache, make_runner
from engine.output import TextStream
from engine.request import Request, SamplingParams, request_seed
from engine.scheduler import Schedule, Scheduler
from engine.timing import cache_timings

_log = logging.getLogger(__name__)
_FIXED_SAMPLING = ("n", "seed", "stop", "logprobs")  # cannot change while a request runs


class Engine(Generation):
    """A checkpoint, its KV pool and the requests that share them.

    >>> engine = Engine(EngineConfig(model="smollm2-135m", max_num_seqs=8))
    >>> engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text
    """

    def __init__(self, config: EngineConfig | None = None, *, parts: Parts | None = None) -> None:
        """``parts`` takes what ``load_parts`` gave before (tests share one loaded model). ValueError for a model that cannot run."""
        self.parts = parts if parts is not None else load_parts(config or EngineConfig())
        self.config = self.parts.resolve(config or EngineConfig())
        self.model_config = self.parts.model_config
        self.tokenizer = self.parts.tokenizer
        self.recorder = Recorder()
        self._next_id = 0
        self._draining: dict[str, tuple[int, str]] = {}  # knob -> (value, who), waiting for the running requests
        self._undelivered: list[StepOutput] = []
        self.kv: Any = None
        self.runner: Any = None
        self._requests: dict[str, list[Request]] = {}  # unfinished, by group: the siblings of n > 1
        self._build_cache()
        self.committer = Committer(self)

    def _build_cache(self) -> None:
        """An empty pool and the tensors behind it, for the current block size and pool size."""
        assert self.config.num_kv_blocks is not None
        self.kv = self.runner = None  # frees the old tensors before the new ones are made
        self.kv = make_kv_cache(self.parts, self.config)
        self.runner = make_runner(self.parts, self.kv, self.config)
        self.pool = BlockPool(self.config.num_kv_blocks, self.config.block_size, self.recorder)
        old = getattr(self, "scheduler", None)
        self.scheduler = Scheduler(
            self.pool,
            self.recorder,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            enable_prefix_caching=self.config.enable_prefix_caching,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
        )
        if old is not None:
            for request in old.waiting:
                request.block_hashes = []  # another block size, other blocks
                self.scheduler.add(request)

    # -- requests in ---------------------------------------------------------------------------------------------------

    @property
    def max_tokens_of_a_request(self) -> int:
        """Prompt and output together: the model's length or the pool's size, whichever is smaller."""
        assert self.config.max_model_len is not None
        return min(self.config.max_model_len, self.pool.num_blocks * self.pool.block_size)

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, owner: str = "local",
        request_id: str | None = None, cache_salt: str | None = None,
    ) -> str:  # fmt: skip
        """Queue a request; it runs from the next step on. Returns its id.

        ``prompt``: text, encoded as it stands, or token ids. ``cache_salt``: requests share cached prefixes only with
        requests of the same salt. ValueError: an empty prompt, one that does not fit, a token id the model does not have.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        for name, value in (("owner", owner), ("cache_salt", cache_salt)):
            if not isinstance(value, str) and (name == "owner" or value is not None):
                raise ValueError(f"{name} must be text, got {value!r}")
        token_ids, text = self._tokens(prompt)
        if request_id is None:
            request_id = self._unused_id()
        if not isinstance(request_id, str) or request_id in self._requests or not request_id or "#" in request_id:
            raise ValueError(f"request_id must be unused, not empty and without '#', got {request_id!r}")
        seed = params.seed if params.seed is not None else request_seed(self.config.seed, request_id)
        request = Request(
            request_id, token_ids, params, seed, owner=owner, prompt_text=text, arrived_ns=time.monotonic_ns(),
            cache_salt=cache_salt, cache_root=salt_root(cache_salt),
        )  # fmt: skip
        request.stream = TextStream(self.tokenizer, params.stop)
        self._requests[request_id] = [request]
        self.committer.open_group(request)
        self.scheduler.add(request)
        reporting.record_added(self.recorder, request)
        return request_id

    def _unused_id(self) -> str:
        while True:
            request_id = f"req-{self._next_id}"
            self._next_id += 1
            if request_id not in self._requests:
                return request_id

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        limit = self.max_tokens_of_a_request
        if isinstance(prompt, str):
            # A token of the vocabulary covers a bounded number of characters, so an absurd paste is refused unencoded.
            if len(prompt) > limit * self.tokenizer.max_token_chars:
                raise ValueError(
                    f"the prompt has {len(prompt):,} characters; at most {limit:,} tokens fit (max_model_len and the KV pool)"
                )
            token_ids, text = self.tokenizer.encode(prompt), prompt
        else:
            if not isinstance(prompt, Iterable):
                raise ValueError(f"a prompt must be text or a list of token ids, got {prompt!r}")
            token_ids = list(prompt)
            for token in token_ids:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.model_config.vocab_size:
                    raise ValueError(f"token ids must be integers in [0, {self.model_config.vocab_size}), got {token!r}")
            text = self.tokenizer.decode(token_ids)
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        if len(token_ids) >= limit:
            why = "the KV pool" if limit < (self.config.max_model_len or limit) else "max_model_len"
            raise ValueError(f"the prompt has {len(token_ids):,} tokens; {why} allows {limit:,} with at least one of output")
        return token_ids, text

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """One step of everything that is queued. Returns what each request gained; [] when there was nothing to do.

        Ctrl-C waits for the end of the step; what the step gave is then kept for the next one.
        """
        new = self._step()
        outputs, self._undelivered = self._undelivered, []
        return outputs + new

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
        t0 = time.perf_counter()
        if not self.scheduler.running and not self.scheduler.waiting:
            return self.committer.take_outputs()
        self.recorder.step += 1
        schedule = self.scheduler.schedule()
        t1 = time.perf_counter()
        try:
            logits = self._run(schedule)
        except BaseException as error:
            self._fail(schedule, error)
            raise
        t2 = time.perf_counter()
        outputs, t3 = self.committer.commit(schedule, logits)
        if self.recorder.on:
            reporting.record_step(self, schedule, (t0, t1, t2, t3, time.perf_counter()))
        self._apply_draining()
        return outputs + self.committer.take_outputs()

    def _run(self, schedule: Schedule) -> Any:
        if schedule.copies:
            self.kv.copy_blocks([src for src, _ in schedule.copies], [dst for _, dst in schedule.copies])
        return self.runner.run(schedule.runs) if schedule.runs else None

    def _fail(self, schedule: Schedule, error: BaseException) -> None:
        """The forward pass broke: those who were in it are told, the others can go on."""
        for run in schedule.runs:
            self.pool.forget(run.request.block_ids)
            self.committer.finish(run.request, "error", f"the forward pass failed: {type(error).__name__}: {error}")
        self._apply_draining()
        self._undelivered += self.committer.take_outputs()

    def take_outputs(self) -> list[StepOutput]:
        """What came about outside a step and was not delivered yet: the last outputs of aborted requests."""
        outputs, self._undelivered = self._undelivered + self.committer.take_outputs(), []
        return outputs

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do: requests, or outputs to hand over."""
        return bool(self._requests or self._undelivered)

    # -- siblings, finishing (called by the committer) -------------------------------------------------------------------

    def siblings(self, group_id: str) -> list[Request]:
        return self._requests[group_id]

    def drop(self, request: Request) -> None:
        """A request has finished: forget it."""
        self.runner.forget(request.request_id)
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
        self._apply_draining()
        self._undelivered += self.committer.take_outputs()
        return True

    def abort_owner(self, owner: str) -> int:
        """Abort every request of one owner; returns how many."""
        ids = [gid for gid, group in self._requests.items() if group[0].owner == owner]
        return sum(self.abort(request_id, "its owner left") for request_id in ids)

    # -- knobs -------------------------------------------------------------------------------------------------------------

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        """Change knobs: batch size, token budget and the switches from the next step on; block size and pool size once the running
        requests have drained (waiting ones wait). ValueError for a name that is no knob, or a value out of range: nothing changes."""
        allowed = LIVE_KNOBS + DRAINING_KNOBS
        for name in knobs:
            self.config.changed(**{name: knobs[name]})  # an unknown name or a bad value says so itself
            if name not in allowed:
                raise ValueError(f"{name} cannot be changed while the engine runs; knobs: {', '.join(allowed)}")
        if any(knobs.get(name, 0) is None for name in DRAINING_KNOBS):
            raise ValueError("num_kv_blocks must be a number here, got None")
        coming = {name: value for name, (value, _) in self._draining.items()}  # is rebuilt together with what is asked now
        coming |= {name: value for name, value in knobs.items() if name in DRAINING_KNOBS}
        self.parts.check_pool_fits(self.config.changed(**coming), held=self.kv.nbytes)
        for name, value in knobs.items():
            if name in DRAINING_KNOBS:
                if value == getattr(self.config, name):
                    given_up = self._draining.pop(name, None)
                    if given_up is not None:  # it was on its way to another value: everybody sees that it stays
                        self._record_knob(name, given_up[0], value, by)
                    continue
                self._draining[name] = (value, by)
                self._record_knob(name, getattr(self.config, name), value, by, draining=True)
            elif value != getattr(self.config, name):
                self._record_knob(name, getattr(self.config, name), value, by)
                self.config = self.config.changed(**{name: value})
                setattr(self.scheduler, name, value)
                if name == "enable_prefix_caching" and not value:
                    self.pool.forget_all()
        self.scheduler.draining = bool(self._draining)
        self._apply_draining()
        self._undelivered += self.committer.take_outputs()  # of requests that no longer fit

    def _record_knob(self, name: str, old: Any, new: Any, by: str, request_id: str | None = None, draining: bool = False) -> None:
        if self.recorder.on:
            self.recorder.emit(KnobChanged, name=name, old=old, new=new, by=by, request_id=request_id, draining=draining)

    def _apply_draining(self) -> None:
        if not self._draining or self.scheduler.running:
            return
        old = self.config
        self.config = old.changed(**{name: value for name, (value, _) in self._draining.items()})
        try:
            self._build_cache()
        except (RuntimeError, MemoryError):  # the memory was free when it was asked for: the knobs fall back, for all to see
            _log.exception("the KV pool stays as it is")
            self.config = old
            self._build_cache()
        if self.recorder.on:
            self.recorder.emit(
                PoolResized, num_blocks=self.pool.num_blocks, block_size=self.pool.block_size,
                kv_bytes_per_block=self.kv.bytes_per_block, kv_pool_bytes=self.kv.nbytes,
            )  # fmt: skip
        for name, (value, by) in self._draining.items():
            self._record_knob(name, getattr(old, name) if self.config is not old else value, getattr(self.config, name), by)
        self._draining = {}
        limit = self.max_tokens_of_a_request
        for request in list(self.scheduler.waiting):
            if request.num_tokens >= limit:
                done = request.num_tokens > request.num_prompt_tokens
                message = f"the KV pool now holds {limit} tokens, this request has {request.num_tokens}"
                self.committer.finish(request, "length" if done else "error", message)

    def update_sampling(self, request_id: str, *, by: str = "", **changes: Any) -> None:
        """Change a running request's sampling parameters from its next token on (all siblings of n > 1).

        ValueError: no such request, an unknown or fixed parameter (n, seed, stop, logprobs), a value out of range.
        """
        if request_id not in self._requests:
            raise ValueError(f"no unfinished request {request_id!r}")
        for name in changes:
            if name in _FIXED_SAMPLING:
                raise ValueError(f"{name} cannot be changed while a request runs")
        group = self._requests[request_id]
        new = [request.params.changed(**changes) for request in group]
        for request, params in zip(group, new, strict=True):
            for name in changes:
                old, value = getattr(request.params, name), getattr(params, name)
                if old != value:
                    self._record_knob(name, old, value, by, request.request_id)
            request.params = params

    # -- watching ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def record(self, capacity: int = 1_000_000) -> Iterator[EventLog]:
        """Every event of the block, in a log that starts with what is running and a snapshot."""
        log = EventLog(capacity=capacity)
        log.append(self.started_event())
        log.append(self.snapshot())
        self.recorder.attach(log.append)
        try:
            yield log
        finally:
            self.recorder.detach(log.append)

    def watch(self, kind: str, request_id: str | None = None, *, top: int = 20, positions: int = 512) -> None:
        """Turn on a costly observation: ``watch("tokens", top=k)`` (how each token was chosen, with k candidates) or
        ``watch("logits", request_id)`` (its full logits in 16 bits, for the next ``positions`` tokens). Recorded only while a log is attached."""
        if kind == "tokens":
            if not isinstance(top, int) or not 0 <= top <= 1000:
                raise ValueError(f"top must be an integer in [0, 1000], got {top!r}")
            self.recorder.tokens_top = top
        elif kind == "logits":
            if request_id is None or not any(
                r.request_id == request_id for group in self._requests.values() for r in group
            ):  # "id#1": a sibling
                raise ValueError(f"no unfinished request {request_id!r} to watch")
            if not isinstance(positions, int) or not 1 <= positions <= 4096:
                raise ValueError(f"positions must be an integer in [1, 4096], got {positions!r}")
            self.recorder.watched_logits[request_id] = positions
        else:
            raise ValueError(f"unknown observation {kind!r}; known: 'tokens', 'logits'")

    def unwatch(self, kind: str, request_id: str | None = None) -> None:
        if kind == "tokens":
            self.recorder.tokens_top = None
        elif kind == "logits":
            self.recorder.watched_logits.pop(request_id or "", None)
        else:
            raise ValueError(f"unknown observation {kind!r}; known: 'tokens', 'logits'")

    def measure_cache(self, lengths: Sequence[int]) -> tuple[list[float], list[float]]:
        """Milliseconds of one step at each context length: with the KV cache (one token computed), and without (all of them).

        Really run, on free blocks of the pool between two steps; recorded as CacheTimed. ValueError for a length that does not fit.
        """
        return cache_timings(self, list(lengths))

    def started_event(self) -> EngineStarted:
        """What is running: model, device, configuration."""
        return reporting.started(self)

    def snapshot(self) -> Snapshot:
        """The whole visible state, as a late watcher needs it."""
        return reporting.snapshot(self)

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
        self.pool.check_integrity({r.request_id: r.block_ids for r in queued})

    def close(self) -> None:
        """Abort everything and free the tensors."""
        for request_id in list(self._requests):
            self.abort(request_id, "the engine was closed")
        self.runner = self.kv = None
