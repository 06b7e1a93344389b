"""A Bokeh figure without a server: its document as JSON, what changes in it as patches, what a browser does as events."""

import threading
from typing import Any

from bokeh.core.serialization import Serializer
from bokeh.core.types import ID
from bokeh.document import Document
from bokeh.document.events import DocumentPatchedEvent
from bokeh.model import Model
from bokeh.models import ColumnDataSource

# Of what BokehJS reports back, this is what a view may want to know; the rest is its own layout.
_TOLD = {"start", "end", "indices"}


class Figure:
    """One root in a document of its own. ``patches`` are collected while ``listening``."""

    def __init__(self, root: Model) -> None:
        self.document = Document()
        self.document.add_root(root)
        self.root = root
        self.listening = False
        self._patches: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.document.on_change(self._changed)

    def json(self) -> Any:
        """The whole document, plain JSON (arrays in base64)."""
        document: Any = self.document.to_json(deferred=False)
        # Panel defines models of its own in every document, 150 KB of text that no figure is made of.
        document.pop("defs", None)
        return document

    def _changed(self, event: Any) -> None:
        if not self.listening or not isinstance(event, DocumentPatchedEvent) or event.setter is self:
            return
        # Now, not later: a source that is given data and then streamed to would be written with the stream in it, twice.
        models = self.document.models
        serializer = Serializer(references=models.synced_references, deferred=False)
        events = serializer.encode([event])
        models.flush_synced(lambda model: not serializer.has_ref(model))
        with self._lock:
            self._patches += events

    def drain(self) -> list[dict[str, Any]]:
        """The events of a Bokeh patch since the last call."""
        with self._lock:
            patches, self._patches = self._patches, []
        return patches

    def columns(self, model_id: str) -> Any:
        """A data source's columns, plain JSON. ValueError for a model that is none."""
        source = self.document.get_model_by_id(ID(model_id))
        if not isinstance(source, ColumnDataSource):
            raise ValueError(f"{model_id} is no data source")
        return Serializer(references=self.document.models.synced_references, deferred=False).encode(dict(source.data))

    def apply(self, events: Any) -> None:
        """What happened in a browser: taps and other user events, moved ranges. ValueError for what is no such thing."""
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError(f"figure events must be a list of dicts, got {type(events).__name__}")
        wanted = [e for e in events if self._wanted(e)]
        if wanted:
            try:
                self.document.apply_json_patch({"events": wanted}, setter=self)  # type: ignore[typeddict-item,arg-type]
            except (KeyError, TypeError, RuntimeError) as error:
                raise ValueError(f"figure events could not be read: {error}") from error

    def _wanted(self, event: dict[str, Any]) -> bool:
        if event.get("kind") == "MessageSent":
            return event.get("msg_type") == "bokeh_event"
        model = event.get("model")
        known = isinstance(model, dict) and self.document.get_model_by_id(ID(str(model.get("id")))) is not None
        return event.get("kind") == "ModelChanged" and event.get("attr") in _TOLD and known

    def close(self) -> None:
        """The root may join another document."""
        self.document.remove_on_change(self._changed)
        self.document.clear()
