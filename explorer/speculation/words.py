"""What the Speculation page says in words: empty states, and the plain sentence on whether speculation pays. Pure."""

import html
import math
from collections.abc import Sequence

from explorer.i18n import _, ngettext
from explorer.speculation.clock import MAX_K, Costs, Paired
from explorer.speculation.rows import Setting
from explorer.speculation.stats import method_name
from explorer.theme import number

NOTHING = _("No draft yet. Choose a drafter under Speculation, then press a scene or send a prompt of your own.")
NOTHING_RECORDED = _("No draft at this step of the recorded run, or none in it: this engine decoded plainly.")
OFF = _("Speculation is off: every token costs one pass of the model.")
NO_ROUND = _("The drafts of this request show here, step by step, once there is one.")
NO_CLOCK = _("The clock needs a few steps with a draft.")
NO_PAIR = _("No request was run both ways yet. Press Run again with K = 0: the same prompt and seed, without drafts.")
NO_PAIR_RECORDED = _("No request of this recorded run was run both ways.")
GAIN = 0.02  # what is nearer to 1 than this is called no difference


def setting_words(setting: Setting) -> str:
    """What the engine speculates with, in one line."""
    if not setting.method:
        return OFF
    if setting.k == 0:
        return _("K = 0: the drafter rests, every token costs one pass of the model.")
    shape = ""
    if setting.tree:
        shape = ", " + _("a tree with {shape} nodes at its depths").format(shape=", ".join(map(str, setting.tree)))
    return _("Now: {drafter}, K = {k}{shape}.").format(drafter=method_name(setting.method), k=setting.k, shape=shape)


def verdict(costs: Costs | None, pairs: Sequence[Paired], live: bool = True) -> str:
    """HTML: whether it pays now, and why. Measured where requests ran both ways, else derived from the steps. ``live``: there are
    buttons to press."""
    if costs is None:
        return ""
    fits = [p for p in pairs if p.fits(costs) and p.setting.k in (costs.k, "auto")]
    if not costs.ready:
        press = _("Press Run again with K = 0 when the request has ended.") if live else ""
        return f"<b>{html.escape(_('Does it pay?'))}</b> {html.escape(f'{costs.missing} {press}'.strip())}"
    gain = fits[-1].speedup if fits else costs.today
    how = _("measured on the same requests") if fits else _("derived from steps with drafts and without")
    parts = [_why(costs), _advice(costs)]
    if fits and (gain - 1) * (costs.today - 1) < 0:  # one says faster, the other slower
        parts.append(
            _(
                "The medians of the steps would give {x:.2f} times: the two runs came one after the other, and the machine was not equally "
                "busy in both. Run it again when it is quiet."
            ).format(x=costs.today)
        )
    return f"<b>{html.escape(_gain_words(gain, how))}</b> {html.escape(' '.join(parts))}"


def _gain_words(gain: float, how: str) -> str:
    if abs(gain - 1) < GAIN:
        return _("Speculation makes no difference now ({how}).").format(how=how)
    if gain > 1:
        return _("Speculation pays now: {x:.2f} times as fast as plain decoding ({how}).").format(x=gain, how=how)
    return _("Speculation is slower now: it takes {x:.2f} times the time of plain decoding ({how}).").format(x=1 / gain, how=how)


def _why(costs: Costs) -> str:
    k = costs.k
    tokens, cost, drafting = costs.tokens, costs.cost(k), costs.draft
    if costs.hit < 0.5:
        return _(
            "The drafter found something to propose in only {hit:.0f} % of the steps; the others are plain decoding, and the search costs "
            "{c:.2f} of a pass each time."
        ).format(hit=100 * costs.hit, c=costs.c)
    text = _(
        "A step costs {cost:.2f} plain passes ({draft:.2f} for drafting, {verify:.2f} for a pass over {rows} tokens) and gives "
        "{tokens:.2f} tokens, since {share:.0f} % of the tokens looked at are accepted."
    ).format(cost=cost, draft=drafting, verify=cost - drafting, rows=k + 1, tokens=tokens, share=100 * costs.a)
    return text


def _advice(costs: Costs) -> str:
    best, even = costs.best_k, costs.break_even
    if best == 0:
        end = _("By the model no K from 1 to {most} is faster than K = 0 with this acceptance.").format(most=MAX_K)
    elif best == costs.k:
        end = _("By the model this K is the best.")
    else:
        end = _("By the model K = {k} is best: {x:.2f} times.").format(k=best, x=costs.speedup(best))
    if even is None:
        return _("At this K not even an acceptance of 100 % would be enough.") + " " + end
    return _("At this K it pays from an acceptance of {a:.0f} % on.").format(a=100 * even) + " " + end


def formula(costs: Costs | None) -> str:
    """How the curve is computed, with today's numbers."""
    if costs is None or not costs.ready:
        return ""
    once = costs.one_go
    cost = _("c + v") if once else _("c K + v")
    parts = [
        _("Modelled: speed-up = E / ({cost}), E = (1 - a^(K+1)) / (1 - a).").format(cost=cost),
        _("a = {a:.3f}: accepted of those looked at.").format(a=costs.a),
        (_("c = {c:.3f}: this drafter proposes all K in one go.") if once else _("c = {c:.3f}: one pass of the drafter.")).format(
            c=costs.c
        ),
        _("v at K = {k}: {v:.3f}, the target's pass over {rows} tokens.").format(k=costs.k, v=costs.v(costs.k), rows=costs.k + 1),
        _("c and v in passes of plain decoding, {ms}; v between and beyond the measured K lies on a line.").format(
            ms=number(costs.plain_ms, "ms")
        ),
    ]
    if costs.hit < 0.995:
        parts.append(_("Only {hit:.0f} % of the steps had a draft: the others count as plain ones.").format(hit=100 * costs.hit))
    return " ".join(parts)


def times_html(costs: Costs | None) -> str:
    """Measured milliseconds of a step: drafting, the target's pass, and a plain step beside them, as bars."""
    if costs is None:
        return ""
    verify = costs.verify_ms.get(costs.k) or next(iter(costs.verify_ms.values()))
    rows = [
        (_("plain step"), costs.plain_ms, "plain", ngettext("{n} step", "{n} steps", costs.num_plain).format(n=costs.num_plain)),
        (_("drafting"), costs.draft_ms, "draft", ngettext("{n} step", "{n} steps", costs.num_steps).format(n=costs.num_steps)),
        (_("step over {n} tokens each").format(n=costs.k + 1), verify, "verify", ""),
    ]
    most = max((ms for _name, ms, _kind, _n in rows if not math.isnan(ms)), default=1.0) or 1.0
    body = ""
    for name, ms, kind, note in rows:
        width = 0 if math.isnan(ms) else 100 * ms / most
        body += (
            f'<div class="sp-name">{html.escape(name)}</div><div class="sp-track"><i class="sp-{kind}" style="width:{width:.1f}%"></i></div>'
            f'<div class="sp-num">{html.escape(number(ms, "ms"))}</div><div class="sp-note">{html.escape(note)}</div>'
        )
    note = ngettext(
        "Medians, {n} request at a time; without the cost of watching.",
        "Medians, {n} requests at a time; without the cost of watching.",
        costs.batch,
    )
    return f'<div class="sp-times">{body}</div><p class="ct-muted ct-small">{html.escape(note.format(n=costs.batch))}</p>'


def pairs_html(pairs: Sequence[Paired]) -> str:
    """The same requests both ways, as a table."""
    head = (_("the same requests"), _("batch"), _("tokens"), _("ms a token"), _("plain"), _("speed-up, measured"))
    body = ""
    for p in pairs:
        cells = [f"{p.batch:.1f}", f"{p.tokens:,}", f"{p.ms:.2f}", f"{p.plain_ms:.2f}", f"<b>{p.speedup:.2f} ×</b>"]
        numbers = "".join(f'<td class="num">{cell}</td>' for cell in cells)
        count = ngettext("{n} request", "{n} requests", p.num_requests).format(n=p.num_requests)
        body += f'<tr><td>{html.escape(p.name)} <span class="ct-muted">({html.escape(count)})</span></td>{numbers}</tr>'
    heads = "".join(f"<th{'' if i == 0 else ' class=num'}>{html.escape(name)}</th>" for i, name in enumerate(head))
    return f'<div class="sp-scroll"><table class="sp-table"><tr>{heads}</tr>{body}</table></div>'
