"""What a browser sends is input: a canvas takes numbers that can be reckoned with, and leaves everything else."""

import math
from typing import Any

import pytest

from explorer.base import Clock
from explorer.canvas.transport import Transport


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "7", [7], {"value": 7}], ids=str)
def test_a_step_or_a_speed_that_is_no_number_changes_nothing(value: Any) -> None:
    clock = Clock()
    bar = Transport(clock)
    bar.sync(1, 9)
    clock.goto(4, 1, 9)
    speed = clock.speed
    for seq, kind in enumerate(("goto", "speed"), 1):
        bar.action = {"seq": seq, "kind": kind, "value": value}
    assert (clock.step, clock.speed) == (4, speed)


def test_a_number_moves_the_clock_and_sets_a_speed_within_its_bounds() -> None:
    clock = Clock()
    bar = Transport(clock)
    bar.sync(1, 9)
    bar.action = {"seq": 1, "kind": "goto", "value": 5.0}
    assert clock.step == 5
    for seq, (value, speed) in enumerate([(10, 10), (1e9, clock.param.speed.bounds[1]), (-3, clock.param.speed.bounds[0])], 2):
        bar.action = {"seq": seq, "kind": "speed", "value": value}
        assert clock.speed == speed
