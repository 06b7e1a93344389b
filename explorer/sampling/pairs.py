"""Two requests of one run side by side: how far their texts agree, the first difference, and its cause. Pure, on tracks and a store."""

import html
from dataclasses import dataclass
from typing import Any

from engine.events.types import TokenSampled
from explorer.compare.cause import SHAPING, Cause, Changed, differences, token_cause
from explorer.i18n import _
from explorer.sampling.rows import UNSEEN, SamplingRows, Track

CONTEXT = 400  # characters of a text that are shown on either side of the difference


@dataclass(frozen=True)
class SideBySide:
    """``index``: of the first output token that differs; None when none does. ``cause``: why, where it can be said."""

    a: Track
    b: Track
    index: int | None
    changed: tuple[Changed, ...]
    cause: Cause | None


def partners(tracks: dict[str, Track], track: Track) -> list[Track]:
    """Requests that can be laid beside ``track``: those of the same prompt, the nearest in time first."""
    same = [t for t in tracks.values() if t is not track and not t.is_beam and t.prompt_token_ids == track.prompt_token_ids]
    return sorted(same, key=lambda t: (abs(t.ordinal - track.ordinal), t.ordinal))


def first_difference(a: Track, b: Track) -> int | None:
    """The index of the first output token that is not the same; where one ends, or is still being written, nothing differs yet."""
    for i, (x, y) in enumerate(zip(a.output_token_ids, b.output_token_ids, strict=False)):
        if x != y and UNSEEN not in (x, y):
            return i
    return None


def side_by_side(store: Any, rows: SamplingRows, a: Track, b: Track) -> SideBySide:
    """``a`` and ``b`` have the same prompt. What a branch took over was chosen in the request that it left."""
    index = first_difference(a, b)
    greedy = all(t.sampling.get("temperature") == 0 for t in (a, b))  # no dart is thrown: their seeds say nothing
    changed = differences(a.sampling, b.sampling, SHAPING if greedy else (*SHAPING, "seed"))
    if index is None:
        return SideBySide(a, b, None, changed, None)
    position = a.num_prompt_tokens + index
    events = [_event(store, rows, t, position) for t in (a, b)]
    if events[0] is None or events[1] is None:
        forced = next((t for t in (a, b) if t.branched_at == position), None)
        words = (
            _("request {id} was forced to this token").format(id=forced.request_id)
            if forced is not None
            else _("how this token was chosen is no longer kept")
        )
        return SideBySide(a, b, index, changed, Cause("unseen", words))
    dtype = str(store.started.device.get("dtype")) if store.started is not None else ""
    sampling = a.sampling_at(position), b.sampling_at(position)
    return SideBySide(a, b, index, changed, token_cause(events[0], events[1], sampling, (), (), dtype))


def _event(store: Any, rows: SamplingRows, track: Track, position: int) -> TokenSampled | None:
    """How the token there was chosen; None where it was forced, or where nothing is kept of it."""
    at: Track | None = track
    while at is not None and position < at.branched_at:
        at = rows.tracks.get(at.branched_from or "")
    point = at.points.get(position) if at is not None else None
    return rows.events_of(store, point, at.request_id)[0] if at is not None and point is not None else None


def pair_html(pair: SideBySide) -> str:
    """Both texts with the first difference marked, what was set differently, and the cause."""
    what = ", ".join(map(str, pair.changed)) or _("nothing")
    told = f'<p class="sa-line">{html.escape(_("Set differently: {what}.").format(what=what))}</p>'
    if pair.index is None:
        why = f'<p class="sa-line"><b>{html.escape(_("No difference so far."))}</b></p>'
    else:
        assert pair.cause is not None
        where = _("First difference: output token {n}, position {position}.").format(
            n=pair.index + 1, position=pair.a.num_prompt_tokens + pair.index
        )
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in pair.cause.facts)
        words = pair.cause.words[:1].upper() + pair.cause.words[1:]
        why = f'<p class="sa-line"><b>{html.escape(where)}</b> {html.escape(words)}.</p>'
        why += f'<ul class="sa-facts">{facts}</ul>' if facts else ""
    texts = "".join(_text_html(track, pair.index) for track in (pair.a, pair.b))
    return f'<div class="sa-pair">{texts}</div>{told}{why}'


def _text_html(track: Track, index: int | None) -> str:
    at = len(track.output_texts) if index is None else index
    before, here, after = (
        "".join(track.output_texts[:at]),
        "".join(track.output_texts[at : at + 1]),
        "".join(track.output_texts[at + 1 :]),
    )
    before = f"…{before[-CONTEXT:]}" if len(before) > CONTEXT else before
    after = f"{after[:CONTEXT]}…" if len(after) > CONTEXT else after
    mark = f"<mark>{html.escape(here)}</mark>" if here else ""
    return (
        f'<div><div class="sa-name">{html.escape(track.request_id)}</div><div class="sa-text"><span class="ct-muted">{html.escape(before)}</span>'
        f"{mark}{html.escape(after)}</div></div>"
    )
