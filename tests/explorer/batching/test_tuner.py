"""The Tuner tab: its points, its words, and a search that it starts, cancels and makes live."""

import functools
import html
import time
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.events.types import KnobChanged
from engine.load.arrivals import Burst, Poisson
from engine.load.generate import make_load
from engine.load.replay import Replayed
from engine.measures import Limits
from engine.tuning.result import Trial, Tuning
from engine.tuning.search import Budget, Search
from explorer.batching.tuner import TunerPanel
from explorer.batching.tuner_figure import LEGEND, LOOKS, FrontFigure
from explorer.batching.tuner_rows import LOADS, limit_ms, live_knobs, load_of, points_of, progress, staircase
from explorer.batching.tuner_words import progress_html, trial_html, trials_table, verdict_html
from explorer.batching.whatif_rows import Setting
from explorer.tuner import Tuner
from tests.engine.tuning.fake import LIMITS, LOAD, SPACE, Inline, measured, run
from tests.explorer.batching.whatif_made import BLOCKS, Made, View

HOSTILE = "<script>alert(1)</script>"


def trial(number: int, tokens_per_s: float, itl_s: float, ttft_s: float = 0.5, **more: Any) -> Trial:
    knobs = {"max_num_seqs": 8 + number, "enable_chunked_prefill": True}
    config = EngineConfig(max_num_seqs=8 + number)
    return Trial(number, knobs, config, "done", measured(ttft_s, itl_s, tokens_per_s, LIMITS), seconds=2.0, **more)


FOUND = Tuning(
    (
        trial(0, 100, 0.030),
        trial(1, 200, 0.040),
        trial(2, 90, 0.035),  # dominated in both
        trial(3, 50, 0.010, ttft_s=3.0),
        Trial(4, {"max_num_seqs": 12}, EngineConfig(max_num_seqs=12), "failed", reason=HOSTILE, seconds=1.0),
        trial(5, 300, 0.200),  # beyond the limit on TPOT
        trial(6, 110, 0.030, again=0),
        trial(7, 180, 0.040, again=1),
    ),
    LIMITS,
    stopped="trials",
    seconds=16.0,
)


def test_points_and_the_front_of_the_two_measures_that_are_drawn() -> None:
    points = points_of(FOUND, "itl_p99", "output_throughput")
    assert [(p.number, p.kind, p.on_front) for p in points] == [
        (0, "default", True), (1, "chosen", True), (2, "dominated", False), (3, "front", True), (5, "front", True),
    ]  # fmt: skip
    assert points[1].x == pytest.approx(40) and points[1].y == pytest.approx(200)
    xs, ys = staircase(points)
    assert xs == pytest.approx([10, 30, 30, 40, 40, 200, 200]) and ys == pytest.approx([50, 50, 100, 100, 200, 200, 300])
    by_ttft = {p.number: p.on_front for p in points_of(FOUND, "ttft_p99", "output_throughput")}
    assert by_ttft == {0: False, 1: False, 2: False, 3: False, 5: True}
    assert [limit_ms(LIMITS, name) for name in ("ttft_p99", "itl_p99", "tpot_p99", "e2e_p99")] == [1000, 50, 50, None]


def test_the_figure_draws_them_with_the_limit_and_keeps_the_mark() -> None:
    figure = FrontFigure()
    points = points_of(FOUND, "itl_p99", "output_throughput")
    figure.show(points, "p99 ITL", "tokens/s", 50.0)
    data = figure.source.data
    assert data["number"][-1] == 1 and data["marker"][-1] == "star" and sorted(data["number"]) == [0, 1, 2, 3, 5]
    assert dict(zip(data["number"], data["colour"]))[2] == LOOKS["dominated"][1]
    assert figure.limit.visible and figure.limit.location == 50.0 and figure.plot.x_range.end > 200
    figure.mark(3)
    assert figure.number_at(figure.source.selected.indices[0]) == 3 and figure.number_at(99) is None
    figure.show(points, "p99 ITL", "tokens/s", 5000.0)
    assert not figure.limit.visible  # far away: it would press the points together
    figure.show([], "p99 ITL", "tokens/s", None)
    assert list(figure.front.data["x"]) == [] and {kind for kind, _c, _l in LEGEND} == {*LOOKS, "limit"}


def test_the_words_say_what_was_gained_and_escape_reasons() -> None:
    said = verdict_html(FOUND)
    # 12 requests of 9 tokens: 110 tokens/s are 12.2 requests/s, 180 are 20
    assert "Goodput, requests/s: 12.2 as it is, 20.0 with the best one (× 1.64)" in said and "measured again, in 1 pair" in said
    table = trials_table(FOUND)
    assert (
        HOSTILE not in table and html.escape(HOSTILE) in table and "0 again" in table and "1 ★" in table and "as it is" in table
    )
    assert "within the limits" in trial_html(FOUND, FOUND.trials[1]) and "batch size 9" in trial_html(FOUND, FOUND.trials[1])
    alone = Tuning(FOUND.trials[:1], LIMITS, stopped="cancelled")
    assert "Nothing was better" in verdict_html(alone) and "cancelled" in verdict_html(alone)
    nothing = Tuning((Trial(0, {}, EngineConfig(), "failed", reason=HOSTILE),), LIMITS, stopped="trials")
    assert html.escape(HOSTILE) in verdict_html(nothing) and "Nothing was measured" in verdict_html(nothing)
    strict = Tuning((trial(0, 100, 0.2),), Limits(tpot_s=0.001), stopped="trials")
    assert "No configuration kept the limits" in verdict_html(
        Tuning((Trial(0, {}, EngineConfig(), "done", measured(0.1, 0.2, 9, strict.limits)),), strict.limits, stopped="trials")
    )
    assert "OSError" in verdict_html(FOUND, "OSError: no disk")


def test_progress_is_of_the_budget_that_is_spent_first() -> None:
    going = Tuning((*FOUND.trials[:5], Trial(5, {"max_num_seqs": 4}, EngineConfig())), LIMITS, seconds=30.0)
    assert progress(going, Budget(trials=10)) == 0.5 and progress(going, Budget(trials=10, seconds=40)) == 0.75
    assert progress(FOUND, Budget(trials=100)) == 1.0
    said = progress_html(going, Budget(trials=10, seconds=40), False)
    assert (
        "5 of at most 10 trials, 30 s of at most 40 s; 1 failed" in said
        and "Now: batch size 4" in said
        and "Somebody else" in said
    )


def test_the_loads_are_what_they_are_called() -> None:
    for kind in LOADS.keys() - {"recorded"}:
        load = load_of(kind, 4, 8, 1)
        made = make_load(load)
        assert len(made) == 8 and load.arrivals == (Burst() if kind == "burst" else Poisson(4))
        assert all(len(a.token_ids) + a.max_tokens < 512 for a in made)
    with pytest.raises(ValueError, match="No request has ended here yet"):
        load_of("recorded", 4, 8, 1)


def test_what_a_running_engine_is_told() -> None:
    now = EngineConfig(num_kv_blocks=512).as_dict()
    config = EngineConfig(
        max_num_seqs=32, block_size=32, num_kv_blocks=128, enable_chunked_prefill=True, max_num_batched_tokens=512
    )
    knobs = {
        "max_num_seqs": 32,
        "block_size": 32,
        "pool_share": 0.5,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 512,
    }
    asked = live_knobs(Trial(1, knobs, config), now)
    assert asked == {"max_num_seqs": 32, "block_size": 32, "num_kv_blocks": 128}
    assert live_knobs(Trial(0, {"max_num_seqs": 8}, EngineConfig()), now) == {}  # its pool is the engine's own choice


# -- the panel ------------------------------------------------------------------------------------------------------------------


def tab(**how: Any) -> tuple[View, TunerPanel, Tuner]:
    view = View()
    view.session.tuner = tuner = Tuner(functools.partial(Search, **{"space": SPACE, "executor": Inline(), "measure": run, **how}))
    panel = TunerPanel(view)
    made = Made(Setting(num_kv_blocks=BLOCKS)).load([Replayed(0.0, 11, 5), Replayed(0.1, 7, 3)])
    view.give(panel, *made.events)
    return view, panel, tuner


def ended(panel: TunerPanel, tuner: Tuner) -> None:
    end = time.monotonic() + 30
    while tuner.busy and time.monotonic() < end:
        panel.update()
        time.sleep(0.01)
    assert not tuner.busy
    panel.update()


def test_a_search_from_the_page_to_the_live_engine() -> None:
    view, panel, tuner = tab()
    assert panel.nothing.visible and not panel.drawn.visible and "Nothing was searched yet" in panel.nothing.object
    panel.trials.value, panel.requests.value, panel.tpot.value = 24, 4, 50
    panel.begin.clicks += 1
    ended(panel, tuner)
    found = tuner.found
    assert found is not None and len(found.trials) == 24 and found.limits == LIMITS and tuner.owner == "ann"
    assert found.trials[0].config.num_kv_blocks == BLOCKS and found.trials[0].config.max_model_len == 2048  # the running engine's
    assert panel.drawn.visible and panel.begin.visible and not panel.cancel.visible
    assert html.escape(found.text) in panel.text.object and "measured again" in panel.state.object
    numbers = list(panel.figure.source.data["number"])
    assert len(numbers) == 22 and panel.rows.object.count("<tr") == 25
    panel.live.clicks += 1
    ((args, knobs),) = view.session.of("reconfigure")
    assert args == ("ann",) and knobs == live_knobs(found.chosen, panel.history.knobs) and "max_num_seqs" in knobs
    assert "for everybody who is here" in panel.made.object
    # a tapped trial is shown instead, and stays so when the axes change
    panel.figure.source.selected.indices = [numbers.index(0)]
    assert panel.trial.number == 0 and "max_num_seqs" not in panel.text.object
    panel.latency.value = "ttft_p99"
    assert panel.trial.number == 0 and panel.figure.source.selected.indices == [list(panel.figure.source.data["number"]).index(0)]
    panel.live.clicks += 1
    assert len(view.session.of("reconfigure")) == 1 and "runs so already" in panel.made.object
    view.give(panel, KnobChanged(step=9, time_ns=9, name="max_num_seqs", old=8, new=5, by="bob"))
    panel.live.clicks += 1
    assert view.session.of("reconfigure")[-1][1] == {"max_num_seqs": 8}


def test_the_newest_load_can_be_searched_for_and_another_search_draws_anew() -> None:
    _view, panel, tuner = tab()
    tasks = tuner.make.keywords["executor"].tasks
    panel.load.value, panel.trials.value = "recorded", 3
    for _ in range(2):
        panel.begin.clicks += 1
        ended(panel, tuner)
    first, second = tasks[0].load, tasks[-1].load
    assert first.prompt.values == (11, 7) and first.output.values == (5, 3) and (first.seed, second.seed) == (0, 1)


def test_what_cannot_be_searched_is_said() -> None:
    view = View()
    view.session.tuner = Tuner(functools.partial(Search, executor=Inline(), measure=run))
    panel = TunerPanel(view)
    panel.load.value = "recorded"
    panel.begin.clicks += 1
    assert "No request has ended here yet" in panel.state.object and view.session.tuner.found is None
    recorded = TunerPanel(View(live=False))
    recorded.update()
    assert "python -m engine.tuning" in recorded.nothing.object


class Waiting(Inline):
    """Its trials never end."""

    def submit(self, task: Any, seconds: float | None) -> Any:
        from concurrent.futures import Future

        return Future()


def test_only_who_started_it_may_cancel_it_and_there_is_one_at_a_time() -> None:
    view, panel, tuner = tab(executor=Waiting())
    panel.begin.clicks += 1
    assert tuner.busy and panel.cancel.visible and not panel.begin.visible and "0 of at most 12 trials" in panel.state.object
    view.clock.owner, mine = "bob", view.clock.owner
    other = TunerPanel(view)
    other.update()
    assert not other.cancel.visible and "Somebody else" in other.state.object
    assert "One at a time" in tuner.start("bob", LOAD, LIMITS, EngineConfig(), Budget())
    tuner.cancel("bob")
    time.sleep(0.2)
    assert tuner.busy
    tuner.cancel(mine)  # also what the session does when they leave
    ended(panel, tuner)
    assert tuner.found.stopped == "cancelled" and "cancelled" in panel.state.object


def test_a_search_that_breaks_is_told() -> None:
    class Broken(Inline):
        def submit(self, task: Any, seconds: float | None) -> Any:
            raise OSError("no <disk>")

    _view, panel, tuner = tab(executor=Broken())
    panel.begin.clicks += 1
    ended(panel, tuner)
    assert "OSError: no &lt;disk&gt;" in panel.state.object and panel.begin.visible
    tuner.stop()
