"""The Batching page: who is in the batch at each step, what fills its token budget, and what that costs."""

from importlib import import_module
from typing import Any

import panel as pn
import param

from engine.load.replay import POLICIES
from engine.measures import Limits, Measures
from explorer.base import Clock
from explorer.batching.rows import BatchRows
from explorer.canvas.schedule import AXES
from explorer.i18n import _
from explorer.tabs import TabbedView

# tab -> (its title, "module:class" of its panel). A panel is made with this view when its tab is opened first; then come
# ``take(events)`` with all events so far, ``take`` with those that are new, and ``update()`` while the tab is open.
TABS: dict[str, tuple[str, str]] = {
    "now": (_("The schedule"), "explorer.batching.now:NowPanel"),
    "compare": (_("Two schedulers"), "explorer.batching.compare:ComparePanel"),
    "whatif": (_("What if"), "explorer.batching.whatif:WhatIfPanel"),
    "stall": (_("The stall"), "explorer.batching.stall:StallPanel"),
    "prefix": (_("Prefix cache"), "explorer.batching.prefix:PrefixPanel"),
    "sweep": (_("Batch size"), "explorer.batching.sweep:SweepPanel"),
    "tuner": (_("Tuner"), "explorer.batching.tuner:TunerPanel"),
}


class BatchingView(TabbedView):
    live_knobs = (
        "batching", "batching_timeout_ms", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "num_kv_blocks", "preemption_mode",
        "swap_space", "prefix_index", "enable_prefix_caching", "scheduling_policy", "max_num_waiting",
    )  # fmt: skip
    url_params = ("tab", "axis", "ttft_ms", "tpot_ms", "if_policy", "if_batch", "if_budget", "if_chunked")

    tab: Any = param.Selector(default="now", objects=list(TABS), doc="Which tab is open.")
    axis: Any = param.Selector(default="steps", objects=list(AXES), doc="What runs across the schedule.")
    ttft_ms = param.Integer(default=2000, bounds=(0, 600_000), doc="What counts as good: most time to first token; 0: any.")
    tpot_ms = param.Integer(default=200, bounds=(0, 60_000), doc="What counts as good: most time per output token; 0: any.")
    if_policy: Any = param.Selector(default="as it ran", objects=["as it ran", *POLICIES], doc="What if: the policy.")
    if_batch = param.Integer(default=0, bounds=(0, 64), doc="What if: the batch size; 0: as it ran.")
    if_budget = param.Integer(default=0, bounds=(0, 4096), doc="What if: the token budget; 0: as it ran.")
    if_chunked: Any = param.Selector(default="as it ran", objects=["as it ran", "on", "off"], doc="What if: chunked prefill.")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = BatchRows()
        self._build()
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.panels: dict[str, Any] = {}  # those that were opened
        self._make_tabs({key: title for key, (title, _where) in TABS.items()})
        self._layout = pn.Column(self.tabs, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def _panel(self) -> Any:
        """That of the open tab; built when it is opened, and told what has been so far."""
        panel = self.panels.get(self.tab)
        if panel is None:
            module, _colon, name = TABS[self.tab][1].partition(":")
            panel = self.panels[self.tab] = getattr(import_module(module), name)(self)
            events, after, _missed = self.store.since(0)
            panel.take(events[: max(0, len(events) - (after - self.cursor))])
            panel.update()  # before a browser has it: what a widget is set to while it is being put on the screen does not show
            self.slots[self.tab][:] = [panel]
        return panel

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        with self.lock:
            events = self.new_events()
            if events:
                self.rows.feed(events)
                for panel in self.panels.values():
                    panel.take(events)
            panel = self._panel()
            panel.update()
            for other in self.panels.values():  # what was begun goes on behind another tab
                if other is not panel and hasattr(other, "advance"):
                    other.advance()
            self.rows.taken()

    def measures(self, load: str | None, step: int | None = None) -> Measures:
        """See ``BatchRows.measures``; with the requests that were refused, where that is known."""
        refused = self.session.loads.refused(load) if self.session is not None and load is not None and step is None else 0
        return self.rows.measures(load, step, self.limits, refused)

    @property
    def limits(self) -> Limits:
        """What a request must keep to count as good."""
        return Limits(ttft_s=self.ttft_ms / 1e3 or None, tpot_s=self.tpot_ms / 1e3 or None)

    def close(self) -> None:
        for panel in self.panels.values():
            close = getattr(panel, "close", None)
            if close is not None:
                close()
