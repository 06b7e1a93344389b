"""The part of Engine that takes requests in: what is asked is checked here, before anything is changed by it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from engine import reporting
from engine.branching import History, make_branch, record_branch
from engine.committer import Committer
from engine.config import EngineConfig
from engine.events.recorder import Recorder
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import salt_root
from engine.output import TextStream
from engine.request import Request, SamplingParams, request_seed
from engine.scheduler import Scheduler

MAX_PRIORITY = 1 << 20


class Admission(ABC):
    """What the rest of Engine has for it."""

    config: EngineConfig
    model_config: Any
    tokenizer: Any
    recorder: Recorder
    scheduler: Scheduler
    committer: Committer
    history: History
    pool: BlockPool
    runner: Any
    _requests: dict[str, list[Request]]
    _next_id: int

    @abstractmethod
    def keep_outputs(self) -> None: ...

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
        request_id: str | None = None, cache_salt: str | None = None, priority: int = 0,
    ) -> str:  # fmt: skip
        """Queue a request; it runs from the next step on. Returns its id.

        ``prompt``: text, encoded as it stands, or token ids. ``cache_salt``: requests share cached prefixes only with
        requests of the same salt. ``priority``: under scheduling_policy="priority" smaller is sooner. ValueError: an empty prompt,
        one that does not fit, a token id the model does not have; QueueFull (one too) where max_num_waiting requests wait.
        """
        self._check_open()
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        for name, value in (("owner", owner), ("cache_salt", cache_salt)):
            if not isinstance(value, str) and (name == "owner" or value is not None):
                raise ValueError(f"{name} must be text, got {value!r}")
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
            raise ValueError(f"priority must be an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {priority!r}")
        token_ids, text = self._tokens(prompt)
        if request_id is None:
            request_id = self._unused_id()
        self._check_unused("request_id", request_id)
        self.scheduler.check_queue()
        seed = params.seed if params.seed is not None else request_seed(self.config.seed, request_id)
        request = Request(
            request_id, token_ids, params, seed, owner=owner, prompt_text=text, arrived_ns=time.monotonic_ns(),
            cache_salt=cache_salt, cache_root=salt_root(cache_salt), priority=priority,
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
        self.scheduler.check_queue()
        engine: Any = self
        request = make_branch(engine, source, branch_id, position, token_id, params, owner)
        self._enter(request)
        record_branch(engine, request, source)
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
