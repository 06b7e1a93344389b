"""Beams and branches in the state: what follows is taken in, what cannot follow is refused before anything large is made."""

import pytest

from engine.events.state import UNSEEN, State
from engine.events.types import (
    BeamCandidate,
    BeamSequence,
    BeamsFinished,
    BeamsSelected,
    EngineStarted,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    RequestForked,
    Snapshot,
)

NAN = float("nan")


def state() -> State:
    """Two beams, r and r#1, of a prompt of three tokens."""
    s = State()
    s.apply(EngineStarted(step=0, time_ns=0, config={}, model={}, device={}, versions={}, kv_bytes_per_block=1, kv_pool_bytes=1))
    s.apply(Snapshot(step=0, time_ns=0, num_blocks=4, block_size=4, ref_counts=[0] * 4, cached={}, lru=[], requests=[], knobs={}))
    for i, name in enumerate(("r", "r#1")):
        s.apply(
            RequestAdded(
                step=1,
                time_ns=i,
                request_id=name,
                owner="o",
                prompt_token_ids=[7, 8, 9],
                prompt_text="abc",
                sampling={},
                parent_id="r" if i else None,
                sample_index=i,
            )
        )
    s.apply(RequestForked(step=1, time_ns=2, request_id="r#1", parent_id="r", block_ids=[], num_computed_tokens=3))
    return s


def selected(position: int, *ways: tuple[int, int, int], request_id: str = "r") -> BeamsSelected:
    """``ways``: (source, token, beam)."""
    candidates = [BeamCandidate(s, t, str(t), -1.0, -1.0, b, NAN, "kept" if b >= 0 else "dropped") for s, t, b in ways]
    return BeamsSelected(
        step=1, time_ns=3, request_id=request_id, position=position, candidates=candidates, num_ended=0, worst_ended=NAN,
        best_possible=-1.0,
    )  # fmt: skip


def outputs(s: State) -> list[list[int]]:
    return [s.requests[name].output_token_ids for name in ("r", "r#1")]


def test_beams_take_each_others_tokens():
    s = state()
    s.apply(selected(3, (0, 20, 0), (0, 21, 1), (0, 22, -1)))
    assert outputs(s) == [[20], [21]]
    s.apply(selected(4, (1, 30, 1), (1, 31, 0)))  # both go on from the second, which is read before it is written
    assert outputs(s) == [[21, 31], [21, 30]]
    copy = s.copy()
    s.apply(selected(5, (0, 40, 0), (0, 41, 1)))
    assert outputs(s) == [[21, 31, 40], [21, 31, 41]] and outputs(copy) == [[21, 31], [21, 30]]
    assert s.requests["r#1"].num_output_tokens == 3 and s.requests["r#1"].output_texts == ["21", "31", "41"]


def test_steps_that_were_not_recorded_are_unseen():
    s = state()
    s.apply(selected(5, (0, 20, 0), (0, 21, 1)))
    assert outputs(s) == [[UNSEEN, UNSEEN, 20], [UNSEEN, UNSEEN, 21]]


def test_the_results_replace_the_beams_and_their_size_is_counted():
    s = state()
    s.apply(selected(3, (0, 20, 0), (0, 21, 1)))
    s.apply(RequestFinished(step=2, time_ns=4, request_id="r#1", reason="stop", num_output_tokens=1))
    results = [BeamSequence([5, 6, 2], ["a", "b", ""], -1.0, -0.5, "stop"), BeamSequence([5], ["a"], -2.0, -2.0, "length")]
    s.apply(BeamsFinished(step=2, time_ns=5, request_id="r", why="", sequences=results))
    s.apply(RequestFinished(step=2, time_ns=6, request_id="r", reason="stop", num_output_tokens=3))
    assert outputs(s) == [[5, 6, 2], [5]] and [s.requests[n].num_output_tokens for n in ("r", "r#1")] == [3, 1]
    assert s._num_tokens == 6 + 4 == sum(s._finished.values())


def test_a_branch_starts_with_what_it_kept():
    s = state()
    s.apply(
        RequestBranched(
            step=1,
            time_ns=4,
            request_id="r#1",
            source_id="r",
            position=4,
            token_id=50,
            text="x",
            source_token_id=40,
            output_token_ids=[20, 50],
            output_texts=["t", "x"],
        )
    )
    view = s.requests["r#1"]
    assert (view.output_token_ids, view.output_text, view.branched_from, view.branched_at) == ([20, 50], "tx", "r", 4)


@pytest.mark.parametrize("position", [-1, 2, 1 << 26, 1 << 62])  # refused before a list of that length is made
def test_a_position_that_cannot_be(position):
    s = state()
    with pytest.raises(ValueError, match="token"):
        s.apply(selected(position, (0, 20, 0)))


@pytest.mark.parametrize("ways", [[(3, 20, 0)], [(0, 20, 3)], [(1 << 40, 20, 0)]])
def test_a_beam_that_is_not_there(ways):
    with pytest.raises(ValueError, match="not known"):
        state().apply(selected(3, *ways))
