"""Trees of tokens as lanes: branches of a request, and the beams of a search. Columns are positions. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.events.types import BeamsSelected
from explorer.i18n import _
from explorer.sampling.rows import BeamRun, Track

MAX_COLUMNS = 160  # positions drawn, the newest
MAX_BRANCHES = 24  # lanes of a family
UNKNOWN = -1  # id of a token that no event told
PLAIN, BEST, DEAD, ENDED, FORCED, INHERITED = "", "best", "dead", "ended", "forced", "inherited"


@dataclass
class Node:
    """One token at one place. ``parent``: index of the node before it, -1: none drawn. ``key``: what a click is told."""

    column: int
    lane: int
    text: str
    state: str
    parent: int
    hint: list[tuple[str, str]]  # (label, value)
    key: list[Any]
    token_id: int = -1


@dataclass
class Lanes:
    names: list[str] = field(default_factory=list)  # one a lane
    nodes: list[Node] = field(default_factory=list)
    left_out: int = 0  # columns in front that are not drawn

    def data(self) -> dict[str, Any]:
        """As the canvas takes it."""
        first = min((n.column for n in self.nodes), default=0)
        return {
            "names": self.names, "first": first, "leftOut": self.left_out,
            "nodes": [[n.column - first, n.lane, n.text, n.state, n.parent, [list(h) for h in n.hint], n.key] for n in self.nodes],
        }  # fmt: skip

    def children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            found.setdefault(node.parent, []).append(i)
        return found

    def tokens(self, index: int) -> list[int]:
        """The token ids on the way from the beginning to a node."""
        way: list[int] = []
        while index >= 0:
            way.append(self.nodes[index].token_id)
            index = self.nodes[index].parent
        return way[::-1]


# -- branches ------------------------------------------------------------------------------------------------------------------


def family(tracks: dict[str, Track], track: Track) -> list[Track]:
    """The request that ``track`` goes back to, and every branch of it, sources before their branches."""
    root = track
    while root.branched_from is not None and root.branched_from in tracks:
        root = tracks[root.branched_from]
    found = [root]
    for each in found:  # grows meanwhile
        found += [t for t in tracks.values() if t.branched_from == each.request_id]
    return found[:MAX_BRANCHES]


def branch_lanes(members: list[Track], step: int) -> Lanes:
    """A lane for each request of a family: its own tokens, hung where it left its source. Tokens that came after ``step`` are not there."""
    made = Lanes()
    shown = [t for t in members if t.arrived_step <= step]
    ends = [max((p.position for p in t.until(step)), default=t.branched_at) for t in shown]
    first = max(0, max(ends, default=0) - MAX_COLUMNS + 1)
    place: dict[tuple[str, int], int] = {}  # (request, position) -> its node
    for lane, track in enumerate(shown):
        made.names.append(track.request_id)
        begin = track.branched_at if track.branched_from is not None else track.num_prompt_tokens
        parent = _node_before(place, members, track, begin - 1)
        tokens = {p.position: p for p in track.until(step)}
        if track.branched_from is not None:
            forced = begin - track.num_prompt_tokens
            text = track.output_texts[forced] if 0 <= forced < len(track.output_texts) else "…"
            parent = _put(made, place, track, begin, lane, text, FORCED, parent, first, [(_("forced at"), str(begin))], UNKNOWN)
        for position, point in tokens.items():
            hint = [
                (_("position"), str(position)),
                (_("raw probability"), f"{100 * math.exp(point.logprob):.3g} %"),
                (_("rank"), str(point.rank)),
            ]
            parent = _put(made, place, track, position, lane, point.text, PLAIN, parent, first, hint, point.token_id)
    made.left_out = max(0, first - min((t.num_prompt_tokens for t in shown), default=0))
    return made


def _node_before(place: dict[tuple[str, int], int], members: list[Track], track: Track, position: int) -> int:
    """The node at ``position`` of the nearest ancestor that has one."""
    by_id = {t.request_id: t for t in members}
    source = track.branched_from
    while source is not None:
        if (source, position) in place:
            return place[source, position]
        source = by_id[source].branched_from if source in by_id else None
    return -1


def _put(
    made: Lanes, place: dict[tuple[str, int], int], track: Track, position: int, lane: int, text: str, state: str, parent: int, first: int,
    hint: list[tuple[str, str]], token_id: int,
) -> int:  # fmt: skip
    if position < first:
        return -1
    made.nodes.append(Node(position, lane, text, state, parent, hint, [track.request_id, position], token_id))
    place[track.request_id, position] = len(made.nodes) - 1
    return len(made.nodes) - 1


# -- beams ---------------------------------------------------------------------------------------------------------------------


def beam_lanes(run: BeamRun, step: int) -> Lanes:
    """A lane for each beam, and below them one for each sequence that ended. A token is dead when no beam went on from it."""
    made = Lanes()
    steps = [e for e in run.steps if e.step <= step]
    drawn = steps[-MAX_COLUMNS:]
    made.left_out = len(steps) - len(drawn)
    width = max([run.width, *(c.beam + 1 for e in drawn for c in e.candidates)])
    last: dict[int, int] = {}  # beam -> its newest node
    num_ended = 0
    for e in drawn:
        now: dict[int, int] = {}
        for c in e.candidates:
            if c.fate == "dropped":
                continue
            lane = c.beam if c.fate == "kept" else width + num_ended
            num_ended += c.fate == "ended"
            hint = [
                (_("position"), str(e.position)), (_("log-probability"), f"{c.logprob:.3f}"), (_("sum so far"), f"{c.sum_logprob:.3f}"),
                *([(_("score"), f"{c.score:.3f}")] if c.fate == "ended" else []), (_("went on from beam"), str(c.source)),
            ]  # fmt: skip
            state = ENDED if c.fate == "ended" else PLAIN
            made.nodes.append(Node(e.position, lane, c.text, state, last.get(c.source, -1), hint, [e.step, lane], c.token_id))
            if c.fate == "kept":
                now[c.beam] = len(made.nodes) - 1
        last = now
    made.names = [_("beam {n}").format(n=i) for i in range(width)] + [_("ended {n}").format(n=i + 1) for i in range(num_ended)]
    _mark_dead(made, set(last.values()))
    over = run.finished is not None and run.finished.step <= step
    if over and run.finished is not None and run.finished.sequences:
        _mark_best(made, run.finished.sequences[0].token_ids)
    return made


def _mark_dead(made: Lanes, alive: Iterable[int]) -> None:
    """Whoever leads to no living beam and to no end is dead; where that began is where it died."""
    reaches: set[int] = set()
    for i in [*alive, *(i for i, node in enumerate(made.nodes) if node.state == ENDED)]:
        while i >= 0 and i not in reaches:
            reaches.add(i)
            i = made.nodes[i].parent
    for i, node in enumerate(made.nodes):
        if i not in reaches:
            node.state = DEAD


def _mark_best(made: Lanes, token_ids: list[int]) -> None:
    """The way of the best sequence (its last tokens, where its beginning is not drawn)."""
    for i in range(len(made.nodes) - 1, -1, -1):
        way = made.tokens(i)
        if way and (way == token_ids or (made.left_out and way == token_ids[-len(way) :])):
            while i >= 0:
                made.nodes[i].state = BEST
                i = made.nodes[i].parent
            return


def deaths(steps: list[BeamsSelected]) -> list[tuple[int, list[int]]]:
    """(position, beams whose text nothing went on from at that position), where there were any."""
    found = []
    held: set[int] = set()
    for e in steps:
        sources = {c.source for c in e.candidates if c.fate != "dropped"}
        if held and (gone := sorted(held - sources)):
            found.append((e.position, gone))
        held = {c.beam for c in e.candidates if c.fate == "kept"}
    return found
