"""A page that follows is drawn less often on a machine that is full, and as before when there is room again."""

import pytest

from explorer import pace
from explorer.pace import Crowding
from explorer.shell import TICK_MS, Shell
from tests.explorer.conftest import Desk


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: at[0])
    return at


def test_slower_while_it_is_full_and_faster_when_there_is_room(now: list[float]) -> None:
    busy = [1.0]
    crowding = Crowding(lambda: busy[0])
    seen = []
    for share, times in ((1.0, 8), (0.85, 3), (0.4, 12)):
        busy[0] = share
        for _ in range(times):
            now[0] += 1.01
            seen.append(crowding.seconds())
    assert seen[0] == Crowding.FASTEST  # the first look only begins the count
    assert seen[:8] == sorted(seen[:8]) and seen[7] == Crowding.SLOWEST
    assert seen[8:11] == [Crowding.SLOWEST] * 3  # neither full nor room
    assert seen[11:] == sorted(seen[11:], reverse=True) and seen[-1] == Crowding.FASTEST


def test_it_looks_once_a_second_and_forgets_what_was_long_ago(now: list[float]) -> None:
    looks = []
    crowding = Crowding(lambda: looks.append(1) or 1.0)
    for _ in range(50):
        now[0] += 0.05
        crowding.seconds()
    assert len(looks) == 3
    before = crowding.seconds()
    now[0] += 60  # nobody was here
    assert crowding.seconds() == before > Crowding.FASTEST


def test_a_page_that_follows_waits_and_one_that_is_moved_does_not(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(desk.session)
    ticks = []
    monkeypatch.setattr(shell, "tick", lambda: ticks.append(1))
    monkeypatch.setattr("explorer.shell.CROWDING", Crowding(lambda: 1.0))
    monkeypatch.setattr("explorer.shell.time.monotonic", lambda: shell._ticked + TICK_MS / 1000)
    shell._follow()
    assert len(ticks) == 1  # nothing is known yet
    monkeypatch.setattr("explorer.shell.CROWDING._seconds", 0.5)
    shell._follow()
    assert len(ticks) == 1
    shell.clock.live = False  # somebody moves through the run
    ticks.clear()
    shell._follow()
    assert len(ticks) == 1
