"""The engine: requests in, tokens out, one step at a time. ``step()`` is schedule, (draft,) run, commit.

Not thread-safe: one thread owns an Engine. For an engine in a process of its own see ``engine.process``.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine import reporting
from engine.branching import History, make_branch, record_branch
from engine.committer import Committer, StepOutput
from engine.config import EngineConfig
from engine.events.log import EventLog
from engine.events.recorder import Recorder
from engine.events.types import EngineStarted, Snapshot
from engine.generation import Generation
from engine.interrupts import interrupts_held
from engine.knobs import Knobs
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import salt_root
from engine.loading import Parts, load_parts, make_kv_cache, make_runner
from engine.output import TextStream
from engine.request import Request, SamplingParams, request_seed
from engine.scheduler import Schedule, Scheduler
from engine.speculation.config import SpeculativeConfig
from engine.speculation.speculator import SpecDecodeMetrics, Speculator
from engine.timing import cache_timings

_log = logging.getLogger(__name__)


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
        self.speculate(self.config.speculative)

    def speculate(self, config: SpeculativeConfig | None) -> None:
        """From the next step on drafts come from this drafter; None: there are none. ValueError where it does not fit: nothing changes."""
        speculator = None if config is None else Speculator(self, config, self.spec_decode_metrics)
        self.speculator = self.scheduler.speculator = speculator

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made, under vLLM's names."""
        return self.spec_decode_metrics.as_dict()

    # -- requests in ---------------------------------------------------------------------------------------------------

    @property
    def max_tokens_of_a_request(self) -> int:
        """Prompt and output together: the model's length or the pool's size, whichever is smaller."""
        assert self.config.max_model_len is not None
        return min(self.config.max_model_len, self.pool.num_blocks * self.pool.block_size)

    def most_tokens(self, request: Request) -> int:
        """Prompt and output of this request: as above, and less where its beams may need the pool's blocks."""
        assert self.config.max_model_len is not None
        in_pool = self.scheduler.most_tokens(request.num_prompt_tokens, request.params.beam_width or 1)
        return min(self.config.max_model_len, in_pool)

    def why_no_longer(self, request: Request) -> str:
        """What bounds ``most_tokens``."""
        return "max_model_len" if self.most_tokens(request) == self.config.max_model_len else "the KV pool is full"

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, owner: str = "local",
        request_id: str | None = None, cache_salt: str | None = None,
    ) -> str:  # fmt: skip
        """Queue a request; it runs from the next step on. Returns its id.

        ``prompt``: text, encoded as it stands, or token ids. ``cache_salt``: requests share cached prefixes only with
        requests of the same salt. ValueError: an empty prompt, one that does not fit, a token id the model does not have.
        """
        self._check_open()
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        for name, value in (("owner", owner), ("cache_salt", cache_salt)):
            if not isinstance(value, str) and (name == "owner" or value is not None):
                raise ValueError(f"{name} must be text, got {value!r}")
        token_ids, text = self._tokens(prompt)
        if request_id is None:
            request_id = self._unused_id()
        self._check_unused("request_id", request_id)
        seed = params.seed if params.seed is not None else request_seed(self.config.seed, request_id)
        request = Request(
            request_id, token_ids, params, seed, owner=owner, prompt_text=text, arrived_ns=time.monotonic_ns(),
            cache_salt=cache_salt, cache_root=salt_root(cache_salt),
        )  # fmt: skip
        request.stream = TextStream(self.tokenizer, params.stop)
        if params.beam_width is not None:
            self._check_room_for_beams(request, params.beam_width)
        self._enter(request)
        return request_id

    def _check_room_for_beams(self, request: Request, width: int) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if width > getattr(self.config, name):
                raise ValueError(f"beam_width must be at most {name} ({getattr(self.config, name)}), got {width}")
        need = self.scheduler.most_blocks(request.num_prompt_tokens, request.num_tokens + 1, width)
        if need > self.pool.num_blocks:
            raise ValueError(
                f"{width} beams of a prompt of {request.num_tokens} tokens need {need} blocks, the KV pool has {self.pool.num_blocks}"
            )

    def _enter(self, request: Request) -> None:
        """Take a request in."""
        self._requests[request.request_id] = [request]
        self.committer.open_group(request)
        self.scheduler.add(request)
        reporting.record_added(self.recorder, request)

    def branch(
        self, request_id: str, position: int, token_id: int, params: SamplingParams | None = None, *, owner: str = "local",
        branch_id: str | None = None,
    ) -> str:  # fmt: skip
        """A new request that goes on from another one's tokens, with ``token_id`` in place of the one at ``position``. Returns its id.

        ``request_id``: an unfinished request or one of the last that finished, "id#1" for a sibling or beam; ``position`` counts
        from the first prompt token. Seed, salt and the other parameters are the source's unless ``params`` are given; what was
        output before ``position`` counts as output, and the draws are those of the same positions, so the forced token is
        all that differs. Its prefix comes from the cache. ValueError: no such request, no such position or token, beams.
        """
        if not isinstance(owner, str):
            raise ValueError(f"owner must be text, got {owner!r}")
        self._check_open()
        source = self.history.find(self._requests, request_id)
        if branch_id is None:
            branch_id = self._unused_id()
        self._check_unused("branch_id", branch_id)
        request = make_branch(self, source, branch_id, position, token_id, params, owner)
        self._enter(request)
        record_branch(self, request, source)
        output = request.output_token_ids
        if output:
            self.committer.emit(branch_id, 0, request.stream.text, tuple(output))
            self.keep_outputs()
        return branch_id

    def _check_open(self) -> None:
        if self.runner is None:
            raise ValueError("the engine was closed: make a new one")

    def _check_unused(self, name: str, request_id: Any) -> None:
        if not isinstance(request_id, str) or request_id in self._requests or not request_id or "#" in request_id:
            raise ValueError(f"{name} must be unused, not empty and without '#', got {request_id!r}")

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
            self._fail(schedule, error)
            raise
        t3 = time.perf_counter()
        self.forward_ms = 1e3 * (t3 - t2)  # of the last pass
        outputs, t4 = self.committer.commit(schedule, logits)
        if self.speculator is not None:
            self.speculator.observe(schedule, logits, features, step_ms=1e3 * (time.perf_counter() - t0))
        if self.recorder.on:
            reporting.record_step(self, schedule, (t0, t1, t2, t3, t4, time.perf_counter()))
        self.knobs.apply_draining()
        return outputs + self.committer.take_outputs()

    def _copy_blocks(self, schedule: Schedule) -> None:
        if schedule.copies:
            src, dst = [src for src, _ in schedule.copies], [dst for _, dst in schedule.copies]
            self.kv.copy_blocks(src, dst)
            if self.speculator is not None:
                self.speculator.drafter.copy_blocks(src, dst)

    def _run(self, schedule: Schedule) -> tuple[Any, Any]:
        """Logits, a row for each that is wanted; and what the head reads, where the drafter wants to know."""
        if not schedule.runs:
            return None, None
        if self.speculator is not None and self.speculator.needs_features:
            return self.runner.run_with_features(schedule.runs)
        return self.runner.run(schedule.runs), None

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

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        """Change knobs: batch size, token budget and the switches from the next step on; block size and pool size once the running
        requests have drained (waiting ones wait). ValueError for a name that is no knob, or a value out of range: nothing changes."""
        self.knobs.reconfigure(by, knobs)

    def update_sampling(self, request_id: str, *, by: str = "", **changes: Any) -> None:
        """Change a running request's sampling parameters from its next token on (all siblings of n > 1, all beams).

        ValueError: no such request, an unknown or fixed parameter (n, stop, logprobs, beam_width, length_penalty, early_stopping),
        a value out of range.
        """
        self.knobs.update_sampling(request_id, by, changes)

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
