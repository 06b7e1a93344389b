"""What the Roofline page says, as HTML and text. Pure."""

import html
from collections.abc import Sequence
from typing import Any

from engine.events.hardware import RoofsMeasured
from engine.hardware.roofline import Roofs, ridge
from explorer.i18n import _, ngettext
from explorer.roofline.figure import bound_words, times
from explorer.roofline.rows import PHASES, Step, judge
from explorer.roofline.whatif import WhatIf
from explorer.theme import badge, empty, number

NO_ENGINE = _("No engine has started yet.")
MEASURE = _("The roofs of this device are not known yet. Press Measure this device: two seconds or so, in which requests wait; then they are kept on disk.")  # fmt: skip
NOT_RECORDED = _("This run holds no measurement of its device's roofs; the GPUs below have those of their data sheets.")
MEASURING = _("Measuring: requests wait for two seconds or so.")
NO_STEPS = _(
    "No step has run yet. Send a prompt on the page Run, or press one of the scenes above: each engine step becomes a point."
)
NO_STEPS_RECORDED = _("No model has run yet at this step of the recorded run: step forward.")


def line(text: str) -> str:
    """One line; markup in it is kept."""
    return f'<p class="rf-line">{text}</p>'


def said(text: str, kind: str = "look") -> str:
    return f'<div class="rf-said {kind}" role="status">{text}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], wrap: bool = False) -> str:
    """``head`` is text, cells are HTML; the first cell of each row names it."""
    top = "".join(f'<th class="{"num" if i else ""}">{html.escape(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td class=num>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return (
        f'<div class="rf-scroll" tabindex="0"><table class="rf-table{" wrap" if wrap else ""}"><tr>{top}</tr>{body}</table></div>'
    )


def seconds(value: float) -> str:
    """ "6.42 ms", "1.25 s", "83.1 µs"."""
    if value >= 1:
        return number(value, "s")
    return number(1e3 * value, "ms") if value >= 1e-3 else number(1e6 * value, "µs")


# ------------------------------------------------------------------------------------------------------------- the device


def roofs_html(event: RoofsMeasured, roofs: Roofs, dtype: str) -> str:
    """The measured roofs of the device, the ridge of the running dtype first."""
    cells = [
        (number(event.copy_bandwidth, "B/s"), _("copied, read and written together")),
        (number(event.read_bandwidth, "B/s"), _("read")),
        *((number(rate, "FLOP/s"), _("{dtype} matrix product").format(dtype=name)) for name, rate in event.peak.items()),
    ]
    if dtype in event.peak:
        here = ridge(roofs.peak_of(dtype), roofs.bandwidth)
        cells.insert(0, (number(here, "FLOP/B"), _("ridge in {dtype}: below it memory binds").format(dtype=dtype)))
    body = "".join(f"<div><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>" for a, b in cells)
    where = event.name or event.device
    if event.device == "cpu":
        where += ngettext(", {n} thread", ", {n} threads", event.threads).format(n=event.threads)
    kept = _("measured before and kept") if event.kept else _("measured now and kept")
    return f'<div class="rf-now">{body}</div>' + line(
        html.escape(
            _("{where}; {kept}. The best of several tries of torch; on a busy machine they come out low.").format(
                where=where, kept=kept
            )
        )
    )


# --------------------------------------------------------------------------------------------------------- the shown step


def step_html(step: Step, roofs: Roofs | None, dtype: str) -> str:
    """What the step on the screen did, and what bounded it."""
    rows = [
        (_("arithmetic, counted"), number(step.flops, "FLOP")),
        (_("weights read, counted"), number(step.weight_bytes, "B")),
        (_("KV cache read, counted"), number(step.kv_read_bytes, "B")),
        (_("KV cache written, counted"), number(step.kv_write_bytes, "B")),
        (_("intensity = arithmetic / bytes"), number(step.intensity, "FLOP/B")),
        (_("forward pass, measured"), seconds(step.seconds)),
        (_("reached = arithmetic / time"), number(step.rate, "FLOP/s")),
        (_("bytes / time"), number(step.bandwidth, "B/s")),
    ]
    tokens = ngettext("{n} token", "{n} tokens", step.tokens).format(n=step.tokens)
    requests = ngettext("{n} request", "{n} requests", step.requests).format(n=step.requests)
    head = _("<b>Step {n}</b>, {phase}: {tokens} of {requests}.").format(
        n=step.step, phase=html.escape(PHASES[step.phase]), tokens=tokens, requests=requests
    )
    body = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in rows)
    return line(head) + verdict_html(step, roofs, dtype) + f'<dl class="rf-facts">{body}</dl>'


def verdict_html(step: Step, roofs: Roofs | None, dtype: str) -> str:
    if roofs is None:
        return ""
    try:
        found = judge(step, roofs, dtype)
    except ValueError as error:
        return said(html.escape(str(error)), "mind")
    text = _("Bound by {what} ({m} against {c}).").format(
        what=bound_words(found.bound.by, found.bound.times), m=seconds(found.bound.memory_s), c=seconds(found.bound.compute_s)
    )
    if found.share <= 1:
        text += " " + _("It took {t}, {n} the least that the roofs allow: {share:.0f} % of the roof.").format(
            t=seconds(step.seconds), n=times(1 / found.share), share=100 * found.share
        )
    else:
        text += " " + _(
            "It took {t}, less than the roofs allow ({share:.0f} %): a cache held part of what is counted as moved, or the machine was busier while the roofs were measured."
        ).format(t=seconds(step.seconds), share=100 * found.share)
    return said(html.escape(text))


# ---------------------------------------------------------------------------------------------------------------- what if


def what_if_html(what_ifs: Sequence[WhatIf], notes: Sequence[str]) -> str:
    """Prefill and decode under each device's roofs; ``notes`` say why there is nothing for one."""
    rows = []
    for w in what_ifs:
        device = _("this device") if w.roofs.kind == "measured" else w.roofs.name
        for name, p in ((_("prefill"), w.prefill), (_("decode"), w.decode)):
            rows.append([
                f"{html.escape(device)}, {html.escape(name)}", html.escape(number(p.intensity, "FLOP/B")),
                html.escape(seconds(p.bound.seconds)), html.escape(f"{p.tokens_per_s:,.0f}"),
                html.escape(_("memory") if p.bound.by == "memory" else _("arithmetic")), html.escape(times(p.bound.times)),
            ])  # fmt: skip
    head = [_("on"), _("intensity"), _("at the least"), _("tokens/s at the most"), _("bound by"), _("over the other")]
    body = table(head, rows) if rows else ""
    body += "".join(said(html.escape(note), "mind") for note in notes)
    return body or empty(NO_ENGINE)


def work_words(what: WhatIf, kv_heads: int, heads: int) -> str:
    """What the modelled points stand for. Plain text."""
    w = what.work
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    decode = ngettext(
        "Decode: one token of one request at context {t:,}.",
        "Decode: one token for each of {b} requests at context {t:,}.",
        w.batch,
    ).format(b=w.batch, t=w.context)
    return decode + " " + _(
        "Prefill: one prompt of {t:,} tokens. Linear weights of {bits:g} bits "
        "(scales counted), the rest in {dtype}; KV cache: {kv}, {n} KV heads for {h} query heads ({kind})."
    ).format(
        t=w.context, bits=w.bits_per_weight, dtype=w.dtype, kv=w.dtype if w.kv_dtype == "auto" else w.kv_dtype,
        n=kv_heads, h=heads, kind=kind,
    )  # fmt: skip


FORMULA = _("time = max(FLOPs / peak, bytes / bandwidth); FLOPs and bytes are counted as for the engine's own steps")


def formula_html() -> str:
    return line(f'{badge("modelled")} <span class="ct-muted">{html.escape(FORMULA)}</span>')


_RATES = {"tf32": _("tf32 (taken for float32, too)")}


def gpu_html(gpu: Any) -> str:
    """Where the numbers of a GPU come from."""
    names = {"bandwidth": _("bandwidth"), "memory_bytes": _("memory"), **{f"peak.{d}": d for d in gpu.peak}}
    by_source: dict[str, list[str]] = {}
    for key, name in names.items():
        by_source.setdefault(gpu.sources[key], []).append(name)
    facts = ", ".join([
        f"{gpu.bandwidth / 1e12:.3g} TB/s", *(f"{rate / 1e12:,.4g} T{'OP' if d == 'int8' else 'FLOP'}/s {_RATES.get(d, d)}" for d, rate in gpu.peak.items()),
        f"{gpu.memory_bytes / 1e9:.0f} GB",
    ])  # fmt: skip
    body = "".join(f"<li>{html.escape(', '.join(parts))}: {html.escape(source)}</li>" for source, parts in by_source.items())
    return line(f"<b>{html.escape(gpu.title)}</b>: {html.escape(facts)}") + f'<ul class="rf-list">{body}</ul>'
