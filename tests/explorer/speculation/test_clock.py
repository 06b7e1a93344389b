"""Costs out of events whose costs are known; the modelled curve against its closed form and against simulation."""

import math
import random
from dataclasses import replace

import pytest

from explorer.speculation import words
from explorer.speculation.clock import MAX_K, Costs, Paired, costs, paired
from explorer.speculation.rows import Setting, SpeculationRows
from tests.explorer.speculation.made import SPEC, Made


def rows_of(made: Made) -> SpeculationRows:
    rows = SpeculationRows()
    rows.feed(made.log)
    return rows


def costs_of(made: Made) -> Costs | None:
    rows = rows_of(made)
    return costs(rows.steps, rows.tallies, made.step)


def some(**changes: object) -> Costs:
    base = Costs("eagle", 4, 1, 0.0, (), 0.7, 1.0, 10.0, 2.0, {4: 14.0}, tokens=2.7, num_steps=9, num_plain=9)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_costs_are_those_of_the_steps() -> None:
    made = Made()
    made.add("r")
    made.plain("r", steps=5)
    for accepted in (2, 4, 1, 3):
        made.spec_step("r", accepted=accepted)
    found = costs_of(made)
    assert found is not None and found.ready
    assert (found.method, found.k, found.batch, found.temperature) == ("eagle", 4, 1, 1.0)
    assert found.plain_ms == pytest.approx(10.0) and found.draft_ms == 2.0 and found.verify_ms == {4: pytest.approx(14.0)}
    assert found.c == pytest.approx(0.05) and found.v(4) == pytest.approx(1.4) and found.hit == 1
    assert found.a == pytest.approx(10 / (3 + 4 + 2 + 4)) and found.tokens == pytest.approx(14 / 4)
    assert found.today == pytest.approx(3.5 / 1.6)


def test_nothing_is_told_before_there_is_something_to_tell_from() -> None:
    made = Made()
    made.add("r")
    made.plain("r", steps=5)
    assert costs_of(made) is None
    other = Made()
    other.add("r")
    other.spec_step("r")
    found = costs_of(other)
    assert found is not None and not found.ready and "nothing to compare with" in found.missing
    assert "Press Run again with K = 0" in words.verdict(found, []) and "times" not in words.verdict(found, [])
    assert "Press" not in words.verdict(found, [], live=False)


def test_plain_steps_of_another_batch_size_do_not_count() -> None:
    made = Made()
    made.add("a")
    made.add("b")
    made.plain("a", "b", steps=9)
    made.spec_step("a")
    found = costs_of(made)
    assert found is not None and not found.ready


def test_a_batchs_last_steps_do_not_stand_for_the_batch() -> None:
    made = Made()
    for request_id in "abc":
        made.add(request_id)
    made.plain("a", "b", "c", steps=4)
    for _i in range(6):
        made.spec_step("a", "b", "c")
    made.spec_step("c")
    found = costs_of(made)
    assert found is not None and found.ready and found.batch == 3


@pytest.mark.parametrize("a", [0.0, 0.3, 0.7, 0.95])
def test_expected_tokens_are_those_of_a_simulation(a: float) -> None:
    random.seed(1)
    for k in (1, 4, 8):
        total = 0
        for _i in range(20_000):
            n = 0
            while n < k and random.random() < a:
                n += 1
            total += n + 1
        assert some(a=a).expected(k) == pytest.approx(total / 20_000, abs=0.05)
    assert some(a=1.0).expected(5) == 6 and some(a=a).expected(0) == some(a=a).cost(0) == 1


def test_the_curve_is_e_over_c_k_plus_v() -> None:
    found = some()
    assert found.speedup(4) == pytest.approx((1 - 0.7**5) / 0.3 / (0.05 * 4 + 1.4))
    assert found.v(2) == pytest.approx(1.2) and found.v(8) == pytest.approx(1.8)  # on the line through (0, 1) and (4, 1.4)
    assert some(verify_ms={2: 13.0, 4: 14.0}).v(1) == pytest.approx(1.15)
    once = some(method="ngram", draft_ms=1.0)
    assert once.cost(4) == pytest.approx(0.1 + 1.4) and once.cost(2) == pytest.approx(0.1 + 1.2)
    half = some(method="ngram", draft_ms=1.0, hit=0.5)
    assert half.expected(4) == pytest.approx(0.5 * once.expected(4) + 0.5)
    assert half.cost(4) == pytest.approx(0.1 + 0.5 * 1.4 + 0.5)


def test_break_even_and_best_k_are_where_the_curve_says() -> None:
    found = some()
    even = found.break_even
    assert even is not None and found.speedup(4, even) == pytest.approx(1, abs=1e-6) and found.speedup(4, even - 0.01) < 1
    assert found.best_k == max(range(MAX_K + 1), key=lambda k: found.speedup(k))
    hopeless = some(draft_ms=60.0)
    assert hopeless.break_even is None and hopeless.best_k == 0
    said = words.verdict(replace(hopeless, tokens=2.7), [])
    assert "slower now" in said and "not even an acceptance of 100 %" in said and "no K from 1 to 8" in said
    assert "pays now" in words.verdict(found, [])
    assert "makes no difference" in words.verdict(some(tokens=1.6), [])


def test_a_rare_draft_is_said_to_be_rare() -> None:
    assert "only 20 % of the steps" in words.verdict(some(method="ngram", hit=0.2, draft_ms=0.3), [])
    assert "in one go" in words.formula(some(method="ngram", hit=0.2))


# -- the same requests ------------------------------------------------------------------------------------------------------


def both_ways(made: Made, **second: object) -> Made:
    made.add("spec")
    for _i in range(4):
        made.spec_step("spec", accepted=2)
    made.finish("spec")
    made.knob("speculative", {**SPEC, "num_speculative_tokens": 0})
    made.add("plain", **second)  # type: ignore[arg-type]
    made.plain("plain", steps=12)
    made.finish("plain")
    return made


def test_the_same_request_both_ways_gives_the_measured_speed_up() -> None:
    made = both_ways(Made())
    [pair] = paired(rows_of(made).tracks.values(), made.step)
    assert pair.tokens == 12 and pair.ms == pytest.approx(16 / 3) and pair.plain_ms == pytest.approx(10)
    assert pair.speedup == pytest.approx(30 / 16) and pair.setting.k == 4 and pair.num_requests == 1
    found = costs_of(made)
    assert found is not None and pair.fits(found)
    assert "measured on the same requests" in words.verdict(found, [pair])
    assert paired(rows_of(made).tracks.values(), made.step - 3) == []  # it has not ended yet


def test_two_runs_on_a_machine_that_was_not_equally_busy_are_said_to_be() -> None:
    pair = Paired(Setting("eagle", 4), 0.0, 1, 1.0, ms=10.0, plain_ms=8.0, tokens=50)
    said = words.verdict(some(), [pair])
    assert "takes 1.25 times the time" in said and "not equally busy" in said
    assert "not equally busy" not in words.verdict(some(), [replace(pair, plain_ms=16.0)])


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"seed": 4}, {"prompt": "another"}, {"top_p": 0.9}])
def test_requests_that_differ_are_not_compared(change: dict[str, object]) -> None:
    made = both_ways(Made(), **change)
    assert paired(rows_of(made).tracks.values(), made.step) == []


def test_greedy_requests_are_the_same_whatever_seed_the_engine_gave_them() -> None:
    made = Made()
    made.add("spec", temperature=0, seed=1)
    made.spec_step("spec")
    made.finish("spec")
    made.knob("speculative", None)
    made.add("plain", temperature=0, seed=2)
    made.plain("plain", steps=3)
    made.finish("plain")
    assert len(paired(rows_of(made).tracks.values(), made.step)) == 1


def test_a_request_in_company_is_not_compared_with_one_alone() -> None:
    made = Made()
    made.add("spec")
    for _i in range(4):
        made.spec_step("spec")
    made.finish("spec")
    made.knob("speculative", None)
    made.add("plain")
    made.add("other", prompt="x")
    made.plain("plain", "other", steps=9)
    made.finish("plain")
    assert paired(rows_of(made).tracks.values(), made.step) == []


def test_a_request_whose_drafter_changed_is_not_compared() -> None:
    made = Made()
    made.add("spec")
    made.spec_step("spec")
    made.knob("speculative", {**SPEC, "method": "medusa"})
    made.spec_step("spec")
    made.finish("spec")
    made.knob("speculative", None)
    made.add("plain")
    made.plain("plain", steps=3)
    made.finish("plain")
    assert paired(rows_of(made).tracks.values(), made.step) == []


def test_a_time_that_is_not_known_is_a_dash() -> None:
    assert "–" in words.times_html(some(plain_ms=math.nan))
