"""A mirror against what it mirrors: specs and operations, replayed on copies, give what the objects hold."""

import json
from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui
import pytest
from bokeh.document import Document
from bokeh.events import Tap
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from explorer.base import Clock
from explorer.canvas.blockmap import BlockMap
from explorer.canvas.prompt import PromptBox
from explorer.mirror import Mirror, to_message, to_text
from explorer.pages import PAGES
from explorer.theme import card, grid, pane


def opened(root: Any, **options: Any) -> tuple[Mirror, dict[str, Any]]:
    mirror = Mirror(root, **options)
    return mirror, mirror.spec()


def node(spec: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    found = [(id, facts) for id, facts in spec["nodes"].items() if facts["kind"] == kind]
    assert len(found) == 1, found
    return found[0]


def replay(spec: dict[str, Any], ops: list[Any]) -> dict[str, Any]:
    """The spec after these operations, as the page keeps it (properties only)."""
    nodes = {id: dict(facts) for id, facts in spec["nodes"].items()}
    for id, name, value, *_who in ops:
        if id == "*":
            nodes.update(value if name == "nodes" else {})
        elif name == "state":
            nodes[id]["state"] = {**nodes[id]["state"], **value}
        elif name not in ("message", "patch"):
            nodes[id][name] = value
    return nodes


# -- specs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", PAGES)
@pytest.mark.parametrize("with_session", [False, True])
def test_every_page_can_be_mirrored(slug, with_session, desk):
    view = PAGES[slug].build(desk.store, desk.session if with_session else None, Clock())
    _mirror, spec = opened(view)
    read = json.loads(to_text(spec))
    assert set(read["nodes"]) == set(spec["nodes"]) and spec["root"] in spec["nodes"]
    for facts in spec["nodes"].values():
        assert set(facts.get("children", ())) <= set(spec["nodes"])
        assert set(facts["css"]) <= set(spec["sheets"])
        assert "module" not in facts or facts["module"] in spec["modules"]


def test_an_object_that_cannot_be_mirrored_is_named():
    with pytest.raises(ValueError, match=r"a view may be made of .*Column.*; got panel\..*\.Video"):
        Mirror(pn.Column(pn.pane.Video(None)))


def test_hidden_objects_are_left_out():
    button = pmui.Button(label="x")
    _mirror, spec = opened(pn.Column(pane("a"), button), hidden=[button])
    assert [facts["kind"] for facts in spec["nodes"].values()] == ["box", "html"]


def test_layout_is_told_as_css():
    _mirror, spec = opened(pn.Row(pane("<p>x</p>", margin=(1, 2)), width=120, styles={"gap": "3px"}))
    _id, row = node(spec, "row")
    assert row["style"] == {"margin": "0px", "width": "120px", "gap": "3px"} and "ctm-wide" not in row["classes"]
    _id, html = node(spec, "html")
    assert html["style"] == {"margin": "1px 2px"} and html["classes"] == ["ctm-wide"] and html["html"] == "<p>x</p>"


# -- operations ----------------------------------------------------------------------------------------------------------


def test_what_changes_is_told_once_and_only_that():
    text = pane("a")
    mirror, _spec = opened(pn.Column(text, pane("b")))
    assert mirror.drain() == []
    text.object = "c"
    text.object = "d"
    text.visible = False
    ops = mirror.drain()
    assert sorted(op[1:] for op in ops) == [["html", "d"], ["visible", False]]
    assert mirror.drain() == [] and mirror.version == 1
    text.object = "e"
    text.object = "d"
    assert mirror.drain() == [] and mirror.version == 1


def test_children_come_and_go():
    box = pn.Column(pane("a"))
    mirror, spec = opened(box)
    first = box[0]
    box[:] = [card("Title", pane("b")), first]
    nodes = replay(spec, mirror.drain())
    fresh = mirror.spec()["nodes"]
    assert {id: facts for id, facts in nodes.items() if id in fresh} == fresh
    box[:] = [pane("z")]
    mirror.drain()
    first.object = "nobody sees this"
    assert mirror.drain() == []


def test_texts_that_come_later_are_told():
    box = pn.Column()
    mirror, _spec = opened(box)
    box.append(grid(pane("a"), min_width=77))
    [_page, name, texts] = mirror.drain()[0]
    assert name == "texts" and any("77px" in sheet for sheet in texts["sheets"].values())


def test_deltas_of_a_canvas_all_arrive_in_order():
    blocks = BlockMap()
    mirror, _spec = opened(pn.Column(blocks))
    blocks.draw(np.arange(50, dtype=np.uint32), 16)
    codes = np.arange(50, dtype=np.uint32)
    for i in range(5):
        codes[i] = 1000 + i
        blocks.draw(codes, 16)
    ops = mirror.drain()
    shown = np.zeros(0, np.uint32)
    for _id, _state, values in ops:
        if "full" in values:
            shown = np.frombuffer(values["full"], np.uint32)[2:].copy()
        else:
            words = np.frombuffer(values["delta"], np.uint32)
            shown[words[3 : 3 + words[2]]] = words[3 + words[2] :]
    assert shown.tolist() == codes.tolist()
    assert node(mirror.spec(), "canvas")[1]["state"]["full"] == blocks.full


def test_messages_of_a_canvas_are_told_until_the_mirror_closes():
    box = PromptBox(lambda _text: None, lambda _n: None)
    mirror, spec = opened(box)
    box.ask()
    assert mirror.drain() == [[spec["root"], "message", {"ask": "submit"}]]
    mirror.close()
    box.ask()
    box.value = "x"
    assert mirror.drain() == []


def test_a_resting_mirror_collects_nothing_and_says_that_specs_are_old():
    text, source = pane("a"), ColumnDataSource({"x": [1]})
    plot = figure()
    plot.line("x", "x", source=source)
    mirror, spec = opened(pn.Column(text, pn.pane.Bokeh(plot)))
    mirror.rest()
    text.object = "b"
    source.stream({"x": [2]})
    assert mirror.drain() == [] and mirror.version > spec["version"]
    assert node(mirror.spec(), "html")[1]["html"] == "b"


# -- figures -------------------------------------------------------------------------------------------------------------


def test_patches_of_a_figure_give_the_same_document():
    """The oracle is Bokeh's own reader: a copy made of the spec, brought up to date by the patches."""
    source = ColumnDataSource({"x": [0.0], "y": [float("nan")]})
    plot = figure(title="a")
    plot.line("x", "y", source=source)
    mirror, spec = opened(pn.Column(pn.pane.Bokeh(plot)))
    id, facts = node(spec, "figure")
    copy = Document.from_json(json.loads(to_text(facts["document"])))
    source.stream({"x": [1.0, 2.0], "y": [1.0, 4.0]}, 2)
    source.data = {"x": np.array([5.0, 6.0]), "y": [7.0, 8.0]}
    source.data = {"x": [5.0, 6.0], "y": [7.0, 8.0]}
    source.stream({"x": [9.0], "y": [10.0]})
    source.patch({"y": [(0, -1.0)]})
    plot.title.text = "b"
    plot.scatter("x", "y", source=source, size=3)  # a new model, told with its first use
    for op in json.loads(to_text(mirror.drain())):
        assert op[:2] == [id, "patch"]
        copy.apply_json_patch({"events": op[2]})
    root = copy.roots[0]
    [told] = {r.data_source for r in root.renderers}
    assert {name: list(column) for name, column in told.data.items()} == {"x": [5.0, 6.0, 9.0], "y": [-1.0, 8.0, 10.0]}
    assert root.title.text == "b" and len(root.renderers) == 2


def test_a_tap_comes_back_and_a_moved_range_does_not_echo():
    taps: list[Any] = []
    plot = figure(x_range=(0, 1), y_range=(0, 1))
    plot.line([0], [0])
    plot.on_event(Tap, lambda event: taps.append((event.x, event.y)))
    mirror, spec = opened(pn.Column(pn.pane.Bokeh(plot)))
    id, _facts = node(spec, "figure")
    tap = {"type": "event", "name": "tap", "values": {
        "type": "map", "entries": [["model", {"id": plot.id}], ["sx", 1], ["sy", 1], ["x", 0.25], ["y", 0.5],
                                   ["modifiers", {"type": "map", "entries": [["ctrl", False], ["shift", False], ["alt", False]]}]]}}  # fmt: skip
    events = [
        {"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": tap},
        {"kind": "ModelChanged", "model": {"id": plot.x_range.id}, "attr": "end", "new": 5},
        {"kind": "ModelChanged", "model": {"id": plot.id}, "attr": "inner_width", "new": 5},
        {"kind": "ModelChanged", "model": {"id": "unknown"}, "attr": "end", "new": 5},
    ]
    mirror.apply([id, "events", events])
    assert taps == [(0.25, 0.5)] and plot.x_range.end == 5
    assert mirror.drain() == []
    for bad in ("x", [1], [{"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": {"type": "event", "name": "?"}}]):
        with pytest.raises(ValueError):
            mirror.apply([id, "events", bad])


# -- actions -------------------------------------------------------------------------------------------------------------


def test_controls_obey_and_refuse():
    clicks: list[Any] = []
    button = pmui.Button(label="Go")
    button.on_click(clicks.append)
    slider = pmui.FloatSlider(label="T", start=0, end=2, step=0.1, value=1)
    whole = pmui.IntSlider(label="n", start=0, end=9, value=1)
    steps = pmui.DiscreteSlider(label="S", options=[1, 2, 4], value=1)
    choice = pmui.Select(label="C", options={"one": 1, "two": 2}, value=1)
    several = pmui.CheckButtonGroup(label="M", options=["a", "b", "c"], value=["a"])
    switch, text = pmui.Switch(label="On", value=False), pmui.TextInput(label="Text", value="")
    low_high = pmui.RangeSlider(label="R", start=0, end=10, value=(1, 2))
    mirror, spec = opened(pn.Column(button, slider, whole, steps, choice, several, switch, text, low_high))
    ids = {facts["label"]: id for id, facts in spec["nodes"].items() if "label" in facts}
    for label, name, value in (("Go", "click", None), ("T", "value", 1.5), ("n", "value", 3.0), ("S", "value", 2), ("C", "value", 1),
                               ("M", "value", [2, 0]), ("On", "value", True), ("Text", "value", "<b>"), ("R", "value", [9, 4])):  # fmt: skip
        mirror.apply([ids[label], name, value])
    assert len(clicks) == 1 and (slider.value, whole.value, steps.value, choice.value) == (1.5, 3, 4, 2)
    assert (several.value, switch.value, text.value, low_high.value) == (["c", "a"], True, "<b>", (4, 9))
    told = {spec["nodes"][id]["label"]: value for id, name, value in mirror.drain() if name == "value"}
    assert told["S"] == 2 and told["C"] == 1 and told["M"] == [2, 0] and told["R"] == (4, 9)
    for label, value in (
        ("T", "x"),
        ("T", 99),
        ("T", float("nan")),
        ("n", float("nan")),
        ("S", 3),
        ("S", True),
        ("C", -1),
        ("M", [7]),
        ("M", 1),
        ("Text", 5),
        ("R", [1]),
    ):
        with pytest.raises(ValueError):
            mirror.apply([ids[label], "value", value])
    button.disabled = True
    mirror.apply([ids["Go"], "click", None])
    assert len(clicks) == 1


@pytest.mark.parametrize(
    "action", [None, [], ["n0"], [0, "click", None], ["n0", "explode", None], ["n1", "state", {"nope": 1}], ["n1", "state", 3]]
)
def test_what_is_no_action_is_refused(action):
    mirror, _spec = opened(pn.Column(BlockMap()))
    with pytest.raises(ValueError):
        mirror.apply(action)


def test_an_action_on_what_has_gone_is_no_error():
    mirror, _spec = opened(pn.Column(pane("a")))
    mirror.apply(["n99", "click", None])


def test_who_acted_is_told_with_what_follows_from_the_change_itself():
    blocks = BlockMap()
    blocks.param.watch(lambda event: blocks.param.update(detail={"block_id": event.new}), "hovered")
    mirror, spec = opened(pn.Column(blocks))
    id, _facts = node(spec, "canvas")
    mirror.apply([id, "state", {"hovered": 4}], who="page-1")
    ops = mirror.drain()
    assert [id, "state", {"hovered": 4}, "page-1"] in ops and [id, "state", {"detail": {"block_id": 4}}] in ops


def test_two_pages_that_ask_the_same_ask_twice():
    asked: list[str] = []
    box = PromptBox(asked.append, lambda _n: None)
    mirror, spec = opened(box)
    action = {"seq": 1, "kind": "submit", "text": "x"}
    mirror.apply([spec["root"], "state", {"action": action}], who="page-1")
    mirror.apply([spec["root"], "state", {"action": dict(action)}], who="page-2")
    assert asked == ["x", "x"]


# -- JSON ----------------------------------------------------------------------------------------------------------------


def test_bytes_travel_beside_or_inside_and_text_cannot_end_a_script():
    value = {"a": [b"\x00\x01", {"b": memoryview(b"zz")}], "t": "</script><!--\u2028"}
    plain, buffers = to_message(value)
    assert plain["a"] == [{"$buffer": 0}, {"b": {"$buffer": 1}}] and [bytes(b) for b in buffers] == [b"\x00\x01", b"zz"]
    text = to_text(value)
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == {"a": [{"$base64": "AAE="}, {"b": {"$base64": "eno="}}], "t": "</script><!--\u2028"}
    with pytest.raises(ValueError):
        to_text({"x": float("nan")})
