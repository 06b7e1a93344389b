"""Cutaway's explorer: what turns events into pictures, in an app or in a notebook.

    from explorer import Explorer, KVCacheView, RunView, explore

``Explorer`` and ``explore`` are explained in ``explorer.notebook``. Every page of ``explorer.pages`` is a widget under the name
of its view. They are made when first asked for: ``import explorer`` alone loads nothing.
"""

from importlib import import_module
from typing import Any

_NOTEBOOK = ("Explorer", "explore")


def _views() -> dict[str, Any]:
    return {page.view_name: page for page in import_module("explorer.pages").PAGES.values()}


def __getattr__(name: str) -> Any:
    if name in _NOTEBOOK:
        return getattr(import_module("explorer.notebook"), name)
    if name.endswith("View") and name in (views := _views()):
        return import_module("explorer.notebook").view_class(views[name])
    raise AttributeError(f"module 'explorer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NOTEBOOK, *_views()])
