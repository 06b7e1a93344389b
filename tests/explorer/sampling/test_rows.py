"""Rows, lanes, sums and pairs against what was put in."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events.types import (
    BeamCandidate,
    BeamSequence,
    BeamsFinished,
    BeamsSelected,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    TokenSampled,
)
from engine.request import SamplingParams
from explorer.sampling import beams, lanes, pairs
from explorer.sampling.figure import point_columns
from explorer.sampling.rows import SamplingRows, mass_of, nucleus_of, raw_head, recorded, repeated
from explorer.store import EventStore
from tests.explorer.sampling.test_whatif import chosen, logits_of

NAN = math.nan
STARTED = EngineStarted(
    step=0,
    time_ns=0,
    config={},
    model={"vocab_size": 96},
    device={"dtype": "float32"},
    versions={},
    kv_bytes_per_block=1,
    kv_pool_bytes=1,
)


def added(request_id: str, prompt: list[int] | None = None, step: int = 0, **sampling: Any) -> RequestAdded:
    return RequestAdded(
        step=step, time_ns=0, request_id=request_id, owner="ann", prompt_token_ids=prompt or [1, 2, 3], prompt_text="one two three",
        sampling={"temperature": 1.0, "seed": 5} | sampling,
    )  # fmt: skip


def sampled(request_id: str, position: int, token_id: int, step: int, **more: Any) -> TokenSampled:
    facts: dict[str, Any] = {
        "index": position - 3, "text": f" t{token_id}", "logprob": -0.5, "rank": 1, "u": 0.25, "prob": 0.6, "nucleus_size": 2, "nucleus_mass": 0.9, "entropy": 1.0,
    }  # fmt: skip
    return TokenSampled(step=step, time_ns=step, request_id=request_id, position=position, token_id=token_id, **{**facts, **more})


def fed(*events: Event) -> SamplingRows:
    rows = SamplingRows()
    rows.feed([STARTED, *events])
    return rows


# -- tokens ------------------------------------------------------------------------------------------------------------------


def test_a_token_is_read_back_with_its_logits_whichever_came_first() -> None:
    token, logits = chosen(logits_of(3), SamplingParams(seed=1), position=3)
    for order in ([token, logits], [logits, token]):
        store = EventStore()
        store.append([STARTED, added("r"), *order])
        rows = fed(added("r"), *order)
        point = rows.tracks["r"].points[3]
        assert point.whole and len(point.head) == 96
        assert recorded(store, point, "r") == (token, logits) == rows.events_of(EventStore(), point, "r")
        fresh = SamplingRows()  # that has seen nothing: as for a token of long ago
        assert fresh.events_of(store, point, "r") == (token, logits)
        raw = np.exp(logits_of(3).astype(np.float64))
        np.testing.assert_allclose(point.head, np.sort(raw / raw.sum())[::-1], rtol=1e-9)


def test_settings_hold_from_the_token_on_at_which_they_came() -> None:
    knob = KnobChanged(step=2, time_ns=0, name="temperature", old=1.0, new=0.2, request_id="r")
    track = fed(added("r"), sampled("r", 3, 9, 1), sampled("r", 4, 9, 2), knob, sampled("r", 5, 9, 3)).tracks["r"]
    assert [track.sampling_at(p)["temperature"] for p in (3, 4, 5)] == [1.0, 1.0, 0.2]


def test_penalties_of_a_branch_see_what_it_took_over() -> None:
    branched = RequestBranched(
        step=3, time_ns=0, request_id="b", source_id="r", position=4, token_id=50, text=" fifty", source_token_id=11, output_token_ids=[10, 50],
        output_texts=[" t10", " fifty"],
    )  # fmt: skip
    rows = fed(added("r"), sampled("r", 3, 10, 1), sampled("r", 4, 11, 2), added("b"), branched, sampled("b", 5, 12, 4))
    track = rows.tracks["b"]
    assert track.before(5) == ([1, 2, 3], [10, 50])
    assert track.output_token_ids == [10, 50, 12] and rows.text_of(50) == " fifty"


def test_an_unwatched_stretch_leaves_a_gap_and_no_invented_tokens() -> None:
    track = fed(added("r"), sampled("r", 6, 9, 4)).tracks["r"]
    assert track.output_token_ids == [-1, -1, -1, 9] and track.before(6) == ([1, 2, 3], [])
    assert [p.position for p in track.until(4)] == [6] and track.until(3) == []


@pytest.mark.parametrize("position", [1 << 40, 1 << 62])
def test_a_file_that_claims_a_token_far_away_is_refused_before_room_is_made_for_it(position: int) -> None:
    with pytest.raises(ValueError, match="not known"):
        fed(added("r"), sampled("r", position, 9, 4, index=0))


def test_a_new_engine_begins_anew() -> None:
    rows = fed(added("r"), sampled("r", 3, 9, 1))
    rows.taken()
    rows.feed([STARTED])
    assert rows.restarted and not rows.tracks


@given(seed=st.integers(0, 1000), p=st.floats(0.05, 0.99), k=st.integers(1, 96))
def test_nucleus_and_mass_are_those_of_a_loop(seed: int, p: float, k: int) -> None:
    logits = logits_of(seed)
    head = raw_head(logits)
    probs = sorted((np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()).tolist(), reverse=True)
    count, before = 0, 0.0
    while before < p:
        before += probs[count]
        count += 1
    assert nucleus_of(head, p) == count
    assert mass_of(head, k) == pytest.approx(sum(probs[:k]))


def test_what_lies_beyond_the_recorded_candidates_is_not_made_up() -> None:
    head = np.array([0.4, 0.2])
    assert nucleus_of(head, 0.5) == 2 and nucleus_of(head, 0.7) is None and nucleus_of(np.zeros(0), 0.5) is None
    assert mass_of(head, 2) == pytest.approx(0.6) and mass_of(head, 3) is None
    point = fed(added("r"), sampled("r", 3, 9, 1)).tracks["r"].points[3]._replace(head=head)
    data = point_columns([point], 0.7, 3)
    assert (
        math.isnan(data["nucleus"][0])
        and data["beyond"] == [2]
        and math.isnan(data["mass"][0])
        and data["size"] == ["more than 2"]
    )


def test_repeated_ngrams_are_counted_after_their_first_time() -> None:
    assert repeated([1, 2, 3, 1, 2, 3, 1], 3) == (2, 5)
    assert repeated([1, 2], 3) == (0, 0)


# -- beams -------------------------------------------------------------------------------------------------------------------


def way(source: int, token: int, total: float, beam: int, fate: str = "kept", score: float = NAN) -> BeamCandidate:
    return BeamCandidate(source, token, f" t{token}", -0.1, total, beam, score, fate)


def search() -> list[Event]:
    """Width 2: beam 1 goes on twice (beam 0 dies), then one of them ends."""
    facts = {"time_ns": 0, "request_id": "s", "num_ended": 0, "worst_ended": NAN, "best_possible": NAN}
    one = BeamsSelected(
        step=1, position=3, candidates=[way(0, 10, -1, 0), way(0, 11, -2, 1), way(0, 12, -3, -1, "dropped")], **facts
    )
    two = BeamsSelected(step=2, position=4, candidates=[way(1, 20, -2.5, 1), way(1, 21, -2.6, 0)], **facts)
    three = BeamsSelected(
        step=3, position=5, candidates=[way(0, 2, -2.7, -1, "ended", -0.9), way(1, 30, -3.0, 1), way(0, 31, -3.5, 0)], **facts
    )
    best = BeamSequence([11, 21, 2], [" t11", " t21", ""], -2.7, -0.9, "stop")
    end = BeamsFinished(step=3, time_ns=0, request_id="s", why="no beam can improve", sequences=[best])
    return [added("s", beam_width=2, temperature=0), one, two, three, end]


def test_the_beam_tree_has_every_kept_token_under_what_it_went_on_from() -> None:
    run = fed(*search()).beams["s"]
    made = lanes.beam_lanes(run, 3)
    found = {
        (n.column, n.lane): (n.token_id, n.state, made.nodes[n.parent].token_id if n.parent >= 0 else None) for n in made.nodes
    }
    assert found == {
        (3, 0): (10, "dead", None), (3, 1): (11, "best", None), (4, 1): (20, "", 11), (4, 0): (21, "best", 11),
        (5, 2): (2, "best", 21), (5, 1): (30, "", 20), (5, 0): (31, "", 21),
    }  # fmt: skip
    assert made.names == ["beam 0", "beam 1", "ended 1"]
    assert lanes.deaths(run.steps) == [(4, [0])]


def test_the_tree_at_an_earlier_step_knows_nothing_of_later_ones() -> None:
    run = fed(*search()).beams["s"]
    made = lanes.beam_lanes(run, 1)
    assert [(n.token_id, n.state) for n in made.nodes] == [(10, ""), (11, "")]
    assert beams.sums(run, {}, 1) == []


def test_greedy_and_the_best_beam_are_summed_side_by_side() -> None:
    greedy = [sampled("g", 3, 10, 1, u=None, logprob=-1.0), sampled("g", 4, 10, 2, u=None, logprob=-2.5)]
    rows = fed(added("g", temperature=0), *greedy, *search())
    found = beams.sums(rows.beams["s"], rows.tracks, 3)
    assert [(s.token_ids, s.sum_logprob) for s in found] == [([10, 10], -3.5), ([11, 21, 2], -2.7)]
    assert found[1].score == -0.9 and math.isnan(found[0].score)
    assert "<b>-2.700</b>" in beams.sums_html(found) and "at 4: 0" in beams.told(rows.beams["s"], 3)


# -- branches and pairs ----------------------------------------------------------------------------------------------------------


def branched_run() -> list[Event]:
    branch = RequestBranched(
        step=3, time_ns=0, request_id="b", source_id="r", position=4, token_id=50, text=" fifty", source_token_id=11, output_token_ids=[10, 50],
        output_texts=[" t10", " fifty"],
    )  # fmt: skip
    return [
        added("r"), sampled("r", 3, 10, 1), sampled("r", 4, 11, 2), sampled("r", 5, 12, 3), RequestFinished(step=3, time_ns=0, request_id="r", reason="length"),
        added("b", step=3), branch, sampled("b", 5, 60, 4),
    ]  # fmt: skip


def test_a_branch_hangs_where_its_token_was_forced() -> None:
    tracks = fed(*branched_run()).tracks
    members = lanes.family(tracks, tracks["b"])
    assert [t.request_id for t in members] == ["r", "b"]
    made = lanes.branch_lanes(members, 4)
    nodes = {(n.column, n.lane): (n.text, n.state, n.parent) for n in made.nodes}
    assert nodes[4, 1] == (" fifty", "forced", 0) and made.nodes[0].column == 3 and nodes[5, 1][2] == 3
    assert [n.key for n in made.nodes if n.lane == 1] == [["b", 4], ["b", 5]]
    before = lanes.branch_lanes(members, 2)
    assert [n.column for n in before.nodes] == [3, 4] and before.names == ["r"]  # the branch has not arrived yet


def test_two_requests_side_by_side_tell_the_cause() -> None:
    a, _la = chosen(logits_of(5, 1.0), SamplingParams(temperature=0.2, seed=8), position=3)
    b, _lb = chosen(logits_of(5, 1.0), SamplingParams(temperature=2.0, seed=8), position=3)
    assert a.token_id != b.token_id and a.u == b.u
    a, b = (
        type(e)(**{**{f: getattr(e, f) for f in e.__struct_fields__}, "request_id": r, "step": s, "index": 0})
        for e, r, s in ((a, "a", 1), (b, "b", 2))
    )
    events = [STARTED, added("a", temperature=0.2, seed=8), a, added("b", step=1, temperature=2.0, seed=8), b]
    store = EventStore()
    store.append(events)
    rows = fed(*events[1:])
    assert pairs.partners(rows.tracks, rows.tracks["a"]) == [rows.tracks["b"]]
    pair = pairs.side_by_side(store, rows, rows.tracks["a"], rows.tracks["b"])
    assert pair.index == 0 and pair.cause is not None and pair.cause.kind == "distribution"
    told = pairs.pair_html(pair)
    assert "temperature: 0.2 → 2.0" in told and "</b> The distribution moved" in told


@pytest.mark.parametrize(("temperature", "said"), [(0.0, "Set differently: nothing."), (0.5, "Set differently: seed: 1 → 2.")])
def test_seeds_of_two_greedy_requests_are_no_difference(temperature: float, said: str) -> None:
    rows = fed(added("a", temperature=temperature, seed=1), added("b", temperature=temperature, seed=2))
    pair = pairs.side_by_side(EventStore(), rows, rows.tracks["a"], rows.tracks["b"])
    assert said in pairs.pair_html(pair)


def test_a_forced_token_is_said_to_be_forced() -> None:
    events = branched_run()
    store = EventStore()
    store.append([STARTED, *events])
    rows = fed(*events)
    pair = pairs.side_by_side(store, rows, rows.tracks["r"], rows.tracks["b"])
    assert pair.index == 1 and pair.cause is not None and "forced" in pair.cause.words


def test_texts_of_a_model_are_escaped() -> None:
    events = [sampled("r", 3, 10, 1, text="<b>"), sampled("q", 3, 11, 2, text="<script>")]
    rows = fed(added("r"), added("q"), *events)
    pair = pairs.side_by_side(EventStore(), rows, rows.tracks["r"], rows.tracks["q"])
    assert "<script>" not in pairs.pair_html(pair) and "&lt;script&gt;" in pairs.pair_html(pair)
