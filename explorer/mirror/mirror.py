"""The mirror of one object tree: its spec, its operations, its actions."""

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

from panel.viewable import Viewer

from explorer.mirror import kinds, layout
from explorer.mirror.figures import Figure

Op = list[Any]
PAGE = "*"  # the node of operations that concern the whole


class _Node:
    """One object: what was last told of it, and how to stop watching."""

    def __init__(self, id: str, obj: Any, kind: kinds.Kind) -> None:
        self.id, self.obj, self.kind = id, obj, kind
        self.told: dict[str, Any] = {}
        self.children: list[_Node] = []
        self.figure: Figure | None = None
        self.watchers: list[Any] = []


class Mirror:
    """``root``: a view, or any Panel object of the kinds in ``explorer.mirror.kinds`` (ValueError for others).

    ``hidden``: objects that are left out, since whoever shows the mirror has controls of their own for them. Objects may be
    changed from any thread; ``spec``, ``drain`` and ``apply`` are for one thread at a time.
    """

    def __init__(self, root: Any, hidden: Iterable[Any] = ()) -> None:
        self.version = 0  # counts up with every drain that gave something: operations fit the spec of the version before
        self._hidden = {id(obj) for obj in hidden}
        self._nodes: dict[str, _Node] = {}
        self._next = 0
        self._sheets: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._new_texts: dict[str, dict[str, str]] = {"sheets": {}, "modules": {}}
        self._pending: list[Op] = []  # of canvases and figures, in order
        self._dirty: dict[str, None] = {}
        self._lock = threading.Lock()
        self._listening = False
        self._acting: tuple[str, Any, Any] | None = None  # (node, canvas parameter, who) being set by an action
        self._root = self._open(root)

    # -- the tree ---------------------------------------------------------------------------------------------------------

    def _open(self, obj: Any) -> _Node:
        while isinstance(obj, Viewer):
            obj = obj.__panel__()
        kind = kinds.kind_of(obj)
        node = _Node(f"n{self._next}", obj, kind)
        self._next += 1
        self._nodes[node.id] = node
        if kind.name == "canvas":
            self._open_canvas(node)
        elif kind.name == "figure":
            node.figure = Figure(obj.object)
            node.figure.listening = self._listening
        names = kinds.watched(obj, kind)
        node.watchers.append(obj.param.watch(lambda *_events: self._touch(node), names, onlychanged=True))
        node.children = [self._open(child) for child in kinds.children(obj, kind) if id(child) not in self._hidden]
        return node

    def _open_canvas(self, node: _Node) -> None:
        canvas = node.obj
        names = [name for name in kinds.state_params(canvas) if name != "action"]  # what the browser asked is not told back
        node.watchers.append(canvas.param.watch(lambda *events: self._canvas_changed(node, events), names))
        send = canvas.send

        def sent(message: dict[str, Any]) -> None:
            self._push([node.id, "message", message])
            send(message)

        canvas.send = sent

    def _close(self, node: _Node) -> None:
        for child in node.children:
            self._close(child)
        for watcher in node.watchers:
            node.obj.param.unwatch(watcher)
        if node.kind.name == "canvas":
            del node.obj.send  # the class's own shows again
        if node.figure is not None:
            node.figure.close()
        self._nodes.pop(node.id, None)

    def close(self) -> None:
        """Stop watching; the objects are as before."""
        self._listening = False
        self._close(self._root)

    # -- what changes -----------------------------------------------------------------------------------------------------

    def _touch(self, node: _Node) -> None:
        with self._lock:
            if self._listening:
                self._dirty[node.id] = None

    def _push(self, op: Op) -> None:
        with self._lock:
            if self._listening:
                self._pending.append(op)

    def _canvas_changed(self, node: _Node, events: Any) -> None:
        # One by one and in order: a delta must not be lost because another came after it.
        for event in events:
            who = None
            if self._acting is not None and self._acting[:2] == (node.id, event.name):
                who = self._acting[2]
            self._push([node.id, "state", {event.name: event.new}, *([who] if who is not None else [])])

    def _properties(self, node: _Node) -> dict[str, Any]:
        properties = {**layout.common(node.obj), **node.kind.read(node.obj)}
        properties["css"] = [self._text("sheets", self._sheets, css) for css in properties["css"]]
        if node.kind.name in kinds.BOXES:
            properties["children"] = [child.id for child in node.children]
        elif node.kind.name == "canvas":
            properties["module"] = self._text("modules", self._modules, kinds.module_text(node.obj))
        return properties

    def _text(self, where: str, known: dict[str, str], text: str) -> str:
        """The key of a text that many nodes may share."""
        key = hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
        if key not in known:
            known[key] = self._new_texts[where][key] = text
        return key

    # -- out ----------------------------------------------------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Everything as it is now. Operations begin anew: drain first if somebody still waits for them."""
        with self._lock:
            self._listening = True
            self._pending, self._dirty = [], {}
        for node in list(self._nodes.values()):
            self._refresh_children(node, [])
        nodes = {node.id: self._described(node) for node in self._nodes.values()}
        self._new_texts = {"sheets": {}, "modules": {}}
        return {
            "version": self.version, "root": self._root.id, "nodes": nodes, "sheets": dict(self._sheets), "modules": dict(self._modules),
        }  # fmt: skip

    def _described(self, node: _Node) -> dict[str, Any]:
        node.told = self._properties(node)
        described = {"kind": node.kind.name, **node.told}
        if node.kind.name == "canvas":
            described["state"] = {name: getattr(node.obj, name) for name in kinds.state_params(node.obj)}
        elif node.figure is not None:
            node.figure.listening = True
            node.figure.drain()
            described["document"] = node.figure.json()
        return described

    def drain(self) -> list[Op]:
        """What has changed since ``spec()`` or the last call; [] when nothing did."""
        with self._lock:
            pending, self._pending = self._pending, []
            dirty, self._dirty = self._dirty, {}
        changes: list[Op] = []
        for id in dirty:
            node = self._nodes.get(id)
            if node is not None:
                self._refresh_children(node, changes)
                self._differences(node, changes)
        for node in self._nodes.values():
            if node.figure is not None and (patches := node.figure.drain()):
                pending.append([node.id, "patch", patches])
        new = {where: texts for where, texts in self._new_texts.items() if texts}
        self._new_texts = {"sheets": {}, "modules": {}}
        ops: list[Op] = [*([[PAGE, "texts", new]] if new else []), *changes, *pending]
        self.version += bool(ops)
        return ops

    def _differences(self, node: _Node, changes: list[Op]) -> None:
        now = self._properties(node)
        changes += [[node.id, name, value] for name, value in now.items() if node.told.get(name) != value]
        node.told = now

    def _refresh_children(self, node: _Node, changes: list[Op]) -> None:
        """Open the objects that were put into a box and close those that were taken out."""
        shown = [obj for obj in kinds.children(node.obj, node.kind) if id(obj) not in self._hidden]
        if [id(child.obj) for child in node.children] == [id(obj) for obj in shown]:
            return
        known = {id(child.obj): child for child in node.children}
        before = set(self._nodes)
        node.children = [known.pop(id(obj)) if id(obj) in known else self._open(obj) for obj in shown]
        for gone in known.values():
            self._close(gone)
        new = {id: self._described(self._nodes[id]) for id in self._nodes if id not in before}
        if new:
            changes.append([PAGE, "nodes", new])

    def rest(self) -> None:
        """Nobody looks: collect nothing until the next ``spec()``."""
        with self._lock:
            self._listening = False
            self._pending, self._dirty = [], {}
        for node in self._nodes.values():
            if node.figure is not None:
                node.figure.listening = False
                node.figure.drain()
        self.version += 1

    # -- in -----------------------------------------------------------------------------------------------------------------

    def apply(self, action: Any, who: str | None = None) -> None:
        """Carry out [node, name, value]: "click", "value", "state" (a canvas's parameters), "events" (of a figure).

        ``who`` is told with what follows directly, so that the page which acted need not apply it again. A node that has gone
        meanwhile is no error. ValueError for anything that is no action.
        """
        if not isinstance(action, list) or len(action) != 3 or not isinstance(action[0], str):
            raise ValueError(f"an action must be [node, name, value], got {action!r:.200}")
        id, name, value = action
        node = self._nodes.get(id)
        if node is None:
            return
        if node.kind.name == "canvas" and name == "state":
            self._set_state(node, value, who)
        elif node.figure is not None and name == "events":
            node.figure.apply(value)
        elif node.kind.act is not None and name in ("click", "value"):
            if not getattr(node.obj, "disabled", False):
                node.kind.act(node.obj, name, value)
        else:
            raise ValueError(f"{node.kind.name} takes no action {name!r}")

    def _set_state(self, node: _Node, values: Any, who: str | None) -> None:
        known = kinds.state_params(node.obj)
        if not isinstance(values, dict) or not set(values) <= set(known):
            raise ValueError(
                f"state of {type(node.obj).__name__} must be a dict with keys among {', '.join(known)}, got {values!r:.200}"
            )
        if values.get("action") == getattr(node.obj, "action", None) != {} and "action" in values:
            node.obj.param.trigger("action")  # of another page with the same number: asked twice is two requests
        self._acting = None
        for name, value in values.items():
            self._acting = (node.id, name, who)
            try:
                setattr(node.obj, name, value)
            finally:
                self._acting = None

    def object(self, id: str) -> Any:
        """The Panel object behind a node."""
        return self._nodes[id].obj

    def columns(self, id: str, model_id: str) -> Any:
        """All columns that a data source of a figure holds now, as its document's JSON writes them."""
        figure = self._nodes[id].figure
        if figure is None:
            raise ValueError(f"{id} is no figure")
        return figure.columns(model_id)

    def open_canvases(self) -> None:
        """Say for every canvas that it has drawn, as its script would: those with a history then send it at the next ``update()``."""
        for node in self._nodes.values():
            if node.kind.name == "canvas" and "ready" in getattr(node.obj, "kinds", ()):
                node.obj.action = {"seq": node.obj.action.get("seq", 0) + 1, "kind": "ready"}
