"""The figures of a probe: the error histogram that a range is cut from, the layers' errors; and, as HTML, tokens with their bars. Pure."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import BoxAnnotation

from engine.events.quantization import QuantizationProbed, TokenShift
from explorer.i18n import _
from explorer.quantization.labels import bar, share, small, token
from explorer.theme import BLUE, GREY, VERMILLION, figure

KL_PIXELS = 64  # the highest bar over a token
KL_TOKENS = 240  # that are drawn: those about the largest
LIST = 8  # tokens of a list


@dataclass
class HistogramFigure:
    """How many weights have which rounding error, on a logarithmic axis of counts; what is outside of the range is greyed."""

    plot: Any = None
    source: ColumnDataSource = field(
        default_factory=lambda: ColumnDataSource({"left": [], "right": [], "height": [], "count": []})
    )
    outside: list[BoxAnnotation] = field(default_factory=list)

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            150, x_axis_label=_("rounding error, in units of the weight"), y_axis_label=_("weights (log)"), x_range=Range1d(start=-1, end=1),
            y_range=Range1d(start=0, end=1),
        )  # fmt: skip
        bars = plot.quad(left="left", right="right", bottom=0, top="height", source=self.source, fill_color=BLUE, line_color=None)
        tips = [(_("error from"), "@left{0.00000}"), (_("to"), "@right{0.00000}"), (_("weights"), "@count{0,0}")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, attachment="vertical"))
        for _i in range(2):
            box = BoxAnnotation(fill_color=GREY, fill_alpha=0.28, line_color=None, visible=False)
            plot.add_layout(box)
            self.outside.append(box)
        plot.yaxis.ticker.desired_num_ticks = 3
        plot.min_border_left = 54

    def show(self, low: float, high: float, counts: Sequence[int], chosen: tuple[float, float] | None) -> None:
        """``chosen``: the errors that are kept, None: all."""
        edges = np.linspace(low, high, len(counts) + 1)
        height = np.log10(np.maximum(1, np.asarray(counts, dtype=float))) + (np.asarray(counts) > 0) * 0.15
        self.source.data = {"left": edges[:-1], "right": edges[1:], "height": height, "count": list(counts)}
        self.plot.x_range.update(start=low, end=high)
        top = float(height.max()) if len(counts) else 1.0
        self.plot.y_range.update(start=0, end=1.08 * (top or 1))
        ticks = list(range(math.floor(top) + 1))
        self.plot.yaxis.ticker = FixedTicker(ticks=[t + 0.15 for t in ticks])
        self.plot.yaxis.major_label_overrides = {t + 0.15: small(10**t) for t in ticks}
        self.cut(low, high, chosen)

    def cut(self, low: float, high: float, chosen: tuple[float, float] | None) -> None:
        for box, ends in zip(self.outside, ((low, chosen[0]), (chosen[1], high)) if chosen is not None else ((0, 0), (0, 0))):
            box.update(left=ends[0], right=ends[1], visible=chosen is not None and ends[1] > ends[0])


@dataclass
class LayerErrors:
    """The relative error of each layer's output; the layers that were rounded are marked."""

    plot: Any = None
    source: ColumnDataSource = field(
        default_factory=lambda: ColumnDataSource({"layer": [], "error": [], "colour": [], "what": [], "hatch": []})
    )

    def __post_init__(self) -> None:
        plot = self.plot = figure(200, x_axis_label=_("layer"), y_axis_label=_("|h′ − h| / |h|"), x_range=Range1d(start=-1, end=1), y_range=Range1d(start=0, end=1))  # fmt: skip
        bars = plot.vbar("layer", top="error", width=0.8, source=self.source, fill_color="colour", line_color=None,
                         hatch_pattern="hatch", hatch_color="white", hatch_alpha=0.6, hatch_scale=6)  # fmt: skip
        tips = [(_("layer"), "@layer (@what)"), (_("output off by"), "@error{0.0000 %}")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, attachment="vertical"))
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[00] %")
        plot.min_border_left = 54

    def show(self, errors: Sequence[float], rounded: set[int]) -> None:
        n = len(errors)
        self.source.data = {
            "layer": list(range(n)), "error": [e if math.isfinite(e) else math.nan for e in errors],
            "colour": [VERMILLION if i in rounded else BLUE for i in range(n)],
            "hatch": ["/" if i in rounded else " " for i in range(n)],
            "what": [_("rounded") if i in rounded else _("as it was") for i in range(n)],
        }  # fmt: skip
        top = max((e for e in errors if math.isfinite(e)), default=0.0)
        self.plot.x_range.update(start=-0.6, end=max(0.6, n - 0.4))
        self.plot.y_range.update(start=0, end=1.1 * top or 1)


def kl_html(event: QuantizationProbed) -> str:
    """The text, a bar over each token: the KL of the distribution that follows it. The looked-at positions stand out."""
    n = min(len(event.kl), len(event.token_texts))
    finite = [k if math.isfinite(k) else 0.0 for k in event.kl[:n]]
    most = max(finite, default=0.0)
    centre = event.positions[0] if event.positions else 0
    first = max(0, min(centre - KL_TOKENS // 2, n - KL_TOKENS))
    body = ""
    for i in range(first, min(n, first + KL_TOKENS)):
        height = max(1, round(KL_PIXELS * finite[i] / most)) if most else 1
        title = _("position {i}: {kl} after this token").format(i=i, kl=small(event.kl[i], "nats"))
        kind = ' class="here"' if i in event.positions else ""
        body += f'<span{kind} title="{html.escape(title)}"><i style="height:{height}px"></i><b>{token(event.token_texts[i])}</b></span>'
    left_out = n - KL_TOKENS
    more = f'<p class="qp-what">{_("{n} tokens of the text are left out").format(n=left_out)}</p>' if left_out > 0 else ""
    return f'<div class="qp-kl">{body}</div>{more}'


def shifts_html(title: str, shifts: Sequence[TokenShift], most: float, nothing: str) -> str:
    """One list: each token with its probability before and after. ``most``: the probability of a whole bar."""
    if not shifts:
        return f'<div><h3>{html.escape(title)}</h3><p class="qp-what">{html.escape(nothing)}</p></div>'
    body = "".join(
        f'<div class="qp-token"><code>{token(s.text)}</code>{bar(s.before / most)}<span>{share(s.before, 2)}</span>'
        f"{bar(s.after / most, 'other')}<span>{share(s.after, 2)}</span></div>"
        for s in shifts[:LIST]
    )
    more = f'<p class="qp-what">{_("and {n} more").format(n=len(shifts) - LIST)}</p>' if len(shifts) > LIST else ""
    return f"<div><h3>{html.escape(title)}</h3>{body}{more}</div>"


def nucleus_html(event: QuantizationProbed) -> str:
    """Who left the nucleus, who entered it, and the likeliest tokens, at the looked-at position."""
    lists = (
        (_("Left the nucleus ({n})").format(n=len(event.left)), event.left, _("None left.")),
        (_("Entered it ({n})").format(n=len(event.entered)), event.entered, _("None entered.")),
        (_("The likeliest of either"), event.top, ""),
    )
    body = ""
    for title, shifts, nothing in lists:
        most = max((max(s.before, s.after) for s in shifts[:LIST]), default=1.0) or 1.0
        body += shifts_html(title, shifts, most, nothing)
    return f'<div class="qp-lists">{body}</div>'


def texts_html(event: QuantizationProbed) -> str:
    """The two continuations, from the first token that differs on marked."""
    given = html.escape(event.text[-80:])
    columns = ""
    for title, tokens in ((_("weights as loaded"), event.continuation), (_("rounded as chosen"), event.continuation_changed)):
        at = event.first_difference
        same, other = (tokens, []) if at < 0 else (tokens[:at], tokens[at:])
        rest = f"<mark>{html.escape(other[0])}</mark><span class=after>{html.escape(''.join(other[1:]))}</span>" if other else ""
        columns += f'<div><h3>{html.escape(title)}</h3><div class="qp-text"><span class=given>{given}</span>{html.escape("".join(same))}{rest}</div></div>'
    return f'<div class="qp-texts">{columns}</div>'
