"""The convenient ways to use an engine: a list of prompts, a stream of text, a conversation. All of them only step it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from engine.committer import StepOutput
from engine.request import RequestOutput, SamplingParams


class Generation(ABC):
    """Written against what an Engine is made of: requests in, steps, outputs that wait for whoever asked."""

    tokenizer: Any
    _requests: dict[str, Any]
    _undelivered: list[StepOutput]

    @abstractmethod
    def add_request(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> str: ...

    @abstractmethod
    def abort(self, request_id: str, message: str = "") -> bool: ...

    @abstractmethod
    def _step(self) -> list[StepOutput]: ...

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run these to the end (with whatever else is queued); results in the order of the prompts.

        If one of the prompts is refused (ValueError), none of them runs.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        many = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(many) != len(prompts):
            raise ValueError(f"as many params as prompts are needed, got {len(many)} for {len(prompts)}")
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(prompts, many, strict=True):
                ids.append(self.add_request(prompt, each))
            while len(done) < len(ids):
                for output in self._outputs_of(ids):
                    if output.request is not None:
                        done[output.request_id] = output.request
        except BaseException:
            self._discard(ids)
            raise
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The text as it comes, in pieces that never split a character. Leaving the loop early aborts the request."""
        if params is not None and params.n != 1:
            raise ValueError(f"stream() gives one text: n must be 1, got {params.n}")
        request_id = self.add_request(prompt, params)  # here, so that a bad prompt is refused at the call
        pieces = self._pieces(request_id)
        next(pieces)  # a generator that never began would not notice that it is dropped, and the request would stay
        return pieces

    def _pieces(self, request_id: str) -> Iterator[str]:
        try:
            yield ""  # for stream()
            while True:
                for output in self._outputs_of([request_id]):
                    if output.new_text:
                        yield output.new_text
                    if output.request is not None:
                        if output.request.finish_reason == "error":
                            raise RuntimeError(output.request.message)
                        return
        finally:
            self._discard([request_id])

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> RequestOutput:
        """One answer to a conversation, through the checkpoint's chat template."""
        return self.generate([self.tokenizer.apply_chat_template(list(messages))], params)[0]

    def _outputs_of(self, ids: Sequence[str]) -> list[StepOutput]:
        """Step until something came for these requests; what came for others is kept for their callers."""
        wanted = set(ids)
        mine = [o for o in self._undelivered if o.request_id in wanted]
        if mine:
            self._undelivered = [o for o in self._undelivered if o.request_id not in wanted]
            return mine
        if not any(request_id in self._requests for request_id in wanted):
            raise RuntimeError(f"requests {sorted(wanted)} are gone and their outputs were taken by someone else")
        for output in self._step():
            (mine if output.request_id in wanted else self._undelivered).append(output)
        return mine

    def _discard(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.abort(request_id)
        self._undelivered = [o for o in self._undelivered if o.request_id not in ids]
