"""A page that follows is drawn less often on a machine that is full, and as before when there is room again."""

from collections.abc import Callable

import pytest

from explorer.pace import Crowding
from explorer.shell import TICK_MS, Shell
from tests.explorer.conftest import Clock, Desk


@pytest.fixture
def clock(make_clock: Callable[..., Clock]) -> Clock:
    return make_clock("explorer.pace", 100.0)


def test_slower_while_it_is_full_and_faster_when_there_is_room(clock: Clock) -> None:
    busy = [1.0]
    crowding = Crowding(lambda: busy[0])
    seen = []
    for share, times in ((1.0, 8), (0.85, 3), (0.4, 12)):
        busy[0] = share
        for _ in range(times):
            clock.now += 1.01
            seen.append(crowding.seconds())
    assert seen[0] == Crowding.FASTEST  # the first look only begins the count
    assert seen[:8] == sorted(seen[:8]) and seen[7] == Crowding.SLOWEST
    assert seen[8:11] == [Crowding.SLOWEST] * 3  # neither full nor room
    assert seen[11:] == sorted(seen[11:], reverse=True) and seen[-1] == Crowding.FASTEST


def test_it_looks_once_a_second_and_forgets_what_was_long_ago(clock: Clock) -> None:
    looks = []
    crowding = Crowding(lambda: looks.append(1) or 1.0)
    for _ in range(50):
        clock.now += 0.05
        crowding.seconds()
    assert len(looks) == 3
    before = crowding.seconds()
    clock.now += 60  # nobody was here
    assert crowding.seconds() == before > Crowding.FASTEST


def test_a_page_that_follows_waits_and_one_that_is_moved_does_not(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, make_clock: Callable[..., Clock]
) -> None:
    shell = Shell(desk.session)
    ticks = []
    monkeypatch.setattr(shell, "tick", lambda: ticks.append(1))
    monkeypatch.setattr("explorer.shell.CROWDING", Crowding(lambda: 1.0))
    make_clock("explorer.shell", shell._ticked + TICK_MS / 1000)
    shell._follow()
    assert len(ticks) == 1  # nothing is known yet
    monkeypatch.setattr("explorer.shell.CROWDING._seconds", 0.5)
    shell._follow()
    assert len(ticks) == 1
    shell.clock.live = False  # somebody moves through the run
    ticks.clear()
    shell._follow()
    assert len(ticks) == 1
