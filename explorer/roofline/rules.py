"""The tab "Rules of thumb": six that everybody knows, each beside the count that it stands for."""

import html
from typing import Any

import panel as pn

from engine.hardware.planner import Workload
from engine.hardware.rules import Rule, rules_of_thumb
from explorer.i18n import _
from explorer.roofline import knobs, words
from explorer.theme import card, empty, grid, number, pane

CLOSE = 1.05  # a rule within this factor of the count is called close


def verdict(rule: Rule) -> str:
    """How far off the rule is, in words. Plain text."""
    ratio = rule.ratio
    if max(ratio, 1 / ratio) <= CLOSE:
        return _("close")
    return _("{n} too much").format(n=words.times(ratio)) if ratio > 1 else _("{n} too little").format(n=words.times(1 / ratio))


def rules_html(rules: tuple[Rule, ...]) -> str:
    body = ""
    for rule in rules:
        good = max(rule.ratio, 1 / rule.ratio) <= CLOSE
        body += (
            f'<div class="rf-rule"><h3>{html.escape(rule.name)}</h3>'
            f"<div><code>{html.escape(rule.rule)}</code><b>{html.escape(number(rule.rule_value, rule.unit))}</b></div>"
            f"<div><small>{html.escape(rule.right)}</small><b>{html.escape(number(rule.right_value, rule.unit))}</b></div>"
            f"<em>{'✓' if good else '≠'} {html.escape(verdict(rule))}</em><p>{html.escape(rule.why)}</p></div>"
        )
    return body


class RulesPanel(pn.viewable.Viewer):
    def __init__(self, view: Any, css: str, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self._drawn: Any = None
        self.about, self.body = pane(css=css), pane(css=css)
        self._layout = card(
            _("Six rules of thumb, and the count"),
            grid(knobs.batch_slider(view), knobs.context_slider(view), min_width=150, gap=18, margin=(0, 0, 10, 0)),
            self.about, self.body, kinds=("derived", "what-if"),
            hint=_("Left as people say it, right as it is counted for the model that is running, in 16 bits."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    def update(self) -> None:
        view, started = self.view, self.view.rows.started
        drawn = (view.batch, view.context, started)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        about = ""
        if started is None:
            body = empty(words.NO_ENGINE)
        else:
            model = started.model
            try:
                rules = rules_of_thumb(model, Workload(batch=view.batch, context=view.context, prompt=view.context))
                body = rules_html(rules)
                about = words.line(
                    html.escape(
                        _("{name}: L = {l}, d = {d}, N = {n}; B = {b}, S = t = {t:,}.").format(
                            name=view.rows.title, l=model["num_layers"], d=model["hidden_size"],
                            n=number(model["num_parameters"]), b=view.batch, t=view.context,
                        )
                    )
                )  # fmt: skip
            except (ValueError, KeyError) as error:
                body = empty(
                    str(error) if isinstance(error, ValueError) else _("The model's facts lack {name}.").format(name=error)
                )
        for target, text in ((self.about, about), (self.body, body)):
            if target.object != text:
                target.object = text
