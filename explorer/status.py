"""The status line and the list of who is here, as HTML."""

import html
from typing import Any

from engine.events.types import EngineStarted, StepDone
from explorer.i18n import _
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, number, owner_colour

STATES = {
    "new": (GREY, _("Not started")),
    "starting": (ORANGE, _("Loading")),
    "running": (GREEN, _("Running")),
    "paused": (BLUE, _("Engine paused")),
    "died": (VERMILLION, _("Engine stopped")),
}
COST_STEPS = 50  # the newest steps over which the cost of watching is taken


def status_line(session: Any, replay: Any = None) -> str:
    """State of the engine, model, number format, device, backends, and what watching costs. Of a ``Replay``: what it was made with."""
    colour, label = STATES[session.status] if replay is None else (PURPLE, _("Replayed"))
    started = session.store.started if replay is None else replay.store.started
    parts = [f'<span class="state" style="--c:{colour}" role="status">{html.escape(label)}</span>']
    if started is not None:
        model, rest, why = facts(started)
        parts.append(f'<span class="model" title="{html.escape(why)}">{html.escape(model)}</span>')
        parts.append(f'<span class="more ct-muted" title="{html.escape(why)}">{html.escape(rest)}</span>')
        cost = watching_cost(session.store) if replay is None else None
        if cost is not None:
            hint = _("Share of the newest {n} steps' time that recording events for the viewers took (derived).").format(
                n=COST_STEPS
            )
            text = _("watching {cost} on average").format(cost=number(cost, "%", 2))
            parts.append(f'<span class="more ct-muted" title="{html.escape(hint)}">{html.escape(text)}</span>')
    return f'<div class="line">{"".join(parts)}</div>'


def facts(started: EngineStarted) -> tuple[str, str, str]:
    """(model, "bfloat16 · CPU · torch", how that was decided) from an EngineStarted."""
    config, device = started.config, started.device
    model = str(started.model.get("name") or config.get("model", "?")).rstrip("/").rsplit("/", 1)[-1]
    rest = [device.get("dtype"), device.get("device"), device.get("attention_backend")]
    why = device.get("why") or ""
    reasons = "; ".join(f"{k}: {v}" for k, v in why.items()) if isinstance(why, dict) else str(why)
    name, threads, linear = device.get("name"), device.get("threads"), device.get("linear_backend")
    single = _("one request alone: {state}").format(state=device["single_row"]) if device.get("single_row") else ""
    more = [str(name) if name else "", _("{n} threads").format(n=threads) if threads else "", str(linear or ""), single, reasons]
    return model, " · ".join(dict.fromkeys(str(r) for r in rest if r)), ". ".join(m for m in more if m)


def watching_cost(store: Any) -> float | None:
    """Percent of the newest steps' time spent on recording; None without a step."""
    steps = [e for e in store.window(store.last_step - COST_STEPS + 1, store.last_step) if isinstance(e, StepDone)]
    total = sum(e.step_ms for e in steps)
    return 100 * sum(e.record_ms for e in steps) / total if total > 0 else None


def here(session: Any, owner: str) -> str:
    """Who has a page open, each with the colour of their requests."""
    people = []
    for viewer in session.viewers:
        you = _(" (you)") if viewer.owner == owner else ""
        people.append(
            f'<div><span class="ct-dot" style="--c:{owner_colour(viewer.owner)}"></span>{html.escape(viewer.owner + you)}</div>'
        )
    return f'<div class="ct-small" style="display:grid;gap:5px">{"".join(people)}</div>'
