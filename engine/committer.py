"""The third line of a step: logits become tokens, tokens become text, and whoever is done leaves."""

import functools
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.beams import BeamGroup, Beams
from engine.events.types import Candidate, LogitsRecorded, RequestFinished, RequestForked, TokenSampled
from engine.output import TextStream
from engine.reporting import record_added
from engine.request import CompletionOutput, Request, RequestOutput, TokenLogprob
from engine.sampling.sampler import Sampled, Sampler, SampleRow
from engine.scheduler import Schedule
from engine.speculation.telling import record_verdict
from engine.speculation.verify import Asked, Verdict, verify

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass
class StepOutput:
    """What one sequence gained in a step. ``finished`` when it ended; ``request`` when its last sibling ended too."""

    request_id: str  # as add_request() returned it
    index: int  # which of n
    new_text: str = ""
    new_token_ids: tuple[int, ...] = ()
    finished: CompletionOutput | None = None
    request: RequestOutput | None = None


class Committer:
    """Applies a step's results to the requests of one engine, and collects what goes out."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.sampler = Sampler(engine.model_config.vocab_size)
        self.token_text = functools.lru_cache(1 << 16)(engine.tokenizer.token_text)  # the same candidates come again and again
        self.beams = Beams(self)
        self._groups: dict[str, RequestOutput] = {}  # results of unfinished groups, filled as siblings end
        self._outputs: list[StepOutput] = []

    def open_group(self, request: Request) -> None:
        outputs = [CompletionOutput(i, [], "", None) for i in range(request.params.n)]
        self._groups[request.request_id] = RequestOutput(request.request_id, request.prompt_token_ids, outputs)
        if request.params.beam_width is not None:
            self.beams.open(request)

    def take_outputs(self) -> list[StepOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- a step -----------------------------------------------------------------------------------------------------------

    def commit(self, schedule: Schedule, logits: Any) -> tuple[list[StepOutput], float]:
        """``logits`` [runs that sample, vocab]. Returns the outputs and the moment sampling was done (perf_counter)."""
        before = []
        for run in schedule.runs:
            before.append(run.request.num_computed_tokens)
            run.request.num_computed_tokens += run.num_tokens if run.draft is None else 1
        requests, rows, groups, drafts = self._sampling_requests(schedule)
        as_they_are = rows == list(range(_num_rows(logits)))
        sampled = self._sample(requests, logits if as_they_are else logits[rows]) if requests else []
        choices = [(group, self.beams.choose(group, logits[at])) for group, at in groups]
        verdicts = self._verify(schedule, drafts, logits) if drafts else []
        done = time.perf_counter()
        failed = {request.request_id for request, result in zip(requests, sampled, strict=True) if result.error is not None}
        failed |= {beam.request_id for group, choice in choices if choice.error is not None for beam in group.live}
        for run, old in zip(schedule.runs, before, strict=True):
            if run.request.request_id not in failed and run.draft is None:
                self.engine.scheduler.cache_full_blocks(run.request, old)
        for i, (request, result) in enumerate(zip(requests, sampled, strict=True)):
            if result.error is not None:
                self.engine.pool.forget(request.block_ids)  # its KV is suspect: nobody else shall find it
                self.finish(request, "error", result.error)
            else:
                self._record_logits(request, logits, rows[i])
                self._append(request, result)
        for (group, choice), (_, at) in zip(choices, groups, strict=True):
            if choice.error is not None:
                self.beams.finish(group, "error", choice.error)
            else:
                for beam, row in zip(group.live, at, strict=True):
                    self._record_logits(beam, logits, row)
                self.beams.take(group, choice)
        for (i, row), verdict in zip(drafts, verdicts, strict=True):
            self._take_draft(schedule, i, verdict, logits, row)
        for run in schedule.runs:
            if run.num_drafts and run.request.status == "running":
                self.engine.scheduler.roll_back(run.request)
        return self.take_outputs(), done

    def _sampling_requests(
        self, schedule: Schedule
    ) -> tuple[list[Request], list[int], list[tuple[BeamGroup, list[int]]], list[tuple[int, int]]]:
        """Who gets a token in this step, and from which row of the logits; then the beam searches, with a row for each beam; then
        the drafts to verify: which run of the schedule, and the first of its rows.

        n > 1 forks here, at the end of the prompt.
        """
        requests: list[Request] = []
        rows: list[int] = []
        beam_rows: dict[str, int] = {}
        groups: dict[int, BeamGroup] = {}
        drafts: list[tuple[int, int]] = []
        next_row = 0
        for i, run in enumerate(schedule.runs):
            row, next_row, request = next_row, next_row + run.num_logits, run.request
            if run.draft is not None:
                drafts.append((i, row))
                continue
            if not run.sample:
                continue
            if request.beams is not None:
                groups[id(request.beams)] = request.beams
                beam_rows[request.request_id] = row
                continue
            requests.append(request)
            rows.append(row)
            if request.params.n > 1 and request.parent_id is None and request.num_tokens == request.num_prompt_tokens:
                for index in range(1, request.params.n):
                    requests.append(self.fork(request, index))
                    rows.append(row)
        searches = [(group, [beam_rows[beam.request_id] for beam in group.live]) for group in groups.values()]
        return requests, rows, searches, drafts

    # -- drafts -----------------------------------------------------------------------------------------------------------

    def _verify(self, schedule: Schedule, drafts: list[tuple[int, int]], logits: Any) -> list[Verdict]:
        assert self.engine.config.speculative is not None
        acceptance = self.engine.config.speculative.acceptance
        asked = []
        for i, row in drafts:
            draft = schedule.runs[i].draft
            assert draft is not None
            asked.append(Asked(draft, SampleRow.next_of(schedule.runs[i].request), row, acceptance))
        recorder = self.engine.recorder
        return verify(asked, logits, self.sampler, recorder.tokens_top if recorder.on else None)

    def _take_draft(self, schedule: Schedule, i: int, verdict: Verdict, logits: Any, row: int) -> None:
        """The tokens that a draft gave, one by one as if each had come in a step of its own, up to one that ends the request."""
        run = schedule.runs[i]
        request, position = run.request, run.request.num_tokens
        self.engine.runner.compact(run, verdict.path)
        for n, sampled in enumerate(verdict.sampled):
            request.num_computed_tokens = request.num_tokens  # of all but the target's own the KV is there
            self.engine.scheduler.cache_full_blocks(request, request.num_tokens - 1)
            self._record_logits(request, logits, row if n == 0 else row + 1 + verdict.path[n - 1])
            self._append(request, sampled)
            if request.status == "finished":
                break
        kept = request.num_tokens - position
        schedule.runs[i] = replace(run, accepted=tuple(verdict.path[:kept]))
        if self.engine.recorder.on:
            record_verdict(self.engine, request, position, verdict, kept)
        if verdict.error is not None and request.status == "running":
            self.engine.pool.forget(request.block_ids)  # its KV is suspect: nobody else shall find it
            self.finish(request, "error", verdict.error)

    def fork(self, parent: Request, index: int) -> Request:
        """A sibling or a beam that goes on from the parent's KV, blocks shared."""
        child = Request(
            f"{parent.group_id}#{index}" if index else parent.group_id, parent.prompt_token_ids, parent.params, parent.seed,
            owner=parent.owner, prompt_text=parent.prompt_text, arrived_ns=parent.arrived_ns, cache_salt=parent.cache_salt,
            cache_root=parent.cache_root, sample_index=index, parent_id=parent.request_id, group_id=parent.group_id,
            priority=parent.priority,
        )  # fmt: skip
        child.arrived_step, child.arrival_order = parent.arrived_step, parent.arrival_order
        child.stream = TextStream(self.engine.tokenizer, parent.params.stop)
        self.engine.siblings(parent.group_id).append(child)
        record_added(self.engine.recorder, child)
        if self.engine.recorder.on:
            self.engine.recorder.emit(
                RequestForked, request_id=child.request_id, parent_id=parent.request_id, block_ids=list(parent.block_ids),
                num_computed_tokens=parent.num_computed_tokens,
            )  # fmt: skip
        self.engine.scheduler.fork(parent, child)
        return child

    def _sample(self, requests: list[Request], logits: Any) -> list[Sampled]:
        rows = [SampleRow.next_of(request) for request in requests]
        recorder = self.engine.recorder
        return self.sampler.sample(logits, rows, recorder.tokens_top if recorder.on else None)

    # -- one token --------------------------------------------------------------------------------------------------------

    def _append(self, request: Request, sampled: Sampled) -> None:
        token = sampled.token_id
        request.token_ids.append(token)
        params = request.params
        if request.logprobs is not None:
            request.logprobs.append(TokenLogprob(token, sampled.logprob, list(sampled.top)))
        self.record_token(request, sampled)
        request.last_token_ns = time.monotonic_ns()
        eos = not params.ignore_eos and token in self.engine.model_config.eos_token_ids
        ended = eos or token in params.stop_token_ids
        text = "" if ended else request.stream.push(token)
        num_output = request.num_tokens - request.num_prompt_tokens
        self._outputs.append(StepOutput(request.group_id, request.sample_index, text, (token,)))
        if ended:
            self.finish(request, "stop", f"{'end-of-text' if eos else 'stop'} token {token}")
        elif request.stream.stopped_by is not None:
            self.finish(request, "stop", f"stop string {request.stream.stopped_by!r}")
        elif num_output >= params.max_tokens:
            self.finish(request, "length", "max_tokens")
        elif request.num_tokens >= self.engine.most_tokens(request):
            self.finish(request, "length", self.engine.why_no_longer(request))

    def emit(self, request_id: str, index: int, text: str, token_ids: tuple[int, ...]) -> None:
        self._outputs.append(StepOutput(request_id, index, text, token_ids))

    def finish(self, request: Request, reason: str, message: str = "") -> None:
        """End a sequence wherever it stands, a beam with its whole search: blocks back, result out. Once is enough."""
        if request.status == "finished":
            return
        if request.beams is not None:
            self.beams.finish(request.beams, reason, message)
            return
        output = StepOutput(request.group_id, request.sample_index, request.stream.finish())
        completion = CompletionOutput(
            request.sample_index, request.output_token_ids, request.stream.text, reason, message, request.logprobs
        )
        request.finish_reason, request.message = reason, message
        self.engine.scheduler.finish(request)
        if self.engine.recorder.on:
            self.engine.recorder.emit(
                RequestFinished,
                request_id=request.request_id,
                reason=reason,
                message=message,
                num_output_tokens=len(completion.token_ids),
            )
        self.engine.recorder.watched_logits.pop(request.request_id, None)
        group = self._groups[request.group_id]
        group.outputs[request.sample_index] = completion
        if request.sample_index == 0:
            group.num_cached_tokens = request.num_cached_tokens
        output.finished = completion
        if (
            request.parent_id is None
            and request.num_tokens == request.num_prompt_tokens
            and len(self.engine.siblings(request.group_id)) == 1
        ):
            for sibling in group.outputs[1:]:  # it ended before it forked: so did its siblings
                sibling.finish_reason, sibling.message = reason, message
        self.engine.drop(request)
        if all(o.finish_reason is not None for o in group.outputs):
            output.request = self._groups.pop(request.group_id)
        self._outputs.append(output)

    def close_group(
        self, group_id: str, results: list[CompletionOutput], num_cached_tokens: int, released: int, released_text: str
    ) -> None:
        """The results of a beam search, of which ``released`` tokens and their text went out before."""
        group = self._groups.pop(group_id)
        group.outputs, group.num_cached_tokens = results, num_cached_tokens
        for result in results:
            if not result.text.startswith(released_text):
                raise RuntimeError(f"{group_id}: {released_text!r} was handed out, {result.text!r} came of it")
            output = StepOutput(group_id, result.index, result.text[len(released_text) :], tuple(result.token_ids[released:]))
            output.finished = result
            self._outputs.append(output)
        self._outputs[-1].request = group

    # -- watching -----------------------------------------------------------------------------------------------------------

    def record_token(self, request: Request, s: Sampled) -> None:
        recorder = self.engine.recorder
        if not recorder.on or recorder.tokens_top is None:
            return
        text = self.token_text
        recorder.emit(
            TokenSampled, request_id=request.request_id, position=request.num_tokens - 1,
            index=request.num_tokens - 1 - request.num_prompt_tokens, token_id=s.token_id, text=text(s.token_id), logprob=s.logprob,
            rank=s.rank, u=s.u, prob=s.prob, nucleus_size=s.nucleus_size, nucleus_mass=s.nucleus_mass, entropy=s.entropy,
            top=[Candidate(c[0], text(c[0]), c[1], c[2], c[3], c[4], c[5]) for c in s.candidates],
            step_ms=(time.monotonic_ns() - request.last_token_ns) / 1e6, kept_sizes=s.kept_sizes, kept_masses=s.kept_masses,
        )  # fmt: skip

    def _record_logits(self, request: Request, logits: Any, row: int) -> None:
        recorder = self.engine.recorder
        left = recorder.watched_logits.get(request.request_id)
        if left is None or not recorder.on:
            return
        values = logits[row].float()
        largest = values.max()
        # +inf is recorded as the limit that it is read as: what is at +inf is all there is (see engine.sampling.processors).
        data = torch.where(values == largest, 0.0, values - largest).half().cpu().numpy()
        most = float(largest)
        recorder.emit(
            LogitsRecorded, request_id=request.request_id, position=request.num_tokens, dtype="float16",
            logits=data.astype("<f2").tobytes(), max_logit=most if math.isfinite(most) else 0.0,
        )  # fmt: skip
        if left == 1:
            del recorder.watched_logits[request.request_id]
        else:
            recorder.watched_logits[request.request_id] = left - 1


def _num_rows(logits: Any) -> int:
    return 0 if logits is None else int(logits.shape[0])
