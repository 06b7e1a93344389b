"""Two runs side by side: aligned request by request and token by token, the first difference, and its cause.

Engine-independent: two logs in, a ``Comparison`` out. The same code serves a run and its repetition, a run and its rerun with one
thing changed, and any two saved runs.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.events.log import EventLog
from engine.events.state import UNSEEN
from engine.events.types import EngineStarted, PrefixLookup, Run, StepDone, TokenSampled
from explorer.compare.cause import Cause, Changed, differences, token_cause
from explorer.compare.transcript import Trace, Transcript
from explorer.i18n import _

WEIGHTS = ("sha256", "format")  # of EngineStarted.model: what makes it another model
WEIGHT_KNOBS = ("quantization", "quantization_group_size", "kv_cache_dtype")
COMPUTING = ("dtype", "device", "name", "attention_backend", "linear_backend", "threads")  # of EngineStarted.device
_DEFAULTS = EngineConfig().as_dict()
_FACTS_ELSEWHERE = ("model", "device", "dtype", "attention_backend")  # of the config: told by the model and the device


@dataclass(frozen=True)
class TokenDifference:
    """The first place where a request's two outputs part."""

    a: Trace
    b: Trace
    index: int  # of the output token
    steps: tuple[int, int]  # in which either run chose it; -1 where it did not
    tokens: tuple[TokenSampled | None, TokenSampled | None]
    cause: Cause

    @property
    def position(self) -> int:
        """In the sequence, prompt included."""
        return len(self.a.prompt_token_ids) + self.index


@dataclass(frozen=True)
class ScheduleDifference:
    """The first step that did not do the same in both runs. Steps are counted from the beginning of either log."""

    step: int
    a: list[Run]
    b: list[Run]
    words: str


@dataclass(frozen=True)
class Pair:
    """The same request in both runs; None where a run does not have it. ``first``: None when all tokens are equal."""

    a: Trace | None
    b: Trace | None
    num_equal: int = 0  # output tokens that are the same, from the first on
    first: TokenDifference | None = None


@dataclass
class Comparison:
    a: Transcript
    b: Transcript
    weights: tuple[Changed, ...] = ()  # another model
    computing: tuple[Changed, ...] = ()  # another number format, device, backend
    versions: tuple[Changed, ...] = ()
    config: tuple[Changed, ...] = ()
    pairs: list[Pair] = field(default_factory=list)
    schedule: ScheduleDifference | None = None
    unwatched: bool = False  # a log lacks token ids: only their numbers could be compared
    notes: list[str] = field(default_factory=list)

    @property
    def environment(self) -> tuple[Changed, ...]:
        """What was different before the first request came."""
        return self.weights + self.computing + self.versions + self.config

    @property
    def first(self) -> TokenDifference | None:
        """The token difference that came first in time (in the first run)."""
        found = [pair.first for pair in self.pairs if pair.first is not None]
        return min(found, key=lambda d: (max(d.steps), d.a.ordinal), default=None)

    @property
    def same_tokens(self) -> bool:
        """Every request is in both runs, with the same tokens and the same end."""
        return all(p.a is not None and p.b is not None and p.first is None for p in self.pairs)

    @property
    def same(self) -> bool:
        """Tokens and schedule are the same (as far as the logs hold them)."""
        return self.same_tokens and self.schedule is None


def compare(a: EventLog, b: EventLog) -> Comparison:
    """Compare two runs. Reads both logs once; memory: the token ids and one number a step of each."""
    one, two = Transcript.of(a), Transcript.of(b)
    made = Comparison(one, two, unwatched=not (one.tokens_watched and two.tokens_watched))
    _environment(made)
    made.pairs = [_compare_pair(made, a, b, x, y) for x, y in align(one.traces, two.traces)]
    made.schedule = _schedule(made, a, b)
    return made


# -- what ran ---------------------------------------------------------------------------------------------------------------


def _environment(made: Comparison) -> None:
    one, two = made.a.started, made.b.started
    if one is None or two is None:
        made.notes.append(_("One of the logs does not say what ran: environments were not compared."))
        return
    made.weights = differences(one.model, two.model, WEIGHTS)
    configs = _DEFAULTS | one.config, _DEFAULTS | two.config  # a field that came later had its default before
    made.weights += differences(*configs, WEIGHT_KNOBS)
    made.computing = differences(one.device, two.device, COMPUTING)
    made.versions = differences(one.versions, two.versions)
    made.config = tuple(d for d in differences(*configs) if d.name not in (*_FACTS_ELSEWHERE, *WEIGHT_KNOBS))


def facts_of(started: EngineStarted) -> dict[str, str]:
    """What ran, in a few lines: for a reader of one run, or of two."""
    model, device, versions = started.model, started.device, started.versions
    return {
        _("model"): f"{model.get('name', '?')} (SHA-256 {str(model.get('sha256', '?'))[:12]}…)",
        _("device"): f"{device.get('name', '?')} ({device.get('device', '?')}, {device.get('threads', '?')} threads)",
        _(
            "computed in"
        ): f"{device.get('dtype', '?')}, attention {device.get('attention_backend', '?')}, linear {device.get('linear_backend', '?')}",
        _("versions"): ", ".join(f"{name} {version}" for name, version in versions.items()),
        _("seed"): str(started.config.get("seed", "?")),
    }


# -- requests ---------------------------------------------------------------------------------------------------------------


def align(a: list[Trace], b: list[Trace]) -> list[tuple[Trace | None, Trace | None]]:
    """Which request of one run is which of the other: first by name and prompt, then by prompt and sibling alone, in order of
    arrival. What has no counterpart stands alone, at its place in the order of arrival."""
    found: dict[int, Trace] = {}  # ordinal in a -> its counterpart
    taken: set[int] = set()  # ordinals in b
    for key in (_name_and_prompt, _prompt_and_sibling):
        free: dict[Any, list[Trace]] = {}
        for trace in b:
            if trace.ordinal not in taken:
                free.setdefault(key(trace), []).append(trace)
        for trace in a:
            same = free.get(key(trace))
            if same and trace.ordinal not in found:
                found[trace.ordinal] = same.pop(0)
                taken.add(found[trace.ordinal].ordinal)
    pairs: list[tuple[Trace | None, Trace | None]] = [(trace, found.get(trace.ordinal)) for trace in a]
    return pairs + [(None, trace) for trace in b if trace.ordinal not in taken]


def _name_and_prompt(trace: Trace) -> Any:
    return trace.request_id, tuple(trace.prompt_token_ids)


def _prompt_and_sibling(trace: Trace) -> Any:
    return tuple(trace.prompt_token_ids), trace.sample_index


def _compare_pair(made: Comparison, log_a: EventLog, log_b: EventLog, a: Trace | None, b: Trace | None) -> Pair:
    if a is None or b is None:
        return Pair(a, b)
    index = _first_difference(a, b)
    if index is None:
        return Pair(a, b, a.num_output_tokens)
    steps = tuple(t.token_steps[index] if index < len(t.token_steps) else -1 for t in (a, b))
    tokens = (token_at(log_a, a, index), token_at(log_b, b, index))
    cause = _cause(made, a, b, index, tokens)
    return Pair(a, b, index, TokenDifference(a, b, index, (steps[0], steps[1]), tokens, cause))


def _first_difference(a: Trace, b: Trace) -> int | None:
    for index, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
        if x != y and UNSEEN not in (x, y):
            return index
    if a.num_output_tokens != b.num_output_tokens:
        return min(a.num_output_tokens, b.num_output_tokens)
    return None


def token_at(log: EventLog, trace: Trace, index: int) -> TokenSampled | None:
    """What was recorded of one output token; None when nobody watched, or there is none."""
    step = trace.token_steps[index] if index < len(trace.token_steps) else -1
    if step < 0:
        return None
    found = (e for e in log.window(step, step) if isinstance(e, TokenSampled))
    return next((e for e in found if e.request_id == trace.request_id and e.index == index), None)


def _cause(made: Comparison, a: Trace, b: Trace, index: int, tokens: tuple[TokenSampled | None, TokenSampled | None]) -> Cause:
    ended = [t for t in (a, b) if index >= t.num_output_tokens]
    if ended:
        return _end_cause(a, b, index, ended[0] is a)
    if tokens[0] is None or tokens[1] is None:
        return Cause("unseen", _("a log does not hold how this token was chosen: it was recorded without watching tokens"))
    started = made.a.started
    dtype = str(started.device.get("dtype")) if started is not None else ""
    shapes = _batch_shapes(made)
    return token_cause(
        tokens[0], tokens[1], (a.sampling_at(index), b.sampling_at(index)), made.weights, made.computing + shapes, dtype
    )


def _batch_shapes(made: Comparison) -> tuple[Changed, ...]:
    """Settings and versions that change in which shapes, or with which code, the same numbers are computed."""
    return tuple(d for d in made.config if d.name != "seed") + tuple(d for d in made.versions if d.name != "python")


def _end_cause(a: Trace, b: Trace, index: int, a_ended: bool) -> Cause:
    who, trace, other = (_("first run"), a, b) if a_ended else (_("second run"), b, a)
    changed = differences(a.sampling_at(index), b.sampling_at(index), ("max_tokens", "stop", "stop_token_ids", "ignore_eos"))
    if trace.finish_reason is None:
        words = _("the {who} was still at it when its record ends").format(who=who)
    else:
        why = trace.finish_reason + (f", {trace.message}" if trace.message else "")
        words = _("the {who} ended here ({why}), the other went on to {n} tokens").format(
            who=who, why=why, n=other.num_output_tokens
        )
    if changed:
        words += f" [{', '.join(map(str, changed))}]"
    return Cause("end", words, changed)


# -- the schedule -----------------------------------------------------------------------------------------------------------


def _schedule(made: Comparison, log_a: EventLog, log_b: EventLog) -> ScheduleDifference | None:
    one, two = made.a, made.b
    count = min(len(one.steps), len(two.steps))
    at = next((i for i in range(count) if one.schedule[i] != two.schedule[i]), count)
    if at == count and len(one.steps) == len(two.steps):
        return None
    steps = [t.steps[at] if at < len(t.steps) else -1 for t in (one, two)]
    runs = [_runs(log, step) for log, step in zip((log_a, log_b), steps)]
    relative = next(s - t.first_step for s, t in zip(steps, (one, two)) if s >= 0)
    return ScheduleDifference(relative, runs[0], runs[1], _schedule_words(made, (log_a, log_b), relative, steps, runs))


def _runs(log: EventLog, step: int) -> list[Run]:
    return next((list(e.runs) for e in log.window(step, step) if isinstance(e, StepDone)), []) if step >= 0 else []


def _schedule_words(made: Comparison, logs: tuple[EventLog, EventLog], step: int, steps: list[int], runs: list[list[Run]]) -> str:
    first = made.first
    if first is not None and max(first.steps) >= 0 and first.steps[0] - made.a.first_step < step:
        return _("a consequence: {request} had parted from its other run before").format(request=first.a.request_id)
    if min(steps) < 0:
        who = _("first run") if steps[0] < 0 else _("second run")
        return _("the {who} has no such step").format(who=who)
    parts = []
    by_id = [{r.request_id: r for r in each} for each in runs]
    for request_id in dict.fromkeys([*by_id[0], *by_id[1]]):
        x, y = by_id[0].get(request_id), by_id[1].get(request_id)
        if x != y:
            parts.append(f"{request_id}: {_did(x)} | {_did(y)}")
    hits = [_hits(log, at) for log, at in zip(logs, steps)]
    if hits[0] != hits[1]:
        parts.append(_("the prefix cache was hit otherwise"))
    shaping = [d for d in made.config if d.name in _SCHEDULING]
    if shaping:
        parts.append(_("knobs differ ({what})").format(what=", ".join(map(str, shaping))))
    return "; ".join(parts)


_SCHEDULING = (
    "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "block_size", "num_kv_blocks",
    "max_model_len", "batching", "scheduling_policy", "preemption_mode",
)  # fmt: skip


def _did(run: Run | None) -> str:
    if run is None:
        return _("did not run")
    return _("{phase} of {n} from position {start}").format(phase=run.phase, n=run.num_tokens, start=run.start)


def _hits(log: EventLog, step: int) -> dict[str, int]:
    return {e.request_id: e.num_hit_tokens for e in log.window(step, step) if isinstance(e, PrefixLookup)}
