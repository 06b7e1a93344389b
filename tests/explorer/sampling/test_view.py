"""The page's view without a browser: what it shows of a recorded run, what it asks of a session."""

import json
from typing import Any

import pytest

from engine.events.log import EventLog
from engine.request import SamplingParams
from explorer.base import Clock
from explorer.mirror import Mirror
from explorer.sampling.scenes import SCENES
from explorer.sampling.view import SamplingView
from explorer.store import EventStore
from tests.engine.engines import tiny_engine


@pytest.fixture(scope="module")
def log() -> EventLog:
    """A drawn request with its logits, one without, a branch, a beam search beside greedy, and a temperature that changes."""
    engine = tiny_engine(max_model_len=128, num_kv_blocks=256)
    engine.watch("tokens", top=12)
    with engine.record() as made:
        drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=10, ignore_eos=True)
        engine.add_request("abc", drawn, request_id="full")
        engine.watch("logits", "full")
        engine.add_request("abc", drawn.changed(seed=4), request_id="part")
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add_request("xyz", greedy, request_id="greedy")
        engine.add_request("xyz", greedy.changed(beam_width=3), request_id="beams")
        for _ in range(5):
            engine.step()
        engine.update_sampling("part", temperature=0.1)
        while engine.has_unfinished():
            engine.step()
        engine.branch("full", 6, 50, branch_id="branch")
        while engine.has_unfinished():
            engine.step()
    engine.close()
    return made


class Desk:
    """A session that only writes down what it is asked."""

    status = "running"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.own: set[str] = set()
        self.number = self.looks = 0

    def submit(self, prompt: Any, params: SamplingParams, owner: str) -> str:
        self.number += 1
        self.calls.append(("submit", prompt, params, owner))
        return f"new-{self.number}"

    def branch(self, source: str, position: int, token: int, owner: str) -> str:
        self.calls.append(("branch", source, position, token, owner))
        return "new-branch"

    def watch_logits(self, request_id: str, owner: str, positions: int) -> None:
        self.calls.append(("watch_logits", request_id, positions))

    def update_sampling(self, request_id: str, owner: str, **changes: Any) -> None:
        self.calls.append(("update_sampling", request_id, owner, changes))

    def look_at_candidates(self, owner: str) -> None:
        self.looks += 1

    def owns(self, request_id: str, owner: str) -> bool:
        return request_id in self.own

    def notify(self, owner: str, text: str) -> None:
        self.calls.append(("notify", owner, text))


def view_of(log: EventLog, session: Any = None, **selection: Any) -> SamplingView:
    view = SamplingView(EventStore(log=log), session, Clock(owner="ann"))
    view.clock.param.update(**selection)
    view.update()
    return view


def test_without_a_selection_the_newest_token_is_followed(log: EventLog) -> None:
    view = view_of(log)
    assert view.strip.data["id"] == "branch"
    assert view.strip.selected == max(view.rows.tracks["branch"].points)
    assert view.picture.data["rows"] and view.choice is not None and not view.choice.derived


def test_a_click_chooses_the_newest_token_too_and_a_second_one_lets_go(log: EventLog) -> None:
    view = view_of(log)
    newest = view.strip.selected
    view.strip.on_select({"position": newest})
    assert (view.clock.request_id, view.clock.token_index) == ("branch", newest)
    view.strip.on_select({"position": newest})
    assert view.clock.token_index is None
    view.strip.on_select({"position": newest - 1})
    view.strip.on_select({"position": newest})
    assert view.clock.token_index == newest
    for bad in (None, -1, True, "3"):
        view.strip.on_select({"position": bad})
    assert view.clock.token_index == newest


def test_the_settings_are_those_with_which_the_token_was_drawn(log: EventLog) -> None:
    before, after = view_of(log, request_id="part", token_index=4), view_of(log, request_id="part", token_index=12)
    assert before.settings.sliders["temperature"].value == 0.9 and after.settings.sliders["temperature"].value == 0.1
    assert [name for name, *_rest in after.picture.data["columns"]] == ["raw", "temperature", "top_p"]


def test_a_knob_recomputes_and_comes_back(log: EventLog) -> None:
    view = view_of(log, request_id="full", token_index=5)
    recorded = view.picture.data
    view.param.update(top_k=2, temperature=1.5)
    view.update()
    rows = view.picture.data["rows"]
    assert sum(not row["removed"] for row in rows) == 2 and {row["removed"] for row in rows} <= {"", "top-k", "top-p"}
    assert view.choice is not None and view.choice.derived and view.choice.exact
    assert f"all {view.rows.vocab_size:,} logits" in view.told_of.object
    view.reset.clicks += 1
    view.update()
    assert view.picture.data == recorded and view.temperature is None


def test_with_candidates_alone_it_says_how_far_it_can_be_trusted(log: EventLog) -> None:
    view = view_of(log, request_id="part", token_index=4)
    assert view.settings.sliders["repetition_penalty"].disabled
    view.temperature = 1.4
    view.update()
    assert "Exact only inside the 12 recorded candidates" in view.told_of.object
    assert view.picture.data["others"][1] is None  # what lies outside is not made up
    view.temperature = None
    view.repetition_penalty = 1.2  # as an address may ask for it
    view.update()
    assert "full logits" in view.told_of.object


def test_time_goes_back(log: EventLog) -> None:
    view = view_of(log)
    track = view.rows.tracks["full"]
    steps = [p.step for p in track.points.values()]
    view.clock.param.update(live=False, step=steps[3], request_id="full")
    view.update()
    assert len(view.strip.data["tokens"]) == 4 and view.strip.selected == 6
    assert len(view.plots.source.data["position"]) == 4
    assert view.below.branches.data == {}  # the branch is still to come
    assert "best beam" not in view.below.sums.object  # nor is the search over


def test_branches_beams_and_pairs_are_there(log: EventLog) -> None:
    view = view_of(log, request_id="branch")
    assert view.below.branches.data["names"] == ["full", "branch"]
    assert "forced to this token" in view.below.pair.object
    assert view.below.beams.data["names"][:3] == ["beam 0", "beam 1", "beam 2"]
    assert "best beam" in view.below.sums.object and "greedy (greedy)" in view.below.sums.object
    view.below._node_chosen(["full", 5])
    assert (view.clock.request_id, view.clock.token_index) == ("full", 5)
    view.below._node_chosen(["nobody", 5])  # what a browser sends is input
    view.below._node_chosen([5, "x"])
    assert view.clock.request_id == "full"


def test_a_beam_search_is_no_request_to_look_into(log: EventLog) -> None:
    view = view_of(log, request_id="beams")
    assert view.strip.data["id"] != "beams" and "beams" not in view.requests.options.values()


def test_what_was_tried_is_made_live_and_run_again(log: EventLog) -> None:
    desk = Desk()
    desk.own = {"full"}
    view = view_of(log, desk, request_id="full", token_index=5)
    assert view.live.disabled and view.again.disabled
    view.top_k = 5
    view.update()
    assert not view.live.disabled and not view.again.disabled
    view.live.clicks += 1
    view.again.clicks += 1
    assert desk.calls[0] == ("update_sampling", "full", "ann", {"top_k": 5})
    kind, prompt, params, owner = desk.calls[1]
    assert (kind, prompt, owner) == ("submit", view.rows.tracks["full"].prompt_token_ids, "ann")
    assert (params.top_k, params.seed, params.temperature, params.top_p) == (5, 3, 0.9, 0.9)
    assert desk.calls[2] == ("watch_logits", "new-1", 10) and view.clock.request_id == "new-1"


def test_the_request_of_somebody_else_is_not_changed(log: EventLog) -> None:
    view = view_of(log, Desk(), request_id="full", token_index=5)
    view.top_k = 5
    view.update()
    assert view.live.disabled and not view.again.disabled


def test_an_alternative_is_branched_to(log: EventLog) -> None:
    desk = Desk()
    view = view_of(log, desk, request_id="full", token_index=5)
    token, _text, p = view.strip.alternatives["items"][0]
    assert 0 < p < 1 and view.strip.alternatives["branch"]
    view.strip.on_branch({"position": 5, "token": token})
    assert desk.calls[0] == ("branch", "full", 5, token, "ann") and view.clock.request_id == "new-branch"
    for bad in ({"position": "5", "token": 1}, {"position": 5}, {"position": -1, "token": 1}):
        view.strip.on_branch(bad)
    assert len([c for c in desk.calls if c[0] == "branch"]) == 1


@pytest.mark.parametrize("key", SCENES)
def test_scenes_send_what_they_say(key: str) -> None:
    desk = Desk()
    view = SamplingView(EventStore(), desk, Clock(owner="ann"))
    view.top_k = 7
    assert view.asking is not None
    view.asking._scene_clicked(key)
    sent = [call for call in desk.calls if call[0] == "submit"]
    assert [(call[1], call[2]) for call in sent] == SCENES[key].requests()
    assert view.clock.request_id == "new-1" and view.top_k is None and SCENES[key].look[:20] in view.asking.said.object
    watched = {call[1] for call in desk.calls if call[0] == "watch_logits"}
    assert watched == {f"new-{i + 1}" for i, call in enumerate(sent) if call[2].beam_width is None}


def test_the_scenes_are_about_one_thing() -> None:
    darts = SCENES["darts"].requests()
    assert {params.seed for _prompt, params in darts} == {7} and {p for p, _ in darts} == {darts[0][0]}
    assert [params.temperature for _prompt, params in darts] == [0.2, 1.0, 2.0]
    loop = SCENES["loop"].requests()
    assert [params.repetition_penalty for _prompt, params in loop] == [1.0, 1.3] and {p.temperature for _, p in loop} == {0}
    assert {params.top_k for _prompt, params in SCENES["top-k"].requests()} == {10}


def test_nothing_recorded_says_what_to_do() -> None:
    live, saved = SamplingView(EventStore(), Desk(), Clock()), SamplingView(EventStore())
    assert "Press one of the scenes" in live.strip.empty and "not watched" in saved.strip.empty
    assert live.picture.data == {} and not live.plots_pane.visible
    assert saved.asking is None


def test_a_page_that_is_opened_late_begins_with_what_is_still_kept(log: EventLog) -> None:
    store = EventStore(log=EventLog(capacity=60))
    store.append(list(log))
    assert store.dropped > 0
    view = SamplingView(store)
    assert view.track is not None and view.rows.vocab_size > 0
    assert view.track.prompt_token_ids == log.at(log.last_step).requests[view.track.request_id].prompt_token_ids


def test_a_new_engine_begins_an_empty_page(log: EventLog) -> None:
    store = EventStore()
    store.append(list(log))
    view = SamplingView(store)
    assert view.choice is not None
    store.append([log.started])
    view.update()
    assert view.choice is None and view.picture.data == {} and view.strip.data == {} and not view.plots_pane.visible


def test_a_mirror_can_draw_every_part(log: EventLog) -> None:
    view = view_of(log, Desk(), request_id="full", token_index=5)
    mirror = Mirror(view)
    kinds = [node["kind"] for node in mirror.spec()["nodes"].values()]
    assert kinds.count("canvas") == 5 and kinds.count("figure") == 1 and kinds.count("slider") == 9
    view.top_k = 3
    view.update()
    assert any(op[1] == "state" and "told" in op[2] for op in mirror.drain())
    mirror.close()


def test_after_the_beam_scene_a_button_leads_to_the_beams(log: EventLog) -> None:
    view = view_of(log, Desk())
    button = view.asking.to_beams
    view.asking._scene_clicked("loop")
    assert not button.visible
    view.asking._scene_clicked("beams")
    assert button.visible and "the card Beams, the last of this page" in view.asking.said.object
    with view.lock:
        button.clicks += 1
    assert view.below.beams.look == 1 and view.below.search.value == "beams"
    view.asking._scene_clicked("top-k")
    assert not button.visible


def test_a_recorded_run_is_told_nothing_of_what_only_an_engine_can_do(log: EventLog) -> None:
    store = EventStore(log=log)
    for clock in (Clock(), Clock(live=False, step=0)):
        spec = json.dumps(Mirror(SamplingView(store, None, clock)).spec(), default=str, ensure_ascii=False)
        assert "step of the recorded run" in spec
        for absent in ("Press one", "Press the scene", "Run again so", "Click an alternative", "Branch: force", "send "):
            assert absent not in spec, absent
    assert "Click an alternative" in json.dumps(Mirror(SamplingView(store, Desk())).spec(), default=str)


def test_the_plots_are_there_again_after_a_step_without_tokens(log: EventLog) -> None:
    clock = Clock(live=False, step=6)
    view = SamplingView(EventStore(log=log), None, clock)
    for step in (0, 6, 0, 7):
        clock.goto(step, 0, 99)
        view.update()
        assert view.plots_pane.visible == (step > 0) and view.plots.root.visible, step
