"""The buttons of a page's staged scenes."""

import html
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import panel as pn
import panel_material_ui as pmui

from explorer.theme import pane


class Scene(Protocol):
    """What every page's scenes have."""

    @property
    def key(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def what(self) -> str:
        """What the button does."""


def scene_buttons(scenes: Iterable[Scene], clicked: Callable[[str, Any], None]) -> list[pn.Column]:
    """One button a scene, each above what it does. ``clicked`` gets the scene's key, and the click."""
    columns = []
    for scene in scenes:
        button = pmui.Button(label=scene.title, variant="outlined", margin=0, icon="play_arrow")
        button.on_click(partial(clicked, scene.key))
        what = pane(f'<p class="ct-muted ct-small">{html.escape(scene.what)}</p>')
        columns.append(pn.Column(button, what, sizing_mode="stretch_width", margin=0, styles={"gap": "6px"}))
    return columns
