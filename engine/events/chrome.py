"""A log as a Chrome trace (JSON), which Perfetto opens.

Two processes of tracks: "engine" with the steps (their phases nested in them) and its counters, and "requests" with one track
a request: waiting, each prefill chunk, each decode, the time it was preempted. Times are microseconds from the first event.
Format: "Trace Event Format" of the Chromium project.
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from engine.events.batching import BlockSwapped
from engine.events.types import (
    BlockEvicted,
    EngineStarted,
    Event,
    KnobChanged,
    PoolResized,
    PrefixLookup,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestState,
    Run,
    Snapshot,
    StepDone,
    TokenSampled,
)

_ENGINE, _REQUESTS = 1, 2  # process ids
_STEPS, _KNOBS = 1, 2  # threads of the engine
_PHASES = ("schedule", "forward", "sample", "commit")


def write_chrome_trace(
    path: str | os.PathLike[str], events: Iterable[Event], started: EngineStarted | None = None, start: Snapshot | None = None
) -> None:
    """Write ``events`` as a trace, one at a time.

    ``started`` says what ran (else the EngineStarted among the events does), ``start`` which requests there were before them.
    """
    trace = _Trace(start)
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in chain(events, (None,)):
            if isinstance(event, EngineStarted):
                started = event
            for entry in trace.close() if event is None else trace.entries(event):
                file.write(separator + json.dumps(entry, allow_nan=False))
                separator = ",\n"
        what = (
            {}
            if started is None
            else {"model": started.config.get("model"), "device": started.device, "versions": started.versions}
        )
        file.write('\n],"otherData":' + json.dumps(what) + "}\n")


class _Track:
    """One request's line. ``since``: when its waiting began, in ns; None while it runs."""

    def __init__(self, tid: int, since: int | None, name: str) -> None:
        self.tid, self.since, self.name = tid, since, name
        self.finished = False


class _Trace:
    def __init__(self, start: Snapshot | None) -> None:
        self._start = start
        self._origin: int | None = None
        self._now = 0  # ns
        self._step_end = 0  # ns, of the last step
        self._tracks: dict[str, _Track] = {}
        self._tokens: dict[str, str] = {}  # texts that were sampled in the step under way
        self._next_tid = 1

    def entries(self, event: Event) -> Iterator[dict[str, Any]]:
        if self._origin is None:
            self._origin = event.time_ns
            if isinstance(event, StepDone):
                self._origin -= int(event.step_ms * 1e6)
            self._step_end = self._origin
            yield from self._names()
            for request in self._start.requests if self._start is not None else ():
                yield from self._known(request, self._origin)
        self._now = max(self._now, event.time_ns)
        if isinstance(event, StepDone):
            yield from self._step(event)
        elif isinstance(event, Snapshot):
            for request in event.requests:
                yield from self._known(request, event.time_ns)
        elif isinstance(event, RequestAdded):
            yield from self._add(event.request_id, event.owner, event.time_ns, f"{len(event.prompt_token_ids)} tokens of prompt")
        elif isinstance(event, RequestPreempted):
            track = self._tracks.get(event.request_id)
            if track is not None:
                track.since, track.name = event.time_ns, "preempted"
        elif isinstance(event, TokenSampled):
            self._tokens[event.request_id] = event.text
        elif isinstance(event, RequestFinished):
            yield from self._finish(event)
        elif isinstance(event, PrefixLookup) and event.request_id in self._tracks:
            args = {"tokens": event.num_tokens, "hit": event.num_hit_tokens, "miss": event.miss_reason}
            yield self._instant(event, _REQUESTS, self._tracks[event.request_id].tid, "prefix lookup", args)
        elif isinstance(event, BlockSwapped) and event.request_id in self._tracks:
            args = {"tokens": event.num_tokens, "bytes": event.num_bytes, "ms": event.copy_ms}
            yield self._instant(
                event,
                _REQUESTS,
                self._tracks[event.request_id].tid,
                "dropped in host memory" if event.direction == "dropped" else f"swapped {event.direction}",
                args,
            )
        elif isinstance(event, BlockEvicted):
            yield self._instant(event, _ENGINE, _STEPS, "evicted", {"block": event.block_id})
        elif isinstance(event, KnobChanged):
            name = f"{event.name} = {event.new}" + (" (draining)" if event.draining else "")
            yield self._instant(event, _ENGINE, _KNOBS, name, {"old": str(event.old), "by": event.by})
        elif isinstance(event, PoolResized):
            yield self._instant(event, _ENGINE, _KNOBS, f"pool of {event.num_blocks} x {event.block_size}", {})

    def close(self) -> Iterator[dict[str, Any]]:
        """What still waits at the end of the log."""
        for track in self._tracks.values():
            if track.since is not None:
                yield self._slice(_REQUESTS, track.tid, track.name, track.since, self._now, {})

    # -- parts ------------------------------------------------------------------------------------------------------------

    def _us(self, time_ns: int) -> float:
        assert self._origin is not None
        return (time_ns - self._origin) / 1e3

    def _slice(self, pid: int, tid: int, name: str, start: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
        duration = max(0, end - start) / 1e3
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": self._us(start), "dur": duration, "args": args}

    def _instant(self, event: Event, pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
        ts = self._us(event.time_ns)
        return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": ts, "args": {"step": event.step, **args}}

    def _names(self) -> Iterator[dict[str, Any]]:
        for pid, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for tid, name in ((_STEPS, "steps"), (_KNOBS, "knobs")):
            yield {"ph": "M", "pid": _ENGINE, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def _add(self, request_id: str, owner: str, time_ns: int | None, note: str) -> Iterator[dict[str, Any]]:
        tid, self._next_tid = self._next_tid, self._next_tid + 1
        self._tracks[request_id] = _Track(tid, time_ns, "waiting")
        yield {
            "ph": "M",
            "pid": _REQUESTS,
            "tid": tid,
            "name": "thread_name",
            "args": {"name": f"{request_id} ({owner}), {note}"},
        }
        yield {"ph": "M", "pid": _REQUESTS, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}

    def _known(self, request: RequestState, time_ns: int) -> Iterator[dict[str, Any]]:
        """A request that a Snapshot brings: its earlier life is not in the log."""
        if request.status == "finished" or request.request_id in self._tracks:
            return
        since = None if request.status == "running" else time_ns
        yield from self._add(request.request_id, request.owner, since, f"{len(request.prompt_token_ids)} tokens of prompt")
        self._tracks[request.request_id].name = "preempted" if request.status == "preempted" else "waiting"

    def _finish(self, event: RequestFinished) -> Iterator[dict[str, Any]]:
        track = self._tracks.get(event.request_id)
        if track is None or track.finished:
            return
        if track.since is not None:
            yield self._slice(_REQUESTS, track.tid, track.name, track.since, event.time_ns, {})
            track.since = None
        track.finished = True  # its last run is told by the StepDone that follows
        args = {"message": event.message, "output tokens": event.num_output_tokens}
        yield self._instant(event, _REQUESTS, track.tid, f"finished: {event.reason}", args)

    def _step(self, e: StepDone) -> Iterator[dict[str, Any]]:
        """The step with its phases, what each request did in it, and the counters."""
        end = e.time_ns
        start = min(max(end - _ns(e.step_ms), self._step_end), end)
        args = {"running": e.num_running, "waiting": e.num_waiting, "tokens": sum(r.num_tokens for r in e.runs)}
        padding = sum(r.num_tokens for r in e.runs if r.is_padding)
        if padding:
            args["padding"] = padding
        yield self._slice(_ENGINE, _STEPS, f"step {e.step}", start, end, args)
        at = start
        for phase in _PHASES:
            until = min(at + _ns(getattr(e, f"{phase}_ms")), end)
            yield self._slice(_ENGINE, _STEPS, phase, at, until, {})
            at = until
        for run in e.runs:
            if not run.is_padding:
                yield from self._run(run, start, end)
        sampled = sum(run.sampled for run in e.runs)
        yield self._counter(start, "tokens/s", {"tokens/s": sampled / (end - start) * 1e9 if end > start else 0.0})
        yield self._counter(end, "KV blocks", {"used": e.used_blocks, "cached, free": e.cached_free_blocks})
        yield self._counter(end, "requests", {"running": e.num_running, "waiting": e.num_waiting})
        self._step_end = end
        self._tokens.clear()
        for request_id in [i for i, track in self._tracks.items() if track.finished]:
            del self._tracks[request_id]

    def _run(self, run: Run, start: int, end: int) -> Iterator[dict[str, Any]]:
        if run.request_id not in self._tracks:
            yield from self._add(run.request_id, "?", None, "added before this log begins")
        track = self._tracks[run.request_id]
        if track.since is not None:
            yield self._slice(_REQUESTS, track.tid, track.name, track.since, start, {})
            track.since = None
        name = f"prefill chunk of {run.num_tokens}" if run.phase == "prefill" else run.phase
        args: dict[str, Any] = {"positions": f"{run.start} to {run.start + run.num_tokens - 1}", "sampled": run.sampled}
        if run.request_id in self._tokens:
            args["token"] = self._tokens[run.request_id]
        yield self._slice(_REQUESTS, track.tid, name, start, end, args)

    def _counter(self, time_ns: int, name: str, values: dict[str, float]) -> dict[str, Any]:
        return {"ph": "C", "pid": _ENGINE, "name": name, "ts": self._us(time_ns), "args": values}


def _ns(ms: float) -> int:
    """Milliseconds to ns; what is no duration counts as none."""
    return int(ms * 1e6) if 0 < ms < 1e12 else 0
