from collections.abc import Callable
from typing import Any

import panel as pn
import pytest
from panel.util import edit_readonly

from explorer.pages import HOME, PAGES
from explorer.shell import Shell
from tests.explorer.conftest import Clock, Desk


@pytest.fixture
def shell(desk: Desk) -> Shell:
    return Shell(desk.session)


def test_every_page_builds_with_nothing_to_show_and_with_a_run(desk: Desk, shell: Shell) -> None:
    for slug in PAGES:
        shell.open(slug)
        shell.tick()
    desk.send(shell.clock.owner, count=3, max_tokens=6)
    desk.run(8)
    for slug in PAGES:
        shell.open(slug)
        shell.tick()
        shell.clock.goto(3, 1, 8)
        shell.clock.follow()
    assert set(shell._views) == set(PAGES)


def test_a_page_is_opened_by_its_address_and_by_the_menu(desk: Desk) -> None:
    shell = Shell(desk.session, "?page=kv-cache")
    assert shell.url.search == "?page=kv-cache"
    assert shell.slug == "kv-cache" and shell.nav.active == (list(PAGES).index("kv-cache"),)
    shell.nav.active = (list(PAGES).index("run"),)
    assert shell.slug == "run"
    assert (shell.url.search, shell.url.push) == ("", True)


@pytest.mark.parametrize(
    "search", ["", "?page=", "?page=no-such", "?page=run&step=-4&block=x&token=99999999999999999999", "?" + "x" * 9000]
)
def test_an_address_that_says_nothing_useful_is_home(desk: Desk, search: str) -> None:
    shell = Shell(desk.session, search)
    assert shell.slug == HOME and shell.clock.live


def test_step_and_selection_are_in_the_address_and_live_knobs_are_not(desk: Desk, shell: Shell) -> None:
    desk.send(max_tokens=9)
    desk.run(9)
    shell.tick()
    shell.clock.goto(4, 1, 9)
    shell.clock.param.update(request_id="r0", token_index=7)
    assert shell.url.search == "?step=4&request=r0&token=7"
    assert shell.url.push is False
    shell.knob_panel.widgets["max_num_seqs"].value = 2
    assert "2" not in shell.address().replace("request=r0", "")
    other = Shell(desk.session, shell.url.search)
    assert (other.clock.step, other.clock.live, other.clock.request_id, other.clock.token_index) == (4, False, "r0", 7)


def test_back_returns_to_the_page_before(desk: Desk, shell: Shell) -> None:
    arrive = {"kind": "arrived", "search": "", "width": 1200}
    shell.url.action = {"seq": 1, **arrive}
    shell.nav.active = (1,)
    assert shell.slug == "kv-cache"
    shell.url.action = {"seq": 2, **arrive}
    assert shell.slug == "run" and shell.url.search == ""


def test_a_narrow_window_starts_with_the_drawer_closed(desk: Desk) -> None:
    wide, narrow = Shell(desk.session), Shell(desk.session)
    wide.url.action = {"seq": 1, "kind": "arrived", "search": "", "width": 1200}
    narrow.url.action = {"seq": 1, "kind": "arrived", "search": "", "width": 390}
    for shell in (wide, narrow):
        shell._loaded = True
        shell._fit()
    assert wide.page.sidebar_open and not narrow.page.sidebar_open
    assert not Shell(desk.session, phone=True).page.sidebar_open


def test_the_transport_bar_moves_the_clock(desk: Desk, shell: Shell) -> None:
    desk.send(max_tokens=9)
    desk.run(9)
    shell.tick()
    bar, clock = shell.transport, shell.clock
    assert (bar.first, bar.last, bar.live) == (desk.store.first_step, 9, True)
    for seq, (kind, value, expected) in enumerate(
        [
            ("back", None, (False, 8)),
            ("goto", 3, (False, 3)),
            ("step", None, (False, 4)),
            ("pause", None, (False, 4)),
            ("speed", 1e9, (False, 4)),
        ]
    ):
        bar.action = {"seq": seq, "kind": kind, "value": value}
        assert (clock.live, clock.step) == expected, kind
    assert clock.speed == 1000
    bar.action = {"seq": 10, "kind": "goto", "value": "evil"}
    assert clock.step == 4
    bar.action = {"seq": 11, "kind": "follow"}
    assert clock.live and bar.live


def test_playing_moves_with_time(desk: Desk, shell: Shell, make_clock: Callable[..., Clock]) -> None:
    desk.send(max_tokens=30)
    desk.run(30)
    clock = make_clock("explorer.shell", 100.0)
    shell._ticked = clock.now
    shell.clock.goto(2, 1, 30)
    shell.clock.speed = 10
    shell.clock.play(30)
    clock.now += 0.5
    shell.tick()
    assert shell.clock.step == 7


def test_a_tick_with_nothing_new_sends_nothing(desk: Desk, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.send(max_tokens=9)
    desk.run(5)
    shell._status_drawn = 0.0
    parts = (shell.view.answers.cards, shell.view.gauges)  # type: ignore[union-attr]
    for part in parts:
        part.action = {"seq": 1, "kind": "ready"}
    shell.tick()
    sent: list[Any] = []
    for part in parts:
        monkeypatch.setattr(part, "send", sent.append)
    for part in (shell.transport, shell.status, shell.people, shell.banner.text, shell.banner.root, shell.page):
        part.param.watch(sent.append, [name for name in part.param if name not in ("name", "busy")])
    for source in shell.view.sources.values():  # type: ignore[union-attr]
        source.on_change("data", lambda attr, old, new: sent.append(attr))
    shell._status_drawn = 0.0
    shell.tick()
    assert sent == []


def test_the_page_does_not_follow_panels_busy(shell: Shell) -> None:
    """Whatever a person does would send it twice, each time after a search through the whole page."""
    before = pn.state.busy
    try:
        for now in (True, False):
            with edit_readonly(pn.state):
                pn.state.busy = now
            assert shell.page.busy is False
    finally:
        with edit_readonly(pn.state):
            pn.state.busy = before


def test_messages_to_this_browser_show_once_and_can_be_dismissed(desk: Desk, shell: Shell) -> None:
    shell.tick()
    assert not shell.banner.root.visible
    desk.session.notify(shell.clock.owner, "<b>no</b>")
    shell.tick()
    assert shell.banner.root.visible and "&lt;b&gt;no&lt;/b&gt;" in shell.banner.text.object
    shell.banner.say("")
    assert not shell.banner.root.visible


def test_a_dead_engine_shows_a_restart_button(desk: Desk, shell: Shell) -> None:
    desk.send(max_tokens=9)
    desk.run(5)
    shell.tick()
    shell.clock.goto(2, 1, 5)
    desk.process.die("the engine's process was ended by signal 9")
    desk.deliver()
    shell.tick()
    assert shell.banner.root.visible and shell.banner.restart.visible and "signal 9" in shell.banner.text.object
    assert shell.pause.disabled
    desk.session.restart()
    desk.deliver()
    shell.tick()
    assert not shell.banner.root.visible and not shell.banner.restart.visible
    assert shell.clock.live  # the step it stood at is gone


def test_pausing_the_engine_is_not_pausing_the_view(desk: Desk, shell: Shell) -> None:
    shell._toggle_engine()
    desk.deliver()
    shell.tick()
    assert desk.session.status == "paused" and shell.clock.live
    assert shell.pause.label == "Resume engine" and not shell.one_step.disabled
    shell._toggle_engine()
    desk.deliver()
    assert desk.session.status == "running"
    shell.transport.action = {"seq": 1, "kind": "pause"}
    assert not shell.clock.live and desk.session.status == "running"


def test_the_status_line_says_what_runs_and_who_is_here(desk: Desk, shell: Shell) -> None:
    desk.send(max_tokens=9)
    desk.run(5)
    other = Shell(desk.session)
    other._draw_status()
    for text in ("Running", "test-model", "float32", "cpu", "watching", "a test"):
        assert text in other.status.object
    assert f"{other.clock.owner} (you)" in other.people.object and shell.clock.owner in other.people.object
    other.close()
    shell._draw_status()
    assert other.clock.owner not in shell.people.object
