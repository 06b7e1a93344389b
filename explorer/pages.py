"""The pages, by slug. Navigation, addresses, tests and the documentation all walk this dict."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explorer.base import Clock, ExplorerView
from explorer.i18n import _

Build = Callable[[Any, Any, Clock], ExplorerView]  # (store, session, clock)


@dataclass(frozen=True)
class Page:
    slug: str
    title: str
    question: str  # what a reader can answer with it
    icon: str  # a Material icon's name
    build: Build


def _run(store: Any, session: Any, clock: Clock) -> ExplorerView:
    from explorer.run.view import RunView  # imported when first opened, so that the first page shows early

    return RunView(store, session, clock)


def _kv_cache(store: Any, session: Any, clock: Clock) -> ExplorerView:
    from explorer.kv_cache.view import KVCacheView

    return KVCacheView(store, session, clock)


PAGES: dict[str, Page] = {
    page.slug: page
    for page in (
        Page("run", _("Run"), _("What does the engine do with my prompts, step by step?"), "play_circle", _run),
        Page("kv-cache", _("KV cache"), _("Where do keys and values live, and who shares them?"), "grid_view", _kv_cache),
    )
}
HOME = "run"
