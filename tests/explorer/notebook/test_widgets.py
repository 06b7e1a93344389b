"""The Python half of the widgets: traits, controls, what is sent to whom, and what is refused."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
import traitlets

import explorer
from engine.config import EngineConfig
from explorer.base import Clock, ExplorerView
from explorer.notebook.frame import Frame
from explorer.notebook.hub import HUB, LOCK
from explorer.notebook.widgets import Desk, Explorer, View, view_class
from explorer.pages import PAGES, Page
from explorer.session import Session
from explorer.store import EventStore
from explorer.theme import pane
from tests.explorer.conftest import Clock as StandingClock
from tests.explorer.conftest import Desk as Bench
from tests.explorer.fake import FakeProcess


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Frame, dict[str, Any]]]:
    """What frames send to pages."""
    messages: list[tuple[Frame, dict[str, Any]]] = []
    monkeypatch.setattr(Frame, "send", lambda self, content, buffers=None: messages.append((self, content)))
    return messages


@pytest.fixture
def run() -> Bench:
    """A run of some steps, moved by hand."""
    made = Bench()
    made.session.status = "running"
    made.send(count=3, max_tokens=20)
    made.run(10)
    return made


def frame_of(widget: Desk) -> Frame:
    [shown] = widget.visible
    return shown.frame


def page_says(widget: Desk, kind: str, page: str = "page-1", **more: Any) -> None:
    frame_of(widget)._handle_custom_msg({"kind": kind, "page": page, **more}, [])


# -- from the registration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", PAGES)
def test_every_page_is_a_widget_by_its_registration_alone(slug: str, run: Bench, tmp_path: Any) -> None:
    name = PAGES[slug].view_name
    cls = getattr(explorer, name)
    assert name in dir(explorer) and cls.__name__ == name and issubclass(cls, View) and PAGES[slug].question in cls.__doc__
    widget = cls(run.session)
    assert set(PAGES[slug].view_class().live_knobs) <= set(widget.controls)
    assert frame_of(widget).get_state()["_spec"]["nodes"]
    run.store.save(tmp_path / "run.cutaway")
    recorded = cls(tmp_path / "run.cutaway")
    assert recorded.source.session is None and recorded.step == widget.step == 10 and recorded.knobs.widgets == {}


def test_a_page_added_later_is_a_widget_too(monkeypatch: pytest.MonkeyPatch, run: Bench) -> None:
    monkeypatch.setitem(PAGES, "later", Page("later", "Later", "Is it there?", "star", f"{__name__}:LaterView"))
    widget = explorer.LaterView(run.session)
    assert "step 10" in str(frame_of(widget).get_state()["_spec"]["nodes"])
    widget.step = 4
    assert "step 4" in str(frame_of(widget).get_state()["_spec"]["nodes"])
    assert "later" in Explorer(run.session).shown


class LaterView(ExplorerView):
    live_knobs = ("max_num_seqs",)

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.text = pane("")

    def update(self) -> None:
        self.text.object = f"step {self.shown_step}"

    def __panel__(self) -> Any:
        return self.text


def test_importing_the_explorer_loads_nothing() -> None:
    import subprocess
    import sys

    code = "import sys, explorer; assert 'panel' not in sys.modules and 'torch' not in sys.modules and 'ipywidgets' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError):
        explorer.NoSuchView  # noqa: B018


def test_a_view_of_a_saved_run_needs_no_torch(run: Bench, tmp_path: Any) -> None:
    import subprocess
    import sys

    run.store.save(tmp_path / "run.cutaway")
    code = f"import sys\nfrom explorer import KVCacheView\nassert KVCacheView({str(tmp_path / 'run.cutaway')!r}).step == 10\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- traits --------------------------------------------------------------------------------------------------------------


def test_a_step_in_the_past_carries_the_replayed_badge(run: Bench) -> None:
    widget = explorer.KVCacheView(run.session)
    past = widget._transport.past
    assert "replayed" in past.value and past.layout.display == "none"
    widget.step = 4
    assert past.layout.display is None
    widget.live = True
    assert past.layout.display == "none"


def test_step_live_and_selection_are_one_with_the_clock(run: Bench) -> None:
    widget = explorer.KVCacheView(run.session)
    clock = widget.clock
    assert (widget.step, widget.live, widget.step_slider.value, widget.step_slider.max) == (10, True, 10, 10)
    widget.step = 4
    assert (clock.step, clock.live, widget.live, widget.live_button.value, widget.step_slider.value) == (
        4,
        False,
        False,
        False,
        4,
    )
    widget.step = 999
    assert widget.step == clock.step == 10 and not widget.live
    widget.step_slider.value = 6
    assert widget.step == clock.step == 6
    clock.follow()
    assert widget.live and widget.live_button.value and widget.step == 10
    widget.live_button.value = False
    assert not clock.live and not widget.live
    widget.speed = 50
    assert clock.speed == 50
    widget.selection = {"request_id": "r1"}
    assert clock.request_id == "r1" and widget.selection == {"request_id": "r1", "block_id": None, "token_index": None}
    clock.block_id = 3
    assert widget.selection["block_id"] == 3


def test_a_paused_widget_plays_to_the_end_and_goes_live(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    widget = explorer.RunView(run.session)
    widget.step, widget.speed = 2, 100.0
    widget.playing = True
    assert widget.clock.playing
    widget._ticked -= 0.05
    widget.refresh()
    assert 3 <= widget.step <= 9 and widget.playing
    widget._ticked -= 1
    widget.refresh()
    assert widget.live and not widget.playing and widget.step == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [("selection", {"nope": 1}), ("selection", {"block_id": -1}), ("selection", {"block_id": "3"}), ("selection", {"request_id": 3}),
     ("speed", 0.0), ("step", "3"), ("live", 3)],
)  # fmt: skip
def test_bad_values_are_refused_and_change_nothing(name: str, value: Any, run: Bench) -> None:
    widget = explorer.KVCacheView(run.session)
    before = getattr(widget, name)
    with pytest.raises(traitlets.TraitError):
        setattr(widget, name, value)
    assert getattr(widget, name) == before


def test_unknown_keywords_and_sources_are_refused(run: Bench) -> None:
    with pytest.raises(TypeError):
        explorer.RunView(run.session, colour="red")
    with pytest.raises(ValueError, match="a view is made of"):
        explorer.RunView(42)
    with pytest.raises(OSError):
        Explorer.load("there/is/no.such")
    with pytest.raises(ValueError, match=r"unknown argument 'promt' .*; known: prompt, params, chat, model, .*max_num_seqs"):
        explorer.explore(promt="x")
    with pytest.raises(ValueError, match="prompt must be"):
        explorer.explore(prompt=[3])


def test_a_view_that_was_paused_says_so_at_once(run: Bench) -> None:
    widget = explorer.RunView(run.session, paused=True)
    assert run.session.status == "running"  # the engine's answer was not read yet
    assert repr(widget) == "RunView(paused, step 10)"
    run.deliver()
    assert repr(widget) == "RunView(paused, step 10)"
    widget.resume()
    run.deliver()
    assert repr(widget) == "RunView(running, step 10)" and not run.session.pausing


def test_links_of_ipywidgets_work(run: Bench) -> None:
    one, two = explorer.RunView(run.session), explorer.KVCacheView(run.session)
    link = ipywidgets.link((one, "step"), (two, "step"))
    one.step = 5
    assert two.step == 5 and two.clock.step == 5
    two.step_slider.value = 7
    assert one.step == 7 and one.clock.step == 7
    link.unlink()
    slider = ipywidgets.IntSlider(max=20)
    ipywidgets.link((slider, "value"), (one, "step"))
    slider.value = 3
    assert one.step == 3


def test_a_live_view_that_is_linked_in_the_page_goes_on_following(run: Bench) -> None:
    widget = explorer.RunView(run.session)
    run.run(3)
    widget.refresh()
    widget.set_state({"step": 10})  # what another live view showed a moment ago, by way of the page
    assert widget.live and widget.step == 13
    widget.set_state({"step": 4})
    assert not widget.live and widget.step == 4


# -- knobs and what is sent --------------------------------------------------------------------------------------------


def test_live_knobs_move_the_engine_and_follow_it(run: Bench) -> None:
    widget, other = explorer.RunView(run.session), explorer.KVCacheView(run.session)
    widget.max_num_seqs.value = 4
    assert run.process.calls[-1] == ("reconfigure", (widget.clock.owner, {"max_num_seqs": 4}))
    run.deliver()
    other.refresh()
    assert other.max_num_seqs.value == 4
    assert run.process.calls[-1][1][0] == widget.clock.owner, "showing a value must not send it"
    other.max_num_seqs.value = 5  # between the slider's stops
    assert 5 in other.max_num_seqs._options_values and run.process.config.max_num_seqs == 5
    with pytest.raises(traitlets.TraitError):
        other.max_num_seqs.value = "many"
    other.enable_prefix_caching.value = False
    assert run.process.config.enable_prefix_caching is False


def test_sampling_knobs_are_the_pages_own(run: Bench, sent: list[Any]) -> None:
    widget = explorer.RunView(run.session)
    composer = widget.shown["run"].view.composer
    widget.temperature.value, widget.top_p.value, widget.max_tokens.value, widget.seed.value = 1.2, 0.5, 64, "7"
    params = composer.params()
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (1.2, 0.5, 64, 7)
    composer.temperature.value = 0.3
    assert widget.temperature.value == 0.3
    labels = [facts.get("label") for facts in frame_of(widget).get_state()["_spec"]["nodes"].values()]
    assert "Send" in labels and "Temperature" not in labels, "the control stands in the place of the page's own"


def test_what_if_knobs_have_a_value_that_can_be_linked(run: Bench) -> None:
    widget = explorer.SamplingView(run.session)
    view = widget.shown["sampling"].view
    widget.temperature.value = 1.2
    assert view.temperature == 1.2
    view.temperature = None
    assert widget.temperature.value is None
    slider = ipywidgets.FloatSlider(min=0.05, max=1, value=0.5)
    ipywidgets.dlink((slider, "value"), (widget.nucleus_p, "value"))
    slider.value = 0.7
    assert view.nucleus_p == 0.7
    with pytest.raises(traitlets.TraitError):
        widget.top_p.value = 3
    assert view.top_p is None and widget.top_p.value is None


# -- pages -----------------------------------------------------------------------------------------------------------------


def test_a_page_gets_differences_and_nobody_gets_anything(
    run: Bench, sent: list[tuple[Frame, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    widget = explorer.KVCacheView(run.session)
    frame = frame_of(widget)
    spec = frame.get_state()["_spec"]
    page_says(widget, "open", version=spec["version"])
    assert sent == [], "what the page drew is what there is"
    run.run()
    widget.refresh()
    [(_frame, message)] = sent
    assert message["kind"] == "ops" and message["from"] == spec["version"] and message["to"] == spec["version"] + 1
    sent.clear()
    widget.refresh()
    assert sent == []
    page_says(widget, "close")
    frame._presumed_until = 0.0
    assert not widget.looked_at
    run.run(5)
    widget.rest()
    widget.refresh()
    assert sent == []
    page_says(widget, "open", page="page-2", version=message["to"])
    assert [(m["kind"], m["page"]) for _f, m in sent] == [("spec", "page-2")], "its copy is old: it gets everything"
    assert sent[0][1]["spec"]["version"] == frame._mirror.version


def test_a_page_that_has_gone_without_a_word_is_forgotten(
    run: Bench, sent: list[Any], make_clock: Callable[..., StandingClock]
) -> None:
    widget = explorer.KVCacheView(run.session)
    frame = frame_of(widget)
    page_says(widget, "open", version=-1)
    run.run()
    widget.refresh()
    HUB.remove(widget)  # what the thread of all widgets does is done by hand here,
    with LOCK:  # and what it was at is over
        later = make_clock("explorer.notebook.frame", time.monotonic() + 40).now
        widget.forget_the_gone(free_since=later - 5)
        assert frame.looked_at, "the kernel could hear it for five seconds only"
        widget.forget_the_gone(free_since=0.0)
        assert not frame.looked_at
        page_says(widget, "seen")
        assert frame.looked_at and sent[-1][1]["kind"] == "spec", "it was only slow"


def test_actions_of_a_page_do_what_they_do_in_the_app(run: Bench, sent: list[Any]) -> None:
    widget = explorer.KVCacheView(run.session)
    spec = frame_of(widget).get_state()["_spec"]
    page_says(widget, "open", version=spec["version"])
    [canvas] = [id for id, facts in spec["nodes"].items() if "selected" in facts.get("state", {})]
    page_says(widget, "act", action=[canvas, "state", {"selected": 2}])
    assert widget.selection["block_id"] == 2
    page_says(widget, "act", action=["n0", "explode", None])
    assert (
        sent[-1][1]["kind"] == "error" and "takes no action 'explode'" in sent[-1][1]["text"] and sent[-1][1]["page"] == "page-1"
    )
    for nonsense in (None, 3, {"kind": "act"}, {"kind": "open", "page": 3}):
        frame_of(widget)._handle_custom_msg(nonsense, [])


def test_an_error_of_a_view_is_shown_and_others_go_on(run: Bench, sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    widget, other = explorer.KVCacheView(run.session), explorer.RunView(run.session)
    monkeypatch.setattr(widget.shown["kv-cache"].view, "update", lambda: 1 / 0)
    widget.refresh()
    widget.refresh()
    assert [m["text"] for _f, m in sent if m["kind"] == "error"] == ["ZeroDivisionError: division by zero"], "the same one once"
    run.run()
    other.refresh()
    assert other.step == 11


# -- the explorer ------------------------------------------------------------------------------------------------------


def test_the_explorer_updates_the_open_page_only(run: Bench, sent: list[Any]) -> None:
    widget = Explorer(run.session)
    assert widget.page == "run" and [s.view for s in widget.visible] == [widget.shown["run"].view]
    widget.page = "kv-cache"
    assert (
        widget.children[-1].selected_index == list(PAGES).index("kv-cache") and frame_of(widget) is widget.shown["kv-cache"].frame
    )
    widget.children[-1].selected_index = 0
    assert widget.page == "run"
    with pytest.raises(traitlets.TraitError, match="page must be one of run, "):
        widget.page = "nope"
    widget.max_num_seqs.value = 2
    assert run.process.config.max_num_seqs == 2
    assert widget.shown["run"].row.children[0] is widget.max_num_seqs, "one control, on every page that has it"


def test_closing_a_widget_ends_its_requests_and_nothing_else(run: Bench) -> None:
    widget, other = explorer.RunView(run.session), explorer.RunView(run.session)
    run.send(other.clock.owner)
    widget.close()
    assert ("abort_owner", widget.clock.owner) in run.process.calls
    run.run()
    other.refresh()
    assert other.step == 11 and [v.owner for v in run.session.viewers] == [other.clock.owner]


def test_a_recorded_run_says_that_it_is_replayed(run: Bench) -> None:
    store = EventStore()
    store.append(run.store.window(0, 5))
    widget = Explorer(store)
    assert "replayed" in widget.shown["run"].head.text.object and "test-model" in widget.shown["run"].head.text.object
    with pytest.raises(ValueError, match="there is no engine"):
        widget.pause()


def test_a_process_that_runs_already_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess(EngineConfig(num_kv_blocks=16))
    process.start()
    process.started = object()  # type: ignore[attr-defined]
    process.poll(0)
    session = Session(process)
    try:
        session.start()
        assert session.status == "running" and process.calls == [("observe", False), ("observe", True)]
    finally:
        session.stop()


def test_classes_are_made_once() -> None:
    assert view_class(PAGES["run"]) is view_class(PAGES["run"]) is explorer.RunView


def test_the_transport_of_a_recorded_run_has_an_end_and_no_live(tmp_path: Path, run: Bench) -> None:
    run.store.save(tmp_path / "run.cutaway")
    recorded, live = explorer.RunView(tmp_path / "run.cutaway"), explorer.RunView(run.session)
    assert recorded.live_button.description == "End" and live.live_button.description == "Live"
    for widget in (recorded._transport.back, recorded._transport.play, recorded.live_button):
        assert "engine" not in widget.tooltip
    assert "engine" in live._transport.back.tooltip
