from typing import Any

import pytest

from engine.events.types import TokenSampled
from explorer.base import Clock
from explorer.run.figure import COLUMNS, MAX_LABELS, PHASES, WINDOW, gantt_columns, ranges
from explorer.run.rows import Bar
from explorer.run.view import GAUGES, RunView
from explorer.status import COST_STEPS
from tests.explorer.conftest import Desk


class Wire:
    """A view with a browser that is ready, and what was sent to it."""

    def __init__(self, desk: Desk, **clock: Any) -> None:
        owner = desk.session.join()
        self.view = RunView(desk.store, desk.session, Clock(owner=owner, **clock))
        self.ops: list[list[Any]] = []
        self.points: list[dict[str, Any]] = []
        self.view.answers.cards.send = lambda message: self.ops.extend(message["ops"])  # type: ignore[method-assign]
        self.view.gauges.send = self.points.append  # type: ignore[method-assign]
        self.view.answers.cards.action = {"seq": 1, "kind": "ready"}
        self.view.gauges.action = {"seq": 1, "kind": "ready"}
        self.view.update()
        self.ops.clear()
        self.points.clear()

    def update(self) -> list[list[Any]]:
        """The operations that one update sends."""
        self.ops.clear()
        self.view.update()
        return list(self.ops)

    def named(self, name: str) -> list[list[Any]]:
        return [op for op in self.ops if op[0] == name]


@pytest.fixture
def wire(desk: Desk) -> Wire:
    return Wire(desk)


def test_a_request_becomes_a_card_with_its_tokens(desk: Desk, wire: Wire) -> None:
    desk.send(wire.view.clock.owner, max_tokens=50)
    desk.run(3)
    wire.update()
    (card,) = wire.named("request")
    assert card[1]["who"] == "you" and card[1]["mine"]
    (tokens,) = wire.named("tokens")
    assert len(tokens[2]) == 3
    assert wire.named("status")[-1][2:] == ["3 tokens", True, False, True]


def test_others_requests_cannot_be_stopped_from_here(desk: Desk, wire: Wire) -> None:
    desk.send("guest-9", max_tokens=50)
    desk.run()
    wire.update()
    assert wire.named("request")[0][1]["mine"] is False
    wire.view.answers.cards.action = {"seq": 2, "kind": "stop", "id": "r0"}
    assert ("abort", "r0") not in desk.process.calls


def test_stop_aborts_ones_own(desk: Desk, wire: Wire) -> None:
    desk.send(wire.view.clock.owner, max_tokens=50)
    desk.run()
    wire.update()
    wire.view.answers.cards.action = {"seq": 2, "kind": "stop", "id": "r0"}
    desk.deliver()
    wire.update()
    assert wire.named("status")[-1][2:4] == ["1 token · stopped", False]


def test_a_request_that_has_ended_since_has_no_stop_button_in_the_past(desk: Desk, wire: Wire) -> None:
    owner = wire.view.clock.owner
    desk.send(owner, max_tokens=6)
    desk.send(owner, max_tokens=50)
    desk.run(4)
    wire.view.clock.goto(2, 1, 4)
    wire.update()
    assert {op[1]: op[3] for op in wire.named("status")} == {"r0": True, "r1": True}
    desk.run(4)  # r0 ends while step 2 is looked at
    wire.update()
    assert [op[1:4] for op in wire.named("status")] == [["r0", "2 tokens", False]]
    wire.view.clock.goto(3, 1, 8)
    wire.update()
    assert {op[1]: op[3] for op in wire.named("status")} == {"r0": False, "r1": True}


def test_only_differences_travel_and_nothing_when_nothing_happened(desk: Desk, wire: Wire) -> None:
    desk.send(max_tokens=50)
    desk.run(20)
    wire.update()
    assert wire.update() == [] and len(wire.points) == 1
    bars = len(wire.view.sources["decode"].data["step"])
    desk.run(2)
    wire.update()
    assert [len(op[2]) for op in wire.named("tokens")] == [2] and not wire.named("request")
    assert len(wire.view.sources["decode"].data["step"]) == bars + 2
    assert {len(p) for p in wire.points[-1]["points"].values()} == {2}


def test_a_browser_that_draws_again_gets_everything(desk: Desk, wire: Wire) -> None:
    desk.send(max_tokens=50)
    desk.run(5)
    wire.update()
    wire.ops.clear()
    wire.view.answers.cards.action = {"seq": 9, "kind": "ready"}
    wire.update()
    assert wire.ops[0] == ["reset"]
    assert len(wire.named("tokens")[0][2]) == 5


def test_paused_the_screen_stays_at_its_step_and_the_past_is_as_it_was(desk: Desk, wire: Wire) -> None:
    desk.send(max_tokens=50)
    desk.run(3)
    desk.send("guest-9", max_tokens=50)
    desk.run(5)
    wire.update()
    wire.view.clock.goto(2, 1, 8)
    wire.update()
    assert wire.named("step") == [["step", 2]]
    statuses = {op[1]: op[2:] for op in wire.named("status")}
    assert statuses["r0"] == ["2 tokens", True, False, True]
    assert statuses["r1"][-1] is False  # it had not arrived: its card is hidden
    assert wire.points[-1]["reset"] and wire.points[-1]["points"]["batch"][-1][:2] == [2, 1.0]
    assert wire.view._here.visible and wire.view._here.location == 2
    desk.run(4)
    wire.update()
    assert not wire.named("status")  # the engine runs on, this view does not
    wire.view.clock.follow()
    wire.update()
    assert wire.named("step") == [["step", None]]
    assert {op[1]: op[2] for op in wire.named("status")} == {"r0": "12 tokens", "r1": "9 tokens"}


def test_text_of_users_and_models_travels_as_data(desk: Desk, wire: Wire) -> None:
    evil = "<script>alert(1)</script>"
    (request_id,) = desk.send(wire.view.clock.owner, prompt=evil * 2000, max_tokens=50)
    desk.run()
    last = desk.store.since(0).events[-1]
    token = TokenSampled(
        step=last.step, time_ns=0, request_id=request_id, position=99, index=1, token_id=1, text=evil, logprob=-1.0, rank=1, u=None,
        prob=1.0, nucleus_size=0, nucleus_mass=1.0, entropy=0.0,
    )  # fmt: skip
    desk.store.append([token])
    wire.update()
    assert wire.named("tokens")[0][2][-1][1] == evil  # tokens.js puts it into textContent; tests/ui looks at the page
    prompt = wire.named("request")[0][1]["prompt"]
    assert len(prompt) < 5000 and "50,000 characters" in prompt


def test_selection_is_shared_and_a_second_click_takes_it_away(desk: Desk, wire: Wire) -> None:
    desk.send(max_tokens=9)
    desk.run(3)
    wire.update()
    clock, answers = wire.view.clock, wire.view.answers
    answers.select("r0", None)
    assert clock.request_id == "r0" and wire.ops[-1] == ["select", "r0", None]
    answers.select("r0", None)
    assert clock.request_id is None
    answers.cards.action = {"seq": 4, "kind": "select", "id": "r0", "index": 8}
    assert (clock.request_id, clock.token_index) == ("r0", 8)
    answers.cards.action = {"seq": 5, "kind": "select", "id": {"not": "text"}, "index": "8"}
    assert (clock.request_id, clock.token_index) == ("r0", 8)


def test_a_click_on_a_bar_selects_its_request(desk: Desk, wire: Wire) -> None:
    from bokeh.events import DoubleTap, Tap

    desk.send(count=2, max_tokens=9)
    desk.run(4)
    wire.update()
    wire.view._tapped(Tap(wire.view.plot, x=2.2, y=0.9))
    assert wire.view.clock.request_id == "r1"
    wire.view._tapped(Tap(wire.view.plot, x=90, y=5))
    assert wire.view.clock.request_id is None
    wire.view._double_tapped(DoubleTap(wire.view.plot, x=3.4, y=0))
    assert (wire.view.clock.live, wire.view.clock.step) == (False, 3)


def test_a_new_engine_clears_the_page(desk: Desk, wire: Wire) -> None:
    desk.send(max_tokens=9)
    desk.run(3)
    wire.update()
    desk.process.restart()
    desk.deliver()
    assert wire.update()[0] == ["reset"] and not wire.named("request")
    assert not any(len(source.data["step"]) for source in wire.view.sources.values())


def test_a_saved_run_needs_no_session(desk: Desk, tmp_path: Any) -> None:
    from explorer.store import EventStore

    desk.send(max_tokens=9)
    desk.run(5)
    desk.store.save(tmp_path / "run.cutaway")
    view = RunView(EventStore.load(tmp_path / "run.cutaway"))
    assert view.composer is None and len(view.rows.requests) == 1


# -- the prompt box ---------------------------------------------------------------------------------------------------------


def test_presets_fill_the_box_and_send_as_many_as_they_say(desk: Desk, wire: Wire) -> None:
    composer = wire.view.composer
    assert composer is not None
    composer.preset.value = "shared"
    composer.submit()
    desk.deliver()
    prompts = [view.prompt_text for view in desk.store.latest().requests.values()]
    assert len(prompts) == 16 == len(set(prompts))
    assert len({p[:1000] for p in prompts}) == 1  # the long beginning is the same


def test_a_fixed_seed_counts_up_over_the_copies(wire: Wire) -> None:
    composer = wire.view.composer
    assert composer is not None
    composer.seed.value = " 41 "
    assert [composer.params(copy).seed for copy in (0, 1)] == [41, 42]
    composer.seed.value = ""
    assert composer.params(3).seed is None


@pytest.mark.parametrize(
    ("prompt", "seed", "message"),
    [
        ("", "", "prompt is empty"),
        (" \n\t", "", "prompt is empty"),
        ("hello", "-3", "seed must be"),
        ("hello", "9" * 30, r"seed must be"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said_once_and_nothing_is_sent(
    desk: Desk, wire: Wire, prompt: str, seed: str, message: str
) -> None:
    composer = wire.view.composer
    assert composer is not None
    composer.prompt.value, composer.seed.value = prompt, seed
    composer.submit()
    desk.deliver()
    (notice,) = desk.session.take_notices(wire.view.clock.owner)
    assert message in notice
    assert not desk.store.latest().requests


def test_temperature_and_top_p_reach_ones_own_running_requests(desk: Desk, wire: Wire) -> None:
    composer = wire.view.composer
    assert composer is not None
    desk.send(wire.view.clock.owner, max_tokens=50)
    desk.send("guest-9", max_tokens=50)
    desk.run()
    wire.update()
    composer.temperature.value, composer.top_p.value = 1.5, 0.5
    changes = [call[1] for call in desk.process.calls if call[0] == "update_sampling"]
    assert changes == [("r0", {"temperature": 1.5}), ("r0", {"top_p": 0.5})]
    assert not composer.stop.disabled
    composer.stop_mine()
    desk.deliver()
    wire.update()
    assert [v.owner for v in desk.store.latest().live] == ["guest-9"] and composer.stop.disabled


# -- the figure -------------------------------------------------------------------------------------------------------------


def test_columns_have_one_row_a_bar() -> None:
    bars = [
        Bar(k, f"r{k}", "o", 5, phase, 16, n, 7.25)
        for k, (phase, n) in enumerate([("waiting", 0), ("prefill", 8), ("decode", 1)])
    ]
    columns = gantt_columns(bars)
    assert {phase: columns[phase]["ordinal"] for phase in PHASES} == {
        "waiting": [0],
        "prefill": [1],
        "decode": [2],
        "preempted": [],
    }
    assert columns["prefill"]["tokens"] == ["8 (position 16–23)"] and columns["decode"]["tokens"] == ["1 (position 16)"]
    assert columns["decode"]["ms"] == ["7.25 ms"]
    assert all(set(c) == set(COLUMNS) for c in columns.values())


def test_the_window_follows_the_newest_step_and_labels_stay_few() -> None:
    bars = [Bar(k, f"r{k}", "o", 900, "decode", 0, 1, 1.0) for k in range(3, 90)]
    (left, right), (bottom, top), labelled = ranges(bars, 900)
    assert right - left == WINDOW and right == 900.5
    assert bottom > 89 and top < 3  # downwards
    assert len(labelled) <= MAX_LABELS + 1


def test_the_axis_of_a_short_run_fits_it() -> None:
    assert [ranges([], last)[0] for last in (0, 20, 21, 65, 160, 161)] == [
        (0.5, 20.5), (0.5, 20.5), (0.5, 40.5), (0.5, 80.5), (0.5, 160.5), (1.5, 161.5),
    ]  # fmt: skip


def test_gauges_say_when_they_are_taken() -> None:
    hints = {gauge.key: gauge.hint for gauge in GAUGES}
    assert "during this step" in hints["batch"] and "after this step" in hints["kv_use"]
    assert "one step" in hints["watching"] and f"average of the newest {COST_STEPS} steps" in hints["watching"]


def test_ctrl_enter_sends_what_stands_in_the_box(desk: Desk, wire: Wire) -> None:
    composer = wire.view.composer
    assert composer is not None
    composer.prompt.action = {"seq": 1, "kind": "submit", "text": "typed just now"}
    desk.deliver()
    assert [view.prompt_text for view in desk.store.latest().requests.values()] == ["typed just now"]


def test_a_text_that_the_box_refused_is_told_with_its_length(desk: Desk, wire: Wire) -> None:
    composer = wire.view.composer
    assert composer is not None
    composer.prompt.action = {"seq": 1, "kind": "too_long", "length": 5_000_000}
    (notice,) = desk.session.take_notices(wire.view.clock.owner)
    assert "5,000,000 characters" in notice and "1,000,000" in notice
