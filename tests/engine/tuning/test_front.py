"""The front against its definition, spelled out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tuning.front import AXES, OBJECTIVES, axes_of, front

coordinate = st.one_of(st.integers(0, 4).map(float), st.just(math.nan), st.just(math.inf))


def by_definition(points: list[list[float]], higher: list[bool]) -> list[int]:
    def dominates(a: list[float], b: list[float]) -> bool:
        no_worse = all(x >= y if up else x <= y for x, y, up in zip(a, b, higher, strict=True))
        return no_worse and any(x > y if up else x < y for x, y, up in zip(a, b, higher, strict=True))

    known = [i for i, p in enumerate(points) if not any(math.isnan(x) for x in p)]
    return [i for i in known if not any(dominates(points[j], points[i]) for j in known)]


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.permutations(list(AXES)).map(lambda names: names[:n]), st.lists(st.lists(coordinate, min_size=n, max_size=n), max_size=12))))  # fmt: skip
def test_the_front_is_as_defined(drawn: tuple[list[str], list[list[float]]]) -> None:
    names, points = drawn
    axes = axes_of(names)
    assert front(points, axes) == by_definition(points, [axis.higher_is_better for axis in axes])


def test_throughput_is_to_be_high_and_latency_low() -> None:
    axes = axes_of(("output_throughput", "ttft_p99"))
    assert front([[10, 1.0], [20, 2.0], [15, 2.5], [20, 2.0], [5, 0.5], [30, math.nan]], axes) == [0, 1, 3, 4]
    assert front([], axes) == []
    assert [axis.name for axis in axes_of(OBJECTIVES)] == list(OBJECTIVES)


@pytest.mark.parametrize("names", [(), ("speed",), ("goodput", "goodput")])
def test_objectives_that_are_none_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="objectives must be different ones of output_throughput"):
        axes_of(names)
