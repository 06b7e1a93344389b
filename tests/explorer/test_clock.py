from explorer.base import Clock
from explorer.canvas.transport import Transport


def test_live_shows_the_newest_step() -> None:
    clock = Clock()
    assert clock.shown(1, 40) == 40


def test_pause_stays_at_the_step_that_was_shown() -> None:
    clock = Clock()
    clock.pause(last=40)
    assert (clock.live, clock.playing, clock.shown(1, 55)) == (False, False, 40)


def test_a_step_that_is_no_longer_kept_shows_the_first_that_is() -> None:
    clock = Clock(live=False, step=3)
    assert clock.shown(10, 40) == 10
    assert Clock(live=False, step=99).shown(10, 40) == 40


def test_back_and_forward_pause_and_stay_within_the_recorded_steps() -> None:
    clock = Clock()
    clock.move(-1, 1, 40)
    assert (clock.step, clock.live) == (39, False)
    clock.move(-100, 5, 40)
    assert clock.step == 5
    clock.move(+100, 5, 40)
    assert clock.step == 40


def test_play_moves_by_its_speed_and_goes_live_when_it_has_caught_up() -> None:
    clock = Clock(live=False, step=1, speed=10)
    clock.play(last=4)
    clock.advance(0.05, last=4)
    assert clock.step == 1
    clock.advance(0.15, last=4)
    assert (clock.step, clock.live) == (3, False)
    clock.advance(0.1, last=4)
    assert (clock.step, clock.live, clock.playing) == (4, True, False)


def test_play_at_the_newest_step_follows_live() -> None:
    clock = Clock(live=False, step=4)
    clock.play(last=4)
    assert clock.live and not clock.playing


def test_time_passes_only_while_playing() -> None:
    clock = Clock(live=False, step=1)
    clock.advance(100, last=50)
    assert clock.step == 1


def test_the_bar_says_that_a_step_in_the_past_is_replayed() -> None:
    clock = Clock()
    bar, recorded = Transport(clock), Transport(clock, recorded=True)
    assert bar.past == {}
    clock.goto(3, 1, 9)
    assert bar.past["word"] == "replayed" and "record" in bar.past["hint"]
    assert recorded.past == {}  # its page says so by every badge
    clock.follow()
    assert bar.past == {}
