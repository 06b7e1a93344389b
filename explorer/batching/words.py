"""What the Batching page says: measures as tables, the state of a load, empty states. Pure."""

import html
import math
from collections.abc import Callable
from typing import Any

from engine.measures import NAMES, Distribution, Measures
from explorer.batching.rows import LoadRun
from explorer.i18n import _, ngettext
from explorer.theme import number

NOTHING = _("Nothing has run yet. Start a load, press a scene, or send prompts on the Run page.")
NOTHING_RECORDED = _("No step has run yet at this step of the recorded run: step forward.")
NO_ENGINE = _("The engine is not running yet.")
NO_MEASURES = _("Measures come with the first finished request.")
ALL = _("everything recorded")
POLICIES = {"continuous": _("continuous"), "static": _("static"), "dynamic": _("dynamic")}

HINTS = {
    "output": _("Tokens generated a second, whatever became of their requests."),
    "goodput": _("Completed requests a second that kept both limits below (DistServe, arXiv 2401.09670)."),
    "kv": _("Share of the pool's blocks that requests hold, over the time of the steps."),
    "padding": _("Tokens computed for nobody, of all computed tokens: static batches pad prompts to the longest and run until the last has ended."),
    "budget": _("Tokens of a step, of its token budget (mean over steps)."),
    "preemptions": _("Times that a running request had to give its blocks back."),
    "queue": _("Requests that wait to be admitted, over the time of the steps."),
    "running": _("Requests in the batch, over the time of the steps."),
    "refused": _("Requests that found the queue full."),
    "ttft_s": _("Time to first token: from the request's arrival to its first token, queueing and prefill included."),
    "itl_s": _("Inter-token latency: every gap between two tokens of a request. A stall shows in its p99."),
    "tpot_s": _("Time per output token: one a request, its mean gap."),
    "queue_s": _("From the arrival to the first step that runs the request."),
    "e2e_s": _("From the arrival to the request's end."),
}  # fmt: skip
LATENCIES = {"ttft_s": _("TTFT"), "itl_s": _("ITL"), "tpot_s": _("TPOT"), "queue_s": _("Queue time"), "e2e_s": _("End to end")}


def ms(seconds: float) -> str:
    """Short, for a table: ms below ten seconds, then seconds."""
    if math.isnan(seconds):
        return "–"
    return (
        f"{1e3 * seconds:,.0f} ms"
        if 0.0995 <= seconds < 9.9995
        else number(1e3 * seconds, "ms")
        if seconds < 1
        else f"{seconds:,.1f} s"
    )


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def rate(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


# -- measures of one run -----------------------------------------------------------------------------------------------------


def tiles(m: Measures) -> list[tuple[str, str, str, str]]:
    """(title, value, what stands below it, hint) of the measures that are one number."""
    s = m.steps
    found = [
        (_("Output"), f"{rate(m.output_throughput)} tok/s", _("{n} tok/s in").format(n=rate(m.input_throughput)), HINTS["output"]),
        (_("Goodput"), f"{rate(m.goodput)} req/s", _("{share} kept the limits").format(share=percent(m.good_share)), HINTS["goodput"]),
    ]  # fmt: skip
    if s is not None:
        found += [
            (_("In the batch"), f"{s.running:.1f}", _("at most {n}").format(n=s.running_max), HINTS["running"]),
            (_("Queue"), f"{s.waiting:.1f}", _("at most {n}").format(n=s.waiting_max), HINTS["queue"]),
            (_("Budget used"), percent(s.budget_share), _("{n:.1f} tokens a step").format(n=s.step_tokens), HINTS["budget"]),
            (_("Padding"), percent(s.padding_share), _("of computed tokens"), HINTS["padding"]),
            (_("KV use"), percent(s.kv_usage), _("at most {n}").format(n=percent(s.kv_usage_max)), HINTS["kv"]),
        ]
    found.append(
        (_("Preemptions"), f"{m.num_preemptions:,}", _("{n} refused").format(n=m.outcomes["queue full"]), HINTS["preemptions"])
    )
    return found


def tiles_html(m: Measures) -> str:
    body = "".join(
        f'<div class="bt-tile" title="{html.escape(hint)}"><span>{html.escape(title)}</span><b>{html.escape(value)}</b><small>{html.escape(below)}</small></div>'
        for title, value, below, hint in tiles(m)
    )
    return f'<div class="bt-tiles">{body}</div>'


def latencies_html(m: Measures) -> str:
    head = "".join(f"<th class=num>{name}</th>" for name in ("p50", "p90", "p99", _("max"), _("count")))
    body = ""
    for name, title in LATENCIES.items():
        d: Distribution = getattr(m, name)
        cells = "".join(f"<td class=num>{ms(v)}</td>" for v in (d.p50, d.p90, d.p99, d.max))
        hint = f"{HINTS[name]} {NAMES.get(name, '')}".strip()
        body += f'<tr title="{html.escape(hint)}"><td>{html.escape(title)}</td>{cells}<td class=num>{d.count:,}</td></tr>'
    return f'<div class="bt-scroll"><table class="bt-table"><tr><th></th>{head}</tr>{body}</table></div>'


def requests_line(m: Measures) -> str:
    counts = [f"{n:,} {OUTCOMES[name]}" for name, n in m.outcomes.items() if n]
    total = ngettext("{n} request", "{n:,} requests", m.num_requests).format(n=m.num_requests)
    cached = _("; {n:,} prompt tokens came from the prefix cache").format(n=m.num_cached_tokens) if m.num_cached_tokens else ""
    return html.escape(f"{total}: {', '.join(counts) or '–'}{cached}.")


OUTCOMES = {
    "stop": _("stopped"), "length": _("complete"), "abort": _("aborted"), "error": _("failed"), "queue full": _("refused, queue full"),
    "unfinished": _("under way"),
}  # fmt: skip


# -- loads -------------------------------------------------------------------------------------------------------------------


def load_html(state: Any) -> str:
    """``state``: a LoadState, or None."""
    if state is None:
        return f'<p class="ct-muted ct-small">{html.escape(_("No load of yours yet. Its requests share the engine with everybody who is here."))}</p>'
    done = state.finished + state.refused
    share = 100 * min(1.0, done / state.total) if state.total else 0.0
    word = _("over") if state.over else _("stopping") if state.stopping else _("running")
    parts = [
        f"<b>{html.escape(state.name)}</b> {html.escape(word)}",
        _("{sent} of {total} sent").format(sent=state.sent + state.refused, total=state.total),
        _("{n} finished").format(n=state.finished),
        _("{n} without a token yet").format(n=state.waiting),
        f"<b>{html.escape(_('{n} refused, queue full').format(n=state.refused))}</b>" if state.refused else _("none refused"),
        f"{state.seconds:.0f} s",
    ]
    bad = (
        f'<p class="bt-said error">{html.escape(_("{n} failed: {why}").format(n=state.failed, why=state.error))}</p>'
        if state.failed or state.error
        else ""
    )
    bar = f'<div class="bt-progress" role="progressbar" aria-label="{html.escape(_("Load"))}" aria-valuenow="{share:.0f}" aria-valuemin="0" aria-valuemax="100"><i style="width:{share:.1f}%"></i></div>'
    return f'{bar}<p class="bt-line" role="status">{" · ".join(parts)}</p>{bad}'


def knobs_line(knobs: dict[str, Any]) -> str:
    """How the scheduler was set, in a line."""
    policy = str(knobs.get("batching") or "continuous")
    parts = [POLICIES.get(policy, policy)]
    if policy == "dynamic" and knobs.get("batching_timeout_ms") is not None:
        parts.append(_("waits {ms:g} ms").format(ms=knobs["batching_timeout_ms"]))
    if knobs.get("max_num_seqs") is not None:
        parts.append(_("batch {n}").format(n=knobs["max_num_seqs"]))
    if knobs.get("max_num_batched_tokens") is not None:
        parts.append(_("budget {n}").format(n=knobs["max_num_batched_tokens"]))
    if knobs.get("enable_chunked_prefill") is not None:
        parts.append(_("chunked") if knobs["enable_chunked_prefill"] else _("not chunked"))
    if knobs.get("preemption_mode") == "swap":
        parts.append(_("swap"))
    if knobs.get("prefix_index") == "radix":
        parts.append(_("radix"))
    return ", ".join(parts)


def run_label(run: LoadRun) -> str:
    return f"{run.name}: {knobs_line(run.knobs)}"


# -- two runs ----------------------------------------------------------------------------------------------------------------

Value = Callable[[Measures], float]
# (title, its value, how it reads, 1 where more is better, -1 where less is, 0 where neither; the hint)
COMPARED: tuple[tuple[str, Value, Callable[[float], str], int, str], ...] = (
    (_("Time for all"), lambda m: m.duration_s, lambda v: "–" if math.isnan(v) else f"{v:.2f} s", -1, _("From the first arrival to the last token.")),
    (_("Output tokens/s"), lambda m: m.output_throughput, rate, 1, HINTS["output"]),
    (_("Requests/s"), lambda m: m.request_throughput, rate, 1, _("Completed requests a second.")),
    (_("Goodput, requests/s"), lambda m: m.goodput, rate, 1, HINTS["goodput"]),
    (_("TTFT p50"), lambda m: m.ttft_s.p50, ms, -1, HINTS["ttft_s"]),
    (_("TTFT p99"), lambda m: m.ttft_s.p99, ms, -1, HINTS["ttft_s"]),
    (_("ITL p50"), lambda m: m.itl_s.p50, ms, -1, HINTS["itl_s"]),
    (_("ITL p99"), lambda m: m.itl_s.p99, ms, -1, HINTS["itl_s"]),
    (_("TPOT p50"), lambda m: m.tpot_s.p50, ms, -1, HINTS["tpot_s"]),
    (_("TPOT p99"), lambda m: m.tpot_s.p99, ms, -1, HINTS["tpot_s"]),
    (_("End to end p50"), lambda m: m.e2e_s.p50, ms, -1, HINTS["e2e_s"]),
    (_("Queue time p99"), lambda m: m.queue_s.p99, ms, -1, HINTS["queue_s"]),
    (_("Steps"), lambda m: float(m.steps.num_steps) if m.steps else math.nan, lambda v: "–" if math.isnan(v) else f"{v:,.0f}", -1, _("Engine steps.")),
    (_("In the batch, mean"), lambda m: m.steps.running if m.steps else math.nan, lambda v: "–" if math.isnan(v) else f"{v:.1f}", 0, HINTS["running"]),
    (_("Budget used"), lambda m: m.steps.budget_share if m.steps else math.nan, percent, 0, HINTS["budget"]),
    (_("Padding"), lambda m: m.steps.padding_share if m.steps else math.nan, percent, -1, HINTS["padding"]),
    (_("KV use, mean"), lambda m: m.steps.kv_usage if m.steps else math.nan, percent, 0, HINTS["kv"]),
    (_("Preemptions"), lambda m: float(m.num_preemptions), lambda v: f"{v:,.0f}", -1, HINTS["preemptions"]),
)  # fmt: skip


def delta(a: float, b: float) -> str:
    """B against A: a factor where that says something, in percent else."""
    if math.isnan(a) or math.isnan(b) or a == b:
        return "=" if a == b else "–"
    if not a:
        return "–"
    times = b / a
    if times >= 1.995 or 0 < times <= 0.5:
        return f"× {times:.2f}" if times >= 0.01 else "× 0.0"
    return f"{100 * (times - 1):+.0f} %"


def compared_html(a: Measures, b: Measures, name_a: str, name_b: str) -> str:
    head = f"<tr><th></th><th class=num>A · {html.escape(name_a)}</th><th class=num>B · {html.escape(name_b)}</th><th class=num>{html.escape(_('B against A'))}</th></tr>"
    body = ""
    for title, value, text, better, hint in COMPARED:
        x, y = value(a), value(b)
        sign = better * ((y > x) - (y < x)) if not (math.isnan(x) or math.isnan(y)) else 0
        mark, word = {1: ("▲", _("better")), -1: ("▼", _("worse")), 0: ("", "")}[sign]
        note = (
            f' <span class="bt-{"good" if sign > 0 else "bad"}">{mark} {html.escape(word)}</span>'
            if sign and delta(x, y) != "+0 %" and delta(x, y) != "-0 %"
            else ""
        )
        body += f'<tr title="{html.escape(hint)}"><td>{html.escape(title)}</td><td class=num>{text(x)}</td><td class=num>{text(y)}</td><td class=num>{html.escape(delta(x, y))}{note}</td></tr>'
    return f'<div class="bt-scroll"><table class="bt-table">{head}{body}</table></div>'


def verdict(a: Measures, b: Measures, name_a: str, name_b: str) -> str:
    """The comparison in a sentence or two."""
    if not (a.duration_s > 0 and b.duration_s > 0):
        return ""
    parts = [
        _("The same requests took {a:.1f} s under A ({name_a}) and {b:.1f} s under B ({name_b}): {delta}.").format(
            a=a.duration_s, b=b.duration_s, name_a=name_a, name_b=name_b, delta=delta(a.duration_s, b.duration_s)
        ),
        _("Half of them had their first token within {a} and {b}; one gap between tokens in a hundred was longer than {c} and {d}.").format(
            a=ms(a.ttft_s.p50), b=ms(b.ttft_s.p50), c=ms(a.itl_s.p99), d=ms(b.itl_s.p99)
        ),
    ]  # fmt: skip
    pad_a, pad_b = (m.steps.padding_share if m.steps else 0.0 for m in (a, b))
    if max(pad_a, pad_b) > 0:
        parts.append(_("Padding was {a} and {b} of what was computed.").format(a=percent(pad_a), b=percent(pad_b)))
    return " ".join(parts)


def said(text: str, kind: str = "") -> str:
    """``text`` is escaped. ``kind``: "", "wait", "error"."""
    return f'<div class="bt-said {kind}" role="status">{html.escape(text)}</div>' if text else ""
