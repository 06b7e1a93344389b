"""The beams of a request while they live: sequences of one group that split, die and share their KV blocks.

``engine.sampling.beam`` decides which beams there are; here they are given tokens, text and blocks. A beam is a Request, as the
siblings of n > 1 are, with a ``sample_index`` that says which place it holds. In every step each place goes on from some beam:
the first of a beam's continuations stays where it is, the others take over the places of beams that nothing goes on from, or
new ones. Nothing is copied for that: a place that changes shares the other's blocks, and the block that both then want to write is
copied on write.

Text is released when all beams and all complete sequences agree on it: only that is certain.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.events.types import BeamCandidate, BeamSequence, BeamsFinished, BeamsSelected, RequestFinished
from engine.output import TextStream
from engine.request import CompletionOutput, Request, TokenLogprob
from engine.sampling.beam import BeamSearch, Complete, Step, Way, log_probabilities
from engine.sampling.processors import TokenCounts, apply_penalties
from engine.sampling.sampled import Sampled, SampleRow

if TYPE_CHECKING:
    from engine.committer import Committer

_PRUNED = "other beams were better"


class BeamGroup:
    """The search of one request. ``live``: its beams, best first, as ``search.totals``; the scheduler reads it and ``width``."""

    def __init__(self, root: Request, search: BeamSearch, stream: TextStream) -> None:
        self.root = root
        self.search = search
        self.live = [root]
        self.stream = stream  # of the text that all sequences agree on
        self.agreed = 0  # output tokens that were pushed to it
        self.logprobs: dict[tuple[int, ...], list[TokenLogprob]] = {}  # of complete sequences, where they are asked for

    @property
    def width(self) -> int:
        return self.search.width


@dataclass
class Choice:
    """The ways that a group could go on, found before anything is changed."""

    raw: Any  # log-probabilities before the penalties, float32 [beams, vocabulary]
    ways: list[Way]
    error: str | None


class Beams:
    """Runs the beam searches of one engine, for its Committer."""

    def __init__(self, committer: "Committer") -> None:
        self.committer = committer
        self.engine = committer.engine

    def open(self, request: Request) -> None:
        """Make a request that was just added the root of a beam search."""
        params = request.params
        assert params.beam_width is not None
        search = BeamSearch(
            params.beam_width, params.length_penalty, params.early_stopping, num_end_tokens=len(self._end_tokens(request)),
            max_length=self._max_length(request),
        )  # fmt: skip
        request.beams = BeamGroup(request, search, TextStream(self.engine.tokenizer, params.stop))

    def _end_tokens(self, request: Request) -> set[int]:
        params = request.params
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.engine.model_config.eos_token_ids)}

    def _max_length(self, request: Request) -> int:
        return min(request.params.max_tokens, self.engine.most_tokens(request) - request.num_prompt_tokens)

    # -- a step -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def choose(self, group: BeamGroup, logits: Any) -> Choice:
        """``logits`` [live beams, vocabulary], in the order of ``group.live``."""
        root, search = group.live[0], group.search
        search.max_length, search.num_end_tokens = self._max_length(root), len(self._end_tokens(root))  # either may have moved
        raw = log_probabilities(logits)
        if torch.isnan(raw[:, 0]).any():
            return Choice(raw, [], "the logits contain NaN")
        params, n = root.params, len(group.live)
        processed = raw
        if params.penalised:
            processed = apply_penalties(
                raw, [_counts(r) for r in group.live], [params.repetition_penalty] * n, [params.presence_penalty] * n,
                [params.frequency_penalty] * n,
            )  # fmt: skip
        ways = search.ways(processed)
        if not ways and not search.complete:
            return Choice(raw, [], "every logit is -inf: no token can be chosen")
        return Choice(raw, ways, None)

    def take(self, group: BeamGroup, choice: Choice) -> None:
        """One token more for every beam, or the end of the search."""
        search, ways = group.search, choice.ways
        ends = [self._ends(group.live[way.source], way.token_id) for way in ways]
        step = search.advance(ways, ends, [r.output_token_ids for r in group.live])
        kept = [] if search.done else step.beams
        told = self._describe(group, choice, sorted({*kept, *step.ended}))
        if group.root.params.logprobs is not None:
            for i in step.ended:
                source = group.live[ways[i].source]
                tokens = (*source.output_token_ids, ways[i].token_id)
                group.logprobs[tokens] = [*(source.logprobs or []), _logprob(told[i])]
        slots = assign([ways[i].source for i in kept], [r.sample_index for r in group.live])
        after = [self._place(group, group.live[ways[i].source], slot) for i, slot in zip(kept, slots, strict=True)]
        self._record(group, step, dict(zip(kept, slots, strict=True)))
        if search.done:
            self.finish(group)
            return
        for beam in group.live:
            if beam not in after:
                self._end(beam, "stop", _PRUNED)
        group.live[:] = after
        for i, beam in zip(kept, after, strict=True):
            self._append(beam, ways[i], told.get(i))
        self._release(group)

    def _ends(self, beam: Request, token: int) -> bool:
        if token in self._end_tokens(beam):
            return True
        if not beam.params.stop:
            return False
        stream = beam.stream.copy()
        stream.push(token)
        return stream.stopped_by is not None

    def _place(self, group: BeamGroup, source: Request, slot: int) -> Request:
        """The request at ``slot``, with all that ``source`` has. Nothing is appended yet, so sources are still whole."""
        if slot == source.sample_index:
            return source
        beam = next((r for r in group.live if r.sample_index == slot), None)
        if beam is None:
            beam = self.committer.fork(source, slot)
            beam.beams = group
        else:
            self.engine.scheduler.take_over(source, beam)
        beam.token_ids = list(source.token_ids)
        beam.stream = source.stream.copy()
        beam.token_counts = None if source.token_counts is None else source.token_counts.copy()
        beam.logprobs = None if source.logprobs is None else list(source.logprobs)
        beam.last_token_ns = source.last_token_ns
        return beam

    def _append(self, beam: Request, way: Way, sampled: Sampled | None) -> None:
        beam.token_ids.append(way.token_id)
        beam.stream.push(way.token_id)
        if sampled is not None:
            if beam.logprobs is not None:
                beam.logprobs.append(_logprob(sampled))
            self.committer.record_token(beam, sampled)
        beam.last_token_ns = time.monotonic_ns()

    def _describe(self, group: BeamGroup, choice: Choice, at: list[int]) -> dict[int, Sampled]:
        """What is told of the ways ``at`` when somebody wants to know, by their index."""
        root, recorder = group.live[0], self.engine.recorder
        top = recorder.tokens_top if recorder.on else None
        if not at or (top is None and root.params.logprobs is None):
            return {}
        ways = [choice.ways[i] for i in at]
        params = root.params.changed(temperature=1.0)  # 0 and 1 mean the same here, but not to the sampler
        beams = [group.live[way.source] for way in ways]
        rows = [SampleRow(params, b.seed, 0, b.num_tokens, (), b.output_token_ids, b.token_counts) for b in beams]
        raw = choice.raw[torch.tensor([way.source for way in ways], device=choice.raw.device)]
        told = self.committer.sampler.describe(raw, rows, [(way.token_id, way.logprob) for way in ways], top)
        return dict(zip(at, told, strict=True))

    # -- text ---------------------------------------------------------------------------------------------------------------

    def _release(self, group: BeamGroup) -> None:
        """Hand out the text of the tokens that all sequences which may still be returned have in common."""
        start, first = group.root.num_prompt_tokens, group.agreed
        live = [r.token_ids for r in group.live]
        ended = [(c.token_ids, len(c.token_ids) - (c.reason == "stop")) for c in group.search.complete]
        text = []
        while True:
            at = group.agreed
            if at >= group.search.length or any(at >= end for _, end in ended):
                break
            token = live[0][start + at]
            if any(t[start + at] != token for t in live) or any(t[at] != token for t, _ in ended):
                break
            text.append(group.stream.push(token))
            group.agreed += 1
        new = tuple(live[0][start + first : start + group.agreed])
        if new:
            for index in range(group.root.params.n):
                self.committer.emit(group.root.group_id, index, "".join(text), new)

    # -- the end --------------------------------------------------------------------------------------------------------------

    def finish(self, group: BeamGroup, reason: str = "", message: str = "") -> None:
        """End a search: with its best complete sequences, or, for a ``reason``, wherever its beams stand.

        After an error nothing counts as complete, and the KV is suspect: nobody else shall find it.
        """
        if not group.live:
            return
        sequences = list(group.search.complete)
        if reason:
            here = [
                (r, total)
                for r, total in zip(group.live, group.search.totals, strict=False)
                if r.num_tokens > r.num_prompt_tokens
            ]
            for r, total in here:
                tokens = tuple(r.output_token_ids)
                sequences.append(Complete(tokens, total, group.search.score(total, len(tokens)), reason))
                group.logprobs[tokens] = r.logprobs or []
            sequences.sort(key=lambda c: -c.score)
        if reason == "error":
            sequences = [replace(c, reason=reason) for c in sequences]
            for beam in group.live:
                self.engine.pool.forget(beam.block_ids)
        results = [self._completion(group, i, c, message) for i, c in enumerate(sequences[: group.root.params.n])]
        if not results:
            results = [CompletionOutput(i, [], "", reason, message) for i in range(group.root.params.n)]
        self._record_end(group, results, message or "no beam can improve on the complete sequences")
        live, group.live = group.live, []
        for beam in sorted(live, key=lambda r: r.sample_index):
            if beam.sample_index < len(results):
                result = results[beam.sample_index]
                beam.token_ids[beam.num_prompt_tokens :] = result.token_ids  # what it is remembered by
                beam.logprobs = result.logprobs
                self._end(beam, result.finish_reason or "", result.message)
            else:
                self._end(beam, reason or "stop", message or _PRUNED)
        self.committer.close_group(
            group.root.group_id, results, max(r.num_cached_tokens for r in live), group.agreed, group.stream.text
        )

    def _completion(self, group: BeamGroup, index: int, c: Complete, message: str) -> CompletionOutput:
        params = group.root.params
        stream = TextStream(self.engine.tokenizer, params.stop)
        ended = c.reason == "stop" and c.token_ids[-1] in self._end_tokens(group.root)
        for token in c.token_ids[:-1] if ended else c.token_ids:
            stream.push(token)
        stream.finish()
        if c.reason == "stop":
            eos = ended and c.token_ids[-1] not in params.stop_token_ids
            what = f"token {c.token_ids[-1]}" if ended else f"string {stream.stopped_by!r}"
            message = f"{'end-of-text' if eos else 'stop'} {what}"
        elif c.reason == "length":
            message = "max_tokens" if len(c.token_ids) >= params.max_tokens else self.engine.why_no_longer(group.root)
        logprobs = None if params.logprobs is None else group.logprobs[c.token_ids]
        return CompletionOutput(index, list(c.token_ids), stream.text, c.reason, message, logprobs, c.total, c.score)

    def _end(self, beam: Request, reason: str, message: str) -> None:
        beam.finish_reason, beam.message = reason, message
        self.engine.scheduler.finish(beam)
        recorder = self.engine.recorder
        if recorder.on:
            count = beam.num_tokens - beam.num_prompt_tokens
            recorder.emit(RequestFinished, request_id=beam.request_id, reason=reason, message=message, num_output_tokens=count)
        recorder.watched_logits.pop(beam.request_id, None)
        self.engine.drop(beam)

    # -- watching -----------------------------------------------------------------------------------------------------------

    def _record(self, group: BeamGroup, step: Step, slots: dict[int, int]) -> None:
        recorder, text = self.engine.recorder, self.committer.token_text
        if not recorder.on:
            return
        candidates = [
            BeamCandidate(
                group.live[way.source].sample_index, way.token_id, text(way.token_id), way.logprob, way.total, slots.get(i, -1),
                step.ended.get(i, float("nan")), "kept" if i in slots else "ended" if i in step.ended else "dropped",
            )
            for i, way in enumerate(step.ways)
        ]  # fmt: skip
        complete = group.search.complete
        recorder.emit(
            BeamsSelected, request_id=group.root.group_id, position=group.root.num_prompt_tokens + group.search.length - 1,
            candidates=candidates, num_ended=len(complete), worst_ended=complete[-1].score if complete else float("nan"),
            best_possible=group.search.best_possible,
        )  # fmt: skip

    def _record_end(self, group: BeamGroup, results: Sequence[CompletionOutput], why: str) -> None:
        recorder, text = self.engine.recorder, self.committer.token_text
        if recorder.on:
            sequences = [
                BeamSequence(r.token_ids, [text(t) for t in r.token_ids], r.cumulative_logprob, r.score, r.finish_reason or "")
                for r in results
                if r.cumulative_logprob is not None and r.score is not None
            ]
            recorder.emit(BeamsFinished, request_id=group.root.group_id, why=why, sequences=sequences)


def assign(sources: Sequence[int], slots: Sequence[int]) -> list[int]:
    """The slot of each next beam. ``sources[i]``: the beam that next beam i goes on from; ``slots``: of the present beams.

    The first to go on from a beam stays at its slot; the others get the lowest slots of beams that nothing goes on from, then
    the lowest that nobody has. Slot 0 is never left empty: the request's own name stays until the end.
    """
    free = sorted({*slots} - {slots[s] for s in sources})
    unused = (slot for slot in itertools.count() if slot not in slots)
    stay: set[int] = set()
    targets = []
    for source in sources:
        slot = slots[source]
        if slot in stay:
            targets.append(free.pop(0) if free else next(unused))
        else:
            stay.add(slot)
            targets.append(slot)
    if targets and 0 in free:
        targets[targets.index(max(targets))] = 0
    return targets


def _counts(request: Request) -> TokenCounts:
    if request.token_counts is None:
        request.token_counts = TokenCounts(request.prompt_token_ids)
    request.token_counts.update(request.output_token_ids)
    return request.token_counts


def _logprob(sampled: Sampled) -> TokenLogprob:
    return TokenLogprob(sampled.token_id, sampled.logprob, list(sampled.top))
