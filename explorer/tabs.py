"""A view whose parts stand in tabs, each built when it is first opened; the open one is a parameter, so that an address can carry it."""

from collections.abc import Mapping
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.base import ExplorerView


class TabbedView(ExplorerView):
    """Subclasses have a Selector ``tab`` with the keys of their tabs, call ``_make_tabs`` once, and put what they build for a tab into
    its slot."""

    tab: Any

    def _make_tabs(self, titles: Mapping[str, str]) -> pmui.Tabs:
        """``titles``: by key, in order."""
        self.slots = {key: pn.Column(sizing_mode="stretch_width", margin=0) for key in titles}
        self.tabs: Any = pmui.Tabs(
            *((title, self.slots[key]) for key, title in titles.items()), active=list(titles).index(self.tab), margin=0,
            sizing_mode="stretch_width", sx={"& .MuiTabs-root": {"marginBottom": "12px"}},
        )  # fmt: skip
        self.tabs.param.watch(self._tab_opened, "active")
        self.param.watch(self._tab_chosen, "tab")
        return self.tabs

    def _tab_chosen(self, _event: Any) -> None:
        index = list(self.slots).index(self.tab)
        if self.tabs.active != index:
            self.tabs.active = index

    def _tab_opened(self, event: Any) -> None:
        if 0 <= event.new < len(self.slots):
            self.tab = list(self.slots)[event.new]
