"""The answers on the Run page: what the token cards are told, and what they ask."""

import math
from collections.abc import Iterable
from typing import Any

from engine.events.state import ReqView, State
from explorer.base import Clock
from explorer.canvas.tokens import TokenCards
from explorer.i18n import _, ngettext
from explorer.run.rows import RequestRow, RunRows, Token
from explorer.theme import owner_colour

PROMPT_SHOWN = 4000  # characters of a prompt that a card carries
REASONS = {
    "stop": _("done: the model stopped"),
    "length": _("done: token limit"),
    "abort": _("stopped"),
    "error": _("error"),
}
Op = list[Any]


class Answers:
    """Keeps the cards in step with ``rows`` and the clock; sends differences while live."""

    def __init__(self, rows: RunRows, store: Any, session: Any, clock: Clock) -> None:
        self.rows, self.store, self.session, self.clock = rows, store, session, clock
        self.cards = TokenCards(self.select, self.stop, recorded=session is None)
        self._drawn: set[str] = set()
        clock.param.watch(self._selection_moved, ["request_id", "token_index"])

    # -- telling ---------------------------------------------------------------------------------------------------------

    def refill(self) -> list[Op]:
        """Operations that draw every card from nothing."""
        self._drawn = set()
        ops: list[Op] = [["step", self._step]]
        for row in self.rows.requests.values():
            ops += [self._new_card(row), ["tokens", row.request_id, [_chip(t) for t in row.tokens]]]
        ops += self._statuses(self.rows.requests)
        return [*ops, ["select", self.clock.request_id, self.clock.token_index]]

    def update(self, moved: bool) -> None:
        """After ``rows`` took events in; ``moved``: the step on the screen jumped, so every card's status may differ."""
        rows = self.rows
        if rows.restarted or self.cards.due:
            self.cards.due = False
            self.cards.ops([["reset"], *self.refill()])
            return
        ops: list[Op] = [["drop", request_id] for request_id in rows.dropped if request_id in self._drawn]
        self._drawn.difference_update(rows.dropped)
        ops += [self._new_card(row) for request_id, row in rows.requests.items() if request_id not in self._drawn]
        if moved:
            ops.append(["step", self._step])
        for request_id in rows.retold & rows.requests.keys():
            ops.append(["retell", request_id, [_chip(t) for t in rows.requests[request_id].tokens]])
        new = ((request_id, tokens) for request_id, tokens in rows.new_tokens.items() if request_id not in rows.retold)
        ops += [["tokens", request_id, [_chip(t) for t in tokens]] for request_id, tokens in new]
        if moved:
            ops += self._statuses(rows.requests)
        elif self.clock.live:
            ops += self._statuses(rows.changed)
        else:  # what ended meanwhile can no longer be stopped
            ops += self._statuses(i for i in rows.changed if i in rows.requests and rows.requests[i].finished_step is not None)
        self.cards.ops(ops)

    @property
    def _step(self) -> int | None:
        return None if self.clock.live else self.clock.shown(self.store.first_step, self.store.last_step)

    def _new_card(self, row: RequestRow) -> Op:
        self._drawn.add(row.request_id)
        mine = row.owner == self.clock.owner
        seen = ngettext("{n} token came before anybody watched.", "{n} tokens came before anybody watched.", row.before)
        return ["request", {
            "id": row.request_id, "label": row.request_id, "who": _("you") if mine else row.owner, "mine": mine and self.session is not None,
            "colour": owner_colour(row.owner), "prompt": _shortened(row.prompt), "before": seen.format(n=row.before) if row.before else "",
        }]  # fmt: skip

    def _statuses(self, request_ids: Iterable[str]) -> list[Op]:
        state: State = self.store.at(self.clock.shown(self.store.first_step, self.store.last_step))
        ops: list[Op] = []
        for request_id in request_ids:
            view = state.requests.get(request_id)
            row = self.rows.requests.get(request_id)
            if view is not None:
                unfinished = row is not None and row.finished_step is None  # now, whatever it was at the step on the screen
                ops.append(["status", request_id, status_text(view), unfinished, view.finish_reason == "error", True])
            elif row is not None and row.finished_step is not None and self.clock.live:
                ops.append(["status", request_id, REASONS.get(row.reason, _("ended")), False, row.reason == "error", True])
            else:  # it has not arrived yet at the step on the screen
                ops.append(["status", request_id, "", False, False, False])
        return ops

    def _selection_moved(self, *_events: Any) -> None:
        self.cards.ops([["select", self.clock.request_id, self.clock.token_index]])

    # -- asked -----------------------------------------------------------------------------------------------------------

    def select(self, request_id: str | None, token_index: int | None) -> None:
        if (
            request_id is not None
            and request_id == self.clock.request_id
            and token_index is None
            and self.clock.token_index is None
        ):
            request_id = None  # a second click takes the selection away
        self.clock.param.update(request_id=request_id, token_index=token_index)

    def stop(self, request_id: str) -> None:
        row = self.rows.requests.get(request_id)
        if self.session is not None and row is not None:
            self.session.abort(row.group_id, self.clock.owner)


def status_text(view: ReqView) -> str:
    """What a request is doing, in a few words."""
    if view.status == "finished":
        reason = REASONS.get(view.finish_reason or "", _("ended"))
        count = ngettext("{n} token", "{n} tokens", view.num_output_tokens).format(n=view.num_output_tokens)
        return f"{reason}: {view.message}" if view.finish_reason == "error" and view.message else f"{count} · {reason}"
    if view.status == "waiting":
        return _("waiting in the queue")
    if view.status == "preempted":
        if view.num_swapped_tokens:
            return _("preempted: its KV waits in host memory")
        return _("preempted: gave its blocks back")
    if view.num_computed_tokens < view.num_prompt_tokens:
        return _("prefill {done} / {all}").format(done=view.num_computed_tokens, all=view.num_prompt_tokens)
    return ngettext("{n} token", "{n} tokens", view.num_output_tokens).format(n=view.num_output_tokens)


def _chip(token: Token) -> list[Any]:
    logprob = token.logprob if math.isfinite(token.logprob) else None
    return [token.token_id, token.text, logprob, token.position, token.step, token.ms, token.rank]


def _shortened(text: str) -> str:
    return (
        text
        if len(text) <= PROMPT_SHOWN
        else _("{start}… ({n} characters)").format(start=text[:PROMPT_SHOWN], n=f"{len(text):,}")
    )
