"""From events to what the Sampling page draws: one ``Track`` a request, one ``Point`` a token, the steps of beam searches. Pure.

A ``SamplingRows`` is fed every event once and in order. It keeps of each token only what the plots over positions need; the event
itself, with all candidates, is read from the store when a token is looked at (``recorded``).
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.events.types import (
    BeamsFinished,
    BeamsSelected,
    EngineStarted,
    Event,
    KnobChanged,
    LogitsRecorded,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    Snapshot,
    TokenSampled,
)

MAX_TRACKS = 96  # the newest requests
MAX_POINTS = 1500  # tokens of one request, the newest
HEAD = 256  # raw probabilities kept of a token whose full logits were recorded
MAX_TOKENS = 1 << 24  # of all requests, where some were not watched
MAX_TEXTS = 20_000  # texts of tokens that are remembered
RECENT_TOKENS, RECENT_LOGITS = 1024, 96  # events at hand; a log unpacks many of its events to give one
UNSEEN = -1


class Point(NamedTuple):
    """One token. ``position`` counts from the first prompt token; ``logprob`` (raw) and ``entropy`` in nats."""

    position: int
    nth: int  # of the output
    step: int
    token_id: int
    text: str
    logprob: float
    rank: int
    entropy: float
    nucleus_size: int  # with the request's own settings; 0: greedy
    prob: float
    u: float | None
    head: np.ndarray  # float64 [k]: the largest raw probabilities, descending; all that is known of them
    whole: bool  # whether head comes from the full logits


@dataclass
class Track:
    """One sequence, as far as the events tell it."""

    request_id: str
    ordinal: int
    owner: str
    prompt_token_ids: list[int]
    prompt_text: str
    sampling: dict[str, Any]  # as it arrived; see ``sampling_at``
    arrived_step: int
    output_token_ids: list[int] = field(default_factory=list)  # UNSEEN where nobody watched
    output_texts: list[str] = field(default_factory=list)
    points: dict[int, Point] = field(default_factory=dict)  # position -> Point
    changes: list[tuple[int, str, Any]] = field(default_factory=list)  # (from which output token on, parameter, value)
    logit_positions: set[int] = field(default_factory=set)
    branched_from: str | None = None
    branched_at: int = -1
    finished_step: int | None = None
    reason: str = ""

    @property
    def group_id(self) -> str:
        """The id that commands take: the siblings of n > 1 belong together."""
        return self.request_id.split("#", 1)[0]

    @property
    def is_beam(self) -> bool:
        return self.sampling.get("beam_width") is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def sampling_at(self, position: int) -> dict[str, Any]:
        """The parameters with which the token at ``position`` was chosen."""
        index = position - self.num_prompt_tokens
        return {**self.sampling, **{name: value for at, name, value in self.changes if at <= index}}

    def before(self, position: int) -> tuple[list[int], list[int]]:
        """(prompt, output) token ids in front of ``position``: what the penalties looked at. Unseen ones are left out."""
        return self.prompt_token_ids, [t for t in self.output_token_ids[: position - self.num_prompt_tokens] if t != UNSEEN]

    def until(self, step: int) -> list[Point]:
        """The points of tokens that were there after ``step``, in order."""
        return [p for p in self.points.values() if p.step <= step]


@dataclass
class BeamRun:
    """One beam search: its steps, and its end once it has one."""

    request_id: str
    width: int
    steps: list[BeamsSelected] = field(default_factory=list)
    finished: BeamsFinished | None = None


class SamplingRows:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.beams: dict[str, BeamRun] = {}
        self.texts: dict[int, str] = {}
        self.vocab_size = 0
        self.changed: set[str] = set()  # tracks with something new
        self.restarted = True
        self._ordinal = 0
        self._tokens: OrderedDict[tuple[str, int], TokenSampled] = OrderedDict()  # the newest, at hand
        self._all_logits: OrderedDict[tuple[str, int], LogitsRecorded] = OrderedDict()
        self._logits: tuple[str, int, np.ndarray] | None = None  # a token's logits come before or after its TokenSampled

    def taken(self) -> None:
        """The screen has been sent what was new."""
        self.changed, self.restarted = set(), False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)

    def begin_late(self, store: Any) -> None:
        """The ring buffer has dropped what came before: go on from the first state that is still known."""
        started = store.started
        known = [store.at(store.first_step).snapshot(finished=True)]
        self.feed([started, *known] if started is not None else known)

    def text_of(self, token_id: int) -> str | None:
        """The text of a token that some event showed; None for one that none did."""
        return self.texts.get(token_id)

    def events_of(self, store: Any, point: Point, request_id: str) -> tuple[TokenSampled | None, LogitsRecorded | None]:
        """The events of one token: at hand for the newest, else read back from the store. None for what is not (any longer) there."""
        at = request_id, point.position
        token, logits = self._tokens.get(at), self._all_logits.get(at)
        if token is not None and (logits is not None or not point.whole):
            return token, logits
        return recorded(store, point, request_id)

    # -- one handler a kind ------------------------------------------------------------------------------------------------

    def _open(self, **facts: Any) -> Track:
        track = Track(ordinal=self._ordinal, **facts)
        self._ordinal += 1
        self.tracks.pop(track.request_id, None)
        self.tracks[track.request_id] = track
        self.changed.add(track.request_id)
        ended = [t.request_id for t in self.tracks.values() if t.finished_step is not None]
        for request_id in ended[: max(0, len(self.tracks) - MAX_TRACKS)]:
            del self.tracks[request_id]
            self.beams.pop(request_id, None)
        return track

    def _started(self, e: EngineStarted) -> None:
        self.clear()
        self.vocab_size = int(e.model.get("vocab_size") or 0)

    def _snapshot(self, e: Snapshot) -> None:
        for r in e.requests:
            if r.request_id not in self.tracks:
                track = self._open(
                    request_id=r.request_id, owner=r.owner, prompt_token_ids=r.prompt_token_ids, prompt_text=r.prompt_text,
                    sampling=r.sampling, arrived_step=e.step,
                )  # fmt: skip
                track.output_token_ids = list(r.output_token_ids)
                track.output_texts = [""] * len(r.output_token_ids)
                track.branched_from, track.branched_at = r.branched_from, r.branched_at

    def _added(self, e: RequestAdded) -> None:
        self._open(
            request_id=e.request_id, owner=e.owner, prompt_token_ids=e.prompt_token_ids, prompt_text=e.prompt_text,
            sampling=e.sampling, arrived_step=e.step,
        )  # fmt: skip
        width = e.sampling.get("beam_width")
        if width is not None and e.parent_id is None:
            self.beams[e.request_id] = BeamRun(e.request_id, int(width))

    def _branched(self, e: RequestBranched) -> None:
        track = self.tracks.get(e.request_id)
        if track is not None:
            track.branched_from, track.branched_at = e.source_id, e.position
            track.output_token_ids, track.output_texts = list(e.output_token_ids), list(e.output_texts)
            self.texts[e.token_id] = e.text
            self.changed.add(e.request_id)

    def _finished(self, e: RequestFinished) -> None:
        track = self.tracks.get(e.request_id)
        if track is not None:
            track.finished_step, track.reason = e.step, e.reason
            self.changed.add(e.request_id)

    def _knob(self, e: KnobChanged) -> None:
        track = self.tracks.get(e.request_id or "")
        if track is not None:
            track.changes.append((len(track.output_token_ids), e.name, e.new))

    def _beams_selected(self, e: BeamsSelected) -> None:
        run = self.beams.get(e.request_id)
        if run is not None:
            run.steps.append(e)
            self.changed.add(e.request_id)

    def _beams_finished(self, e: BeamsFinished) -> None:
        run = self.beams.get(e.request_id)
        if run is not None:
            run.finished = e
            self.changed.add(e.request_id)

    def _token(self, e: TokenSampled) -> None:
        track = self.tracks.get(e.request_id)
        if track is None or track.is_beam:
            return
        self._learn(e)
        _keep(self._tokens, e, RECENT_TOKENS)
        index = e.position - track.num_prompt_tokens
        missing = index - len(track.output_token_ids)
        if missing > 0 and missing + sum(len(t.output_token_ids) for t in self.tracks.values()) > MAX_TOKENS:
            raise ValueError(
                f"a token at position {e.position} of request {e.request_id!r}, where {missing} before it are not known"
            )
        track.output_token_ids += [UNSEEN] * missing + [e.token_id]
        track.output_texts += [""] * missing + [e.text]
        head = np.sort(np.exp([c.logprob for c in e.top]))[::-1] if e.top else np.zeros(0)
        whole = self._logits is not None and self._logits[:2] == (e.request_id, e.position)
        if whole:
            assert self._logits is not None
            head = self._logits[2]
        track.points[e.position] = Point(
            e.position, e.index, e.step, e.token_id, e.text, e.logprob, e.rank, e.entropy, e.nucleus_size, e.prob, e.u, head, whole
        )  # fmt: skip
        while len(track.points) > MAX_POINTS:
            del track.points[next(iter(track.points))]
        self.changed.add(e.request_id)

    def _learn(self, e: TokenSampled) -> None:
        for c in e.top:
            self.texts[c.token_id] = c.text
        self.texts[e.token_id] = e.text
        while len(self.texts) > MAX_TEXTS:
            del self.texts[next(iter(self.texts))]

    def _logits_recorded(self, e: LogitsRecorded) -> None:
        track = self.tracks.get(e.request_id)
        if track is None or track.is_beam:
            return
        track.logit_positions.add(e.position)
        _keep(self._all_logits, e, RECENT_LOGITS)
        head = raw_head(logits_of(e))
        point = track.points.get(e.position)
        if point is not None:
            track.points[e.position] = point._replace(head=head, whole=True)
            self.changed.add(e.request_id)
        else:
            self._logits = (e.request_id, e.position, head)


_HANDLERS: dict[type, Any] = {
    EngineStarted: SamplingRows._started,
    Snapshot: SamplingRows._snapshot,
    RequestAdded: SamplingRows._added,
    RequestBranched: SamplingRows._branched,
    RequestFinished: SamplingRows._finished,
    KnobChanged: SamplingRows._knob,
    TokenSampled: SamplingRows._token,
    LogitsRecorded: SamplingRows._logits_recorded,
    BeamsSelected: SamplingRows._beams_selected,
    BeamsFinished: SamplingRows._beams_finished,
}


def _keep(events: OrderedDict[tuple[str, int], Any], e: Any, count: int) -> None:
    events[e.request_id, e.position] = e
    while len(events) > count:
        events.popitem(last=False)


def logits_of(e: LogitsRecorded) -> np.ndarray:
    """float32 [vocab_size], as the model gave them, but for what 16 bits round away. ValueError for another dtype."""
    if e.dtype != "float16":
        raise ValueError(f"logits must be recorded as float16, got {e.dtype!r}")
    return np.frombuffer(e.logits, "<f2").astype(np.float32) + np.float32(e.max_logit)


def raw_head(logits_V: np.ndarray, count: int = HEAD) -> np.ndarray:
    """The ``count`` largest probabilities of float32 logits [V], descending; float64."""
    x = logits_V.astype(np.float64)
    w = np.exp(x - x.max())
    count = min(count, len(w))
    return np.sort(np.partition(w, len(w) - count)[len(w) - count :])[::-1] / w.sum()


def nucleus_of(head: np.ndarray, p: float) -> int | None:
    """How many tokens the nucleus of mass ``p`` holds: while the mass before a token is < p. None when ``head`` ends before it does."""
    summed = np.cumsum(head)
    if p >= 1 or not len(summed) or summed[-1] < p:
        return None
    return int(np.searchsorted(summed, p, side="left")) + 1


def mass_of(head: np.ndarray, k: int) -> float | None:
    """The mass of the ``k`` likeliest tokens; None when ``head`` does not hold so many."""
    return float(head[:k].sum()) if 0 < k <= len(head) else None


def recorded(store: Any, point: Point, request_id: str) -> tuple[TokenSampled | None, LogitsRecorded | None]:
    """The events of one token, read back from the store; None for what it no longer holds, or never held."""
    token: TokenSampled | None = None
    logits: LogitsRecorded | None = None
    for event in store.window(point.step, point.step):
        if isinstance(event, TokenSampled) and (event.request_id, event.position) == (request_id, point.position):
            token = event
        elif isinstance(event, LogitsRecorded) and (event.request_id, event.position) == (request_id, point.position):
            logits = event
    return token, logits


def repeated(token_ids: list[int], n: int = 3) -> tuple[int, int]:
    """(n-grams that were there before, all n-grams) of a sequence."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)
