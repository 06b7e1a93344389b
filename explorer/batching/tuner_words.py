"""What the tuner's tab says, as HTML. Pure; every text is escaped."""

import html
import math

from engine.tuning.result import GOOD_SHARE, Trial, Tuning
from engine.tuning.search import Budget
from explorer.batching.tuner_figure import LEGEND
from explorer.batching.tuner_rows import THROUGHPUTS, changed, knobs_label, progress
from explorer.i18n import _, ngettext
from explorer.quantization.labels import said, share, table
from explorer.theme import number

STATES = {"running": _("runs"), "done": _("done"), "failed": _("failed"), "stopped": _("stopped")}
STOPPED = {
    "trials": _("All trials were run."),
    "seconds": _("The time was over."),
    "cancelled": _("It was cancelled."),
    "exhausted": _("Everything there was to choose from was tried."),
}


MARKS = {"chosen": "★", "default": "◆", "front": "●", "dominated": "●", "limit": "┆"}


def legend_html() -> str:
    """What the marks of the scatter mean."""
    spans = [
        f'<span><i style="color:{colour}" aria-hidden="true">{MARKS[kind]}</i>{html.escape(label)}</span>'
        for kind, colour, label in LEGEND
    ]
    return f'<div class="tn-legend">{"".join(spans)}</div>'


def duration(seconds: float) -> str:
    return number(seconds, "s") if seconds >= 1 else number(1e3 * seconds, "ms")


def progress_html(found: Tuning, budget: Budget, mine: bool) -> str:
    """While it runs: how far it is, and what it is at."""
    ended = sum(t.state != "running" for t in found.trials)
    failed = sum(t.state == "failed" for t in found.trials)
    text = _("{n} of at most {of} trials, {seconds:.0f} s").format(n=ended, of=budget.trials, seconds=found.seconds)
    if budget.seconds:
        text += " " + _("of at most {seconds:.0f} s").format(seconds=budget.seconds)
    if failed:
        text += "; " + ngettext("{n} failed", "{n} failed", failed).format(n=failed)
    running = [t for t in found.trials if t.state == "running"]
    now = "; ".join(_("trial {n} again").format(n=t.again) if t.again is not None else knobs_label(t.knobs) for t in running)
    body = html.escape(text) + (f"<br>{html.escape(_('Now: {what}').format(what=now))}" if now else "")
    if not mine:
        body += "<br>" + html.escape(_("Somebody else who is here started it."))
    return said(f'{body}<div class="qp-progress"><i style="width:{100 * progress(found, budget):.0f}%"></i></div>', "wait")


def verdict_html(found: Tuning, error: str = "") -> str:
    """When it has ended: what is gained."""
    if error:
        return said(html.escape(error), "error")
    parts = [STOPPED.get(found.stopped, "")]
    chosen = found.chosen
    if chosen is None:
        reason = next((t.reason for t in found.trials if t.reason), "")
        return said(html.escape(" ".join(filter(None, [*parts, _("Nothing was measured."), reason]))), "error")
    if not found.keeps_limits:
        parts.append(
            _("No configuration kept the limits for {share} of its requests; the best one did for {got}.").format(
                share=share(GOOD_SHARE, 0), got=share(chosen.good_share, 0)
            )
        )
    if chosen.number == 0:
        parts.append(_("Nothing was better than the configuration as it is."))
    else:
        parts.append(_gain(found))
    return said(html.escape(" ".join(filter(None, parts))), "look" if found.keeps_limits else "mind")


def _gain(found: Tuning) -> str:
    words = []
    for axis in ("goodput", "output_throughput"):
        gain = found.gain(axis)
        if gain is None:
            return _("The configuration as it is could not be measured: {reason}").format(reason=found.trials[0].reason)
        times = "" if math.isnan(gain.ratio) else f" (× {gain.ratio:.2f})"
        words.append(
            _("{name}: {old} as it is, {new} with the best one{times}").format(
                name=THROUGHPUTS[axis], old=number(gain.default), new=number(gain.chosen), times=times
            )
        )
    gain = found.gain()
    assert gain is not None
    how = (
        ngettext(
            "Both were measured again, in {n} pair.", "Both were measured again, in {n} pairs: these are the means.", gain.pairs
        ).format(n=gain.pairs)
        if gain.pairs
        else _("Neither was measured again: the best of many measurements is flattered.")
    )
    told = "; ".join(words)
    return f"{told[:1].upper()}{told[1:]}. {how}"


def trial_html(found: Tuning, trial: Trial) -> str:
    """In what a trial differs from the default, and its measures."""
    m = trial.measures
    assert m is not None
    differs = changed(trial, found.trials[0])
    what = knobs_label(differs) if differs else _("the configuration as it is")
    text = _("Trial {n}: {what}. TTFT {ttft} and ITL {itl} at the 99th percentile, {good} of the requests within the limits.").format(
        n=trial.number, what=what, ttft=duration(m.ttft_s.p99), itl=duration(m.itl_s.p99), good=share(m.good_share, 0)
    )  # fmt: skip
    return f'<p class="qp-line">{html.escape(text)}</p>'


def trials_table(found: Tuning) -> str:
    """One row a trial, as they were run."""
    head = [_("trial"), _("tokens/s"), _("goodput"), _("within limits"), _("p99 TTFT"), _("p99 ITL"), _("differs by")]
    front, chosen = {t.number for t in found.front()}, found.chosen
    rows = []
    for t in found.trials:
        on = chosen is not None and t.number == chosen.number
        mark = " ★" if on else " ●" if t.number in front else ""
        name = f"{t.number}{mark}" if t.again is None else _("{n} again").format(n=t.again)
        m = t.measures
        cells = ["–"] * 5
        if m is not None:
            cells = [
                number(m.output_throughput),
                number(m.goodput),
                share(m.good_share, 0),
                duration(m.ttft_s.p99),
                duration(m.itl_s.p99),
            ]
        differs = knobs_label(changed(t, found.trials[0])) if t.again is None else ""
        what = differs or ("" if t.again is not None else _("as it is") if t.number == 0 else "")
        state = "" if t.state == "done" else f"{STATES[t.state]}{': ' + t.reason if t.reason else ''}"
        last = " · ".join(filter(None, [what, state]))
        rows.append(
            ("now" if on else "base" if t.number == 0 else "", [html.escape(name), *map(html.escape, cells), html.escape(last)])
        )
    return table(head, rows, "tn-trials")
