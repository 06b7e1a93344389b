"""Why a token differs: against distributions worked out by hand."""

import math
from typing import Any

import pytest

from engine.events.types import Candidate, TokenSampled
from explorer.compare.cause import Changed, choice_margin, differences, logprob_shift, token_cause

PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def token(token_id: int, probs: dict[int, float], u: float | None = None, nucleus: int = 0, **more: Any) -> TokenSampled:
    """A token drawn from (or the best of) ``probs``, all of which are recorded."""
    top = [Candidate(i, f"t{i}", math.log(p), p) for i, p in sorted(probs.items(), key=lambda item: -item[1])]
    facts = {"rank": 1, "prob": probs[token_id], "nucleus_size": nucleus or len(probs), "nucleus_mass": 1.0, "entropy": 1.0}
    return TokenSampled(
        step=3, time_ns=0, request_id="r", position=9, index=2, token_id=token_id, text=f"t{token_id}",
        logprob=math.log(probs[token_id]), u=u, top=top, **{**facts, **more},
    )  # fmt: skip


def test_the_margin_of_a_greedy_choice_is_the_gap_to_the_runner_up() -> None:
    e = token(4, {4: 0.5, 2: 0.25, 9: 0.25})
    assert choice_margin(e, PLAIN) == pytest.approx(math.log(2))
    assert choice_margin(token(4, {4: 1.0}), PLAIN) is None  # the runner-up was not recorded


@pytest.mark.parametrize(
    ("u", "chosen", "margin"), [(0.49, 4, 0.01), (0.3, 4, 0.2), (0.51, 2, 0.01), (0.749, 2, 0.001), (0.0, 4, 0.0)]
)
def test_the_margin_of_a_draw_is_the_way_to_the_nearest_edge(u: float, chosen: int, margin: float) -> None:
    """Shares [0, 0.5) for 4, [0.5, 0.75) for 2 (ties by id), [0.75, 1) for 9."""
    assert choice_margin(token(chosen, {4: 0.5, 2: 0.25, 9: 0.25}, u), PLAIN) == pytest.approx(margin)


def test_the_margin_is_unknown_where_the_candidates_do_not_say() -> None:
    e = token(4, {4: 0.5, 2: 0.25}, 0.3)
    outside = token(4, {4: 0.5, 2: 0.25}, 0.9)
    outside = TokenSampled(**{**{f: getattr(outside, f) for f in outside.__struct_fields__}, "token_id": 77})
    assert choice_margin(outside, PLAIN) is None
    penal = {**PLAIN, "repetition_penalty": 1.3}
    assert choice_margin(e, penal) is not None  # all that were kept are there
    more = TokenSampled(**{**{f: getattr(e, f) for f in e.__struct_fields__}, "nucleus_size": 9})
    assert choice_margin(more, penal) is None  # a token outside of the raw top may come first
    assert choice_margin(more, PLAIN) is not None
    greedy = token(4, {4: 0.5, 2: 0.25})
    assert choice_margin(greedy, penal) is None  # raw log-probabilities do not order penalised ones


def test_penalised_scores_decide_a_greedy_choice_where_they_were_recorded() -> None:
    e = token(4, {4: 0.5, 2: 0.25})
    top = [Candidate(4, "", math.log(0.5), 1.0, penalised=-1.0), Candidate(2, "", math.log(0.25), 0.0, penalised=-1.003)]
    e = TokenSampled(**{**{f: getattr(e, f) for f in e.__struct_fields__}, "top": top})
    assert choice_margin(e, {**PLAIN, "repetition_penalty": 1.3}) == pytest.approx(0.003)


def test_the_shift_is_the_largest_over_what_both_recorded() -> None:
    a, b = token(4, {4: 0.5, 2: 0.25, 9: 0.25}), token(4, {4: 0.6, 2: 0.2, 7: 0.2})
    assert logprob_shift(a, b) == pytest.approx(math.log(0.25 / 0.2))
    assert logprob_shift(token(1, {1: 1.0}), token(2, {2: 1.0})) is None


def test_another_draw() -> None:
    a, b = token(4, {4: 0.5, 2: 0.5}, 0.7), token(2, {4: 0.5, 2: 0.5}, 0.1)
    cause = token_cause(a, b, (PLAIN, {**PLAIN, "seed": 2}), (), (), "float32")
    assert cause.kind == "draw" and cause.changed == (Changed("seed", 1, 2),) and "0.700000" in cause.words


def test_a_setting_moved_the_distribution() -> None:
    a, b = token(4, {4: 0.8, 2: 0.2}, 0.7), token(2, {4: 0.6, 2: 0.4}, 0.7)
    cause = token_cause(a, b, (PLAIN, {**PLAIN, "temperature": 2.0}), (), (), "float32")
    assert cause.kind == "distribution" and "temperature: 1.0 → 2.0" in cause.words and "u = 0.700000" in cause.words
    weights = (Changed("sha256", "aa", "bb"),)
    assert token_cause(token(4, {4: 1.0}), token(2, {2: 1.0}), (PLAIN, PLAIN), weights, (), "float32").kind == "distribution"


def test_a_greedy_choice_that_became_a_draw_is_said_and_so_is_the_reverse() -> None:
    best, drawn = token(4, {4: 0.6, 2: 0.4}), token(2, {4: 0.6, 2: 0.4}, 0.7, rank=2)
    greedy, hot = {**PLAIN, "temperature": 0.0}, {**PLAIN, "temperature": 0.9}
    cause = token_cause(best, drawn, (greedy, hot), (), (), "float32")
    assert cause.kind == "distribution" and "a greedy choice became a draw (temperature: 0.0 → 0.9)" in cause.words
    assert "u = 0.700000 drew rank 2" in cause.words and "distribution moved" not in cause.words
    back = token_cause(drawn, best, (hot, greedy), (), (), "float32")
    assert "a draw became a greedy choice (temperature: 0.9 → 0.0)" in back.words and "drew rank 2" in back.words


@pytest.mark.parametrize(("gap", "dtype", "fault"), [(0.001, "float32", False), (0.5, "float32", True), (0.5, "bfloat16", False)])
def test_only_numerics_with_the_margin(gap: float, dtype: str, fault: bool) -> None:
    p = 1 / (1 + math.exp(-gap))
    a, b = token(4, {4: p, 2: 1 - p}), token(2, {2: p, 4: 1 - p})
    cause = token_cause(a, b, (PLAIN, PLAIN), (), (Changed("max_num_seqs", 4, 8),), dtype)
    assert (cause.kind, cause.fault) == ("numerics", fault)
    assert cause.margin == pytest.approx(gap) and cause.shift == pytest.approx(gap)
    assert "max_num_seqs: 4 → 8" in cause.words and ("more than rounding" in cause.words) is fault


@pytest.mark.parametrize(("u", "fault"), [(0.49995, False), (0.4, True)])
def test_numerics_of_a_draw_look_at_the_edge(u: float, fault: bool) -> None:
    cause = token_cause(token(4, {4: 0.5, 9: 0.5}, u), token(9, {4: 0.5, 9: 0.5}, u), (PLAIN, PLAIN), (), (), "float32")
    assert cause.kind == "numerics" and cause.fault is fault


def test_differences_name_what_either_side_has() -> None:
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == (Changed("a", 1, None), Changed("b", 2, 3), Changed("c", None, 4))
    assert str(Changed("x", "a" * 99, 1)).endswith("… → 1")
