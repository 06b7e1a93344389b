"""Branches: a request that goes on from another one's tokens with one of them replaced.

What a sequence was is remembered for a while after it ended, so that its tokens can be taken up again. The branch is an ordinary
request whose output begins with what the source had before the position, and the forced token: it is computed as one that comes
back after a preemption, and finds its prefix in the cache as far as it still is there.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.events.types import RequestBranched
from engine.output import TextStream
from engine.request import Request, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.engine import Engine

MAX_REMEMBERED = 256  # sequences that ended, the newest
MAX_REMEMBERED_TOKENS = 1 << 20  # and the tokens that they may have together


@dataclass(frozen=True, slots=True)
class Source:
    """A sequence as far as it came."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    prompt_text: str
    params: SamplingParams
    seed: int
    draw_index: int
    cache_salt: str | None
    cache_root: int
    logprobs: list[TokenLogprob] | None

    @classmethod
    def of(cls, r: Request) -> "Source":
        return cls(
            r.request_id, list(r.token_ids), r.num_prompt_tokens, r.prompt_text, r.params, r.seed, r.draw_index, r.cache_salt,
            r.cache_root, None if r.logprobs is None else list(r.logprobs),
        )  # fmt: skip


class History:
    """The sequences that ended last."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, Source] = OrderedDict()
        self._num_tokens = 0

    def remember(self, request: Request) -> None:
        self._forget(request.request_id)
        self._ended[request.request_id] = Source.of(request)
        self._num_tokens += request.num_tokens
        while len(self._ended) > MAX_REMEMBERED or (self._num_tokens > MAX_REMEMBERED_TOKENS and len(self._ended) > 1):
            self._forget(next(iter(self._ended)))

    def _forget(self, request_id: str) -> None:
        old = self._ended.pop(request_id, None)
        if old is not None:
            self._num_tokens -= len(old.token_ids)

    def find(self, unfinished: Mapping[str, Sequence[Request]], request_id: str) -> Source:
        """The sequence of that name ("id#1": a sibling or beam). ValueError when there is none (any more)."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be text, got {request_id!r}")
        for request in unfinished.get(request_id.split("#")[0], ()):
            if request.request_id == request_id:
                return Source.of(request)
        if request_id not in self._ended:
            raise ValueError(f"no request {request_id!r} to branch from; the last {MAX_REMEMBERED} that ended are remembered")
        return self._ended[request_id]


def make_branch(
    engine: "Engine", source: Source, branch_id: str, position: int, token_id: int, params: SamplingParams | None, owner: str
) -> Request:
    """The request, not yet added. See ``Engine.branch``."""
    last, vocab = len(source.token_ids) - 1, engine.model_config.vocab_size
    for name, value, most in (("position", position, last), ("token_id", token_id, vocab - 1)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(f"{name} must be an integer in [0, {most}] to branch from {source.request_id}, got {value!r}")
    params = _params(source, params)
    num_prompt = min(source.num_prompt_tokens, position + 1)
    in_output = position >= source.num_prompt_tokens
    tokens = [*source.token_ids[:position], token_id]
    num_output = len(tokens) - num_prompt
    prompt_text = source.prompt_text if in_output else engine.tokenizer.decode(tokens)
    request = Request(
        branch_id, tokens[:num_prompt], params.changed(max_tokens=params.max_tokens + num_output), params.seed or 0, owner=owner,
        prompt_text=prompt_text, arrived_ns=time.monotonic_ns(), cache_salt=source.cache_salt, cache_root=source.cache_root,
    )  # fmt: skip
    request.draw_index = source.draw_index
    request.branched_from, request.branched_at = source.request_id, position
    request.token_ids = tokens
    request.stream = TextStream(engine.tokenizer, params.stop)
    if len(tokens) >= engine.most_tokens(request):
        raise ValueError(f"position {position} is too late for a branch: {engine.why_no_longer(request)}")
    for token in tokens[num_prompt:]:
        request.stream.push(token)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else engine.model_config.eos_token_ids)}
    if in_output and (token_id in ends or request.stream.stopped_by is not None):
        raise ValueError(f"token {token_id} at position {position} ends the text: nothing can go on from it")
    if request.logprobs is not None and in_output:  # the forced token's was not computed
        kept = source.logprobs[: num_output - 1] if source.logprobs else []
        kept += [TokenLogprob(token, math.nan) for token in tokens[num_prompt + len(kept) :]]
        request.logprobs = kept
    return request


def _params(source: Source, params: SamplingParams | None) -> SamplingParams:
    if params is None:
        params = source.params.changed(n=1, beam_width=None, length_penalty=1.0, early_stopping=False)
        if source.params.beam_width is not None:
            params = params.changed(temperature=0.0)  # a single beam goes on greedily
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
    if params.n != 1 or params.beam_width is not None:
        raise ValueError(f"a branch is one sequence: n must be 1 and beam_width None, got {params.n} and {params.beam_width}")
    return params if params.seed is not None else params.changed(seed=source.seed)


def record_branch(engine: "Engine", request: Request, source: Source) -> None:
    if engine.recorder.on:
        text = engine.committer.token_text
        output, position = request.output_token_ids, request.branched_at
        engine.recorder.emit(
            RequestBranched, request_id=request.request_id, source_id=source.request_id, position=position,
            token_id=request.token_ids[-1], text=text(request.token_ids[-1]), source_token_id=source.token_ids[position],
            output_token_ids=output, output_texts=[text(token) for token in output],
        )  # fmt: skip
