"""The page's view without a browser: what it shows of a run, what it asks of a session, how scenes are played."""

import json
import time
from typing import Any

import pytest

from engine.events.types import KnobChanged, RequestAdded
from engine.request import SamplingParams
from explorer.base import Clock
from explorer.mirror import Mirror
from explorer.speculation import drafters, scenes, words
from explorer.speculation.settings import Settings
from explorer.speculation.view import SpeculationView
from explorer.store import EventStore
from tests.explorer.speculation.made import SPEC, Made


class Desk:
    """A session in front of ``Made``: it takes knobs and requests at once, and runs nothing by itself."""

    status = "running"

    def __init__(self, made: Made, obedient: bool = True) -> None:
        self.made, self.obedient = made, obedient
        self.calls: list[tuple[Any, ...]] = []
        self.number = 0

    def reconfigure(self, owner: str, **knobs: Any) -> None:
        self.calls.append(("reconfigure", knobs))
        for name, value in knobs.items() if self.obedient else ():
            filled = {"acceptance": "rejection", "tree": None, **value} if name == "speculative" and value else value
            self.made.knob(name, filled)

    def submit(self, prompt: Any, params: SamplingParams, owner: str) -> str:
        self.number += 1
        request_id = f"new-{self.number}"
        self.calls.append(("submit", prompt, params))
        text = prompt if isinstance(prompt, str) else "again"
        ids = [3] * len(text) if isinstance(prompt, str) else list(prompt)
        sampling = {"temperature": params.temperature, "max_tokens": params.max_tokens, "seed": params.seed or 1}
        self.made.emit(
            RequestAdded, request_id=request_id, owner=owner, prompt_token_ids=ids, prompt_text=text, sampling=sampling
        )
        self.made.lengths[request_id] = len(ids)
        self.made.temperatures[request_id] = params.temperature
        return request_id

    def update_sampling(self, request_id: str, owner: str, **changes: Any) -> None:
        self.calls.append(("update_sampling", request_id, changes))

    def notify(self, owner: str, text: str) -> None:
        self.calls.append(("notify", text))

    def asked(self, kind: str) -> list[Any]:
        return [call[1] for call in self.calls if call[0] == kind]


@pytest.fixture
def made() -> Made:
    made = Made()
    made.add("r")
    made.plain("r", steps=4)
    for accepted in (2, 4, 0, 1):
        made.spec_step("r", accepted=accepted)
    return made


def view_of(made: Made, session: Any = None, **selection: Any) -> SpeculationView:
    view = SpeculationView(EventStore(log=made.log), session, Clock(owner="ann"))
    view.clock.param.update(**selection)
    view.update()
    return view


# -- what it shows -----------------------------------------------------------------------------------------------------------


def test_the_newest_draft_is_shown_until_a_token_is_chosen(made: Made) -> None:
    view = view_of(made)
    rounds = view.rows.tracks["r"].rounds
    assert view.player.data["key"] == f"r {rounds[-1].position}" == view.tree.data["key"]
    assert view.ribbon.round == rounds[-1].position and view.ribbon.selected == -1
    view._token_clicked(rounds[0].position + 1)
    view.update()
    assert view.player.data["key"] == f"r {rounds[0].position}" and view.ribbon.selected == rounds[0].position + 1
    view.clock.token_index = 3  # a token of the prompt: no draft is its
    view.update()
    assert view.player.data == {} and view.tree.data == {}


def test_time_goes_back_and_with_it_the_numbers(made: Made) -> None:
    view = view_of(made)
    first = view.rows.tracks["r"].rounds[0]
    view.clock.param.update(live=False, step=first.step)
    view.update()
    assert view.player.data["key"] == f"r {first.position}"
    assert "<td class=num>1</td>" in view.metrics.object and view.figures.here.visible
    view.clock.param.update(live=False, step=first.step - 1)
    view.update()
    assert view.player.data == {} and not view.acceptance.visible and view.no_acceptance.visible and not view.clock_parts.visible


def test_the_figures_hold_what_was_counted(made: Made) -> None:
    view = view_of(made)
    source = view.figures.by_position[0].data
    assert source["accepted"] == [3, 2, 1, 1] and source["proposed"] == [4] * 4
    assert view.figures.by_length[0].data["count"] == [1, 1, 1, 0, 1] and view.figures.by_position[1].data["position"] == []
    assert view.figures.by_step.data["each"] == [1, 1, 1, 1, 3, 5, 1, 2]
    assert view.curve.curve.data["k"] == list(range(9)) and view.curve.curve.data["x"][0] == 1
    assert view.curve.today.location == 4 and view.curve.today.visible


def test_what_comes_later_is_added(made: Made) -> None:
    view = view_of(made)
    before = len(view.ribbon.data["pieces"])
    made.spec_step("r", accepted=3)
    view.update()
    assert len(view.ribbon.data["pieces"]) == before + 4
    assert view.player.data["key"].endswith(str(view.rows.tracks["r"].rounds[-1].position))


def test_an_empty_page_says_what_to_do(made: Made) -> None:
    silent = Made(None)
    live, recorded = view_of(silent, Desk(silent)), view_of(silent)
    assert live.ribbon.data == {} and "Choose a drafter" in live.ribbon.empty
    assert "Choose" not in recorded.ribbon.empty and "plainly" in recorded.ribbon.empty
    assert words.OFF in live.now.object and "The clock needs" in live.verdict.object
    assert recorded.asking is None and recorded.controls() == {}


def test_every_part_goes_through_the_mirror_and_what_a_model_wrote_is_escaped(made: Made) -> None:
    made.add("x", prompt="<script>alert(1)</script>")
    made.spec_step("x")
    view = view_of(made, Desk(made))
    spec = Mirror(view).spec()
    text = json.dumps(spec)
    kinds = {node["kind"] for node in spec["nodes"].values()}
    assert {"canvas", "figure", "html", "steps", "select"} <= kinds
    assert "NaN" not in text and "Infinity" not in text
    assert not any("<script>" in node.get("html", "") for node in spec["nodes"].values())


def test_a_new_engine_clears_the_page(made: Made) -> None:
    store = EventStore(log=made.log)
    view = SpeculationView(store, None, Clock(owner="ann"))
    fresh = Made(None)
    store.append(list(fresh.log))
    view.update()
    assert view.rows.tracks == {} and view.ribbon.data == {} and view.player.data == {} and not view.acceptance.visible


# -- knobs -------------------------------------------------------------------------------------------------------------------


def settings_of(view: SpeculationView) -> Settings:
    assert view.asking is not None
    return view.asking.settings


def test_knobs_show_what_the_engine_has_and_move_it(made: Made) -> None:
    desk = Desk(made)
    view = view_of(made, desk)
    knobs = settings_of(view)
    assert (knobs.drafter.value, knobs.k.value, knobs.tree.value, knobs.acceptance.value) == ("eagle", 4, "chain", "rejection")
    assert desk.calls == [], "showing a value must not send it"
    knobs.k.value = 2
    knobs.tree.value = "narrow"
    assert [knob["speculative"]["num_speculative_tokens"] for knob in desk.asked("reconfigure")] == [2, 2]
    assert desk.asked("reconfigure")[-1]["speculative"]["tree"] == [2] * 8
    knobs.drafter.value = "ngram"
    last = desk.asked("reconfigure")[-1]["speculative"]
    assert last["method"] == "ngram" and last["tree"] is None and last["num_speculative_tokens"] == 2
    knobs.drafter.value = drafters.NONE
    assert desk.asked("reconfigure")[-1] == {"speculative": None}


def test_a_knob_that_was_refused_falls_back(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(made, Desk(made, obedient=False))
    knobs = settings_of(view)
    knobs.k.value = 8
    view.update()
    assert knobs.k.value == 8  # the answer may be on its way
    monkeypatch.setattr(knobs, "_moved_at", time.monotonic() - 5)
    assert view.asking is not None
    view.asking.update(None)
    assert knobs.k.value == 4


def test_somebody_else_moved_it(made: Made) -> None:
    desk = Desk(made)
    view = view_of(made, desk)
    made.emit(KnobChanged, name="speculative", old=SPEC, new={**SPEC, "num_speculative_tokens": 12, "tree": [3, 1]}, by="bob")
    view.update()
    knobs = settings_of(view)
    assert knobs.k.value == 12 and list(knobs.tree.options)[-1] == "3, 1" and desk.calls == []


def test_what_does_not_fit_a_drafter_is_not_asked_of_it() -> None:
    medusa = drafters.wanted(
        {"method": "medusa", "num_speculative_tokens": 3, "acceptance": "typical", "tree": [2, 2]}, choice="ngram"
    )
    assert medusa == {"method": "ngram", "num_speculative_tokens": 3, "acceptance": "rejection", "tree": None}
    untrained = drafters.wanted(None, choice=drafters.UNTRAINED)
    assert untrained is not None and untrained["method"] == "layer_skip" and untrained["trained_exit"] is False
    assert drafters.choice_of(untrained) == drafters.UNTRAINED
    trained = drafters.wanted(untrained, choice="layer_skip")
    assert trained is not None and trained["trained_exit"] is True
    looking = drafters.wanted({"method": "eagle", "num_speculative_tokens": 3, "draft_confidence": 0.5}, lookup=True)
    assert looking is not None and looking["prompt_lookup"] is True
    itself = drafters.wanted(looking, choice="ngram")
    assert itself is not None and "prompt_lookup" not in itself and "draft_confidence" not in itself
    tree = drafters.wanted(looking, tree="wide")  # chains alone stop where they are unsure
    assert tree is not None and tree["prompt_lookup"] is True and "draft_confidence" not in tree
    assert drafters.wanted(looking, choice="rest")["prompt_lookup"] is True  # type: ignore[index]
    kept = drafters.wanted({"method": "eagle", "model": "/a/path", "num_speculative_tokens": 3}, k=5)
    assert kept is not None and kept["model"] == "/a/path" and kept["num_speculative_tokens"] == 5


def test_drafters_of_another_model_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "_target_of", lambda method: "abc" if method == "medusa" else "")
    assert "medusa" in drafters.fitting({"sha256": "abc"}).values()
    there = list(drafters.fitting({"sha256": "other"}).values())
    assert there == [drafters.NONE, "ngram", "lookahead", drafters.UNTRAINED]
    assert list(drafters.fitting({}).values()) == there and drafters.best_choice({}) == "ngram"


def test_the_temperature_reaches_ones_own_running_requests(made: Made) -> None:
    desk = Desk(made)
    view = view_of(made, desk)
    settings_of(view).temperature.value = 1.2
    assert [call for call in desk.calls if call[0] == "update_sampling"] == [("update_sampling", "r", {"temperature": 1.2})]
    assert view.asking is not None
    view.asking._send("a prompt")
    assert desk.calls[-1][0] == "submit" and desk.calls[-1][2].temperature == 1.2


# -- scenes, and the same again ---------------------------------------------------------------------------------------------------


def end_all(made: Made, *request_ids: str, spec: bool) -> None:
    (made.spec_step if spec else made.plain)(*request_ids)
    for request_id in request_ids:
        made.finish(request_id)


def test_a_scene_sets_the_drafter_runs_both_ways_and_can_be_taken_back(made: Made) -> None:
    desk = Desk(made)
    made.finish("r")
    view = view_of(made, desk)
    assert view.asking is not None
    view.asking._scene_clicked("copy")
    view.update()
    assert desk.asked("reconfigure")[0]["speculative"]["method"] == "ngram" and desk.asked("submit") == [scenes.CODE]
    assert view.clock.request_id == "new-1" and view.asking.stage.busy and view.asking.plain.disabled
    end_all(made, "new-1", spec=True)
    view.update()
    assert desk.asked("reconfigure")[1]["speculative"]["num_speculative_tokens"] == 0
    view.update()
    assert desk.asked("submit") == [scenes.CODE] * 2 and view.clock.request_id == "new-1"  # the plain one is not turned to
    end_all(made, "new-2", spec=False)
    for _i in range(3):
        view.update()
    assert desk.asked("reconfigure")[2]["speculative"]["num_speculative_tokens"] == 6  # drafts stay on
    assert not view.asking.stage.busy and "long green ribbons" in view.asking.said.object and view.asking.restore.visible
    assert "n-gram, K = 6" in view.pairs.object
    view.asking.restore.clicks += 1
    assert desk.asked("reconfigure")[-1]["speculative"] == SPEC


def test_the_page_turns_to_a_scene_whose_knobs_are_there_already(made: Made) -> None:
    desk = Desk(made)
    made.knob("speculative", {**SPEC, "method": "ngram", "num_speculative_tokens": 6})
    view = view_of(made, desk)
    assert view.asking is not None
    view.asking._scene_clicked("copy")
    assert desk.asked("submit") == [scenes.CODE] and desk.asked("reconfigure") == []
    view.update()
    assert view.clock.request_id == "new-1"


def test_the_same_again_asks_for_what_was_asked_and_puts_the_knobs_back(made: Made) -> None:
    desk = Desk(made)
    view = view_of(made, desk)
    assert view.asking is not None and view.asking.plain.disabled  # it runs still
    made.finish("r")
    view.update()
    assert not view.asking.plain.disabled
    view.asking.plain.clicks += 1
    view.update()
    [(_kind, prompt, params)] = [call for call in desk.calls if call[0] == "submit"]
    assert prompt == view.rows.tracks["r"].prompt_token_ids and (params.seed, params.temperature) == (3, 1.0)
    end_all(made, "new-1", spec=False)
    for _i in range(3):
        view.update()
    ks = [knob["speculative"]["num_speculative_tokens"] for knob in desk.asked("reconfigure")]
    assert ks == [0, 4] and not view.asking.stage.busy and not view.asking.restore.visible


def test_an_engine_that_takes_no_knob_ends_the_play(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(made, obedient=False)
    view = view_of(made, desk)
    assert view.asking is not None
    view.asking._scene_clicked("copy")
    view.update()
    assert desk.asked("submit") == [] and view.asking.stage.busy
    monkeypatch.setattr(view.asking.stage, "_asked_at", time.monotonic() - 1000)
    view.update()
    assert not view.asking.stage.busy and "did not take speculative" in view.asking.said.object


@pytest.mark.parametrize("key", scenes.SCENES)
def test_every_scene_ends_with_drafts_on_and_has_something_to_compare(key: str) -> None:
    acts = scenes.SCENES[key].acts({"max_num_seqs": 8}, "ngram")
    ks = [act.knobs["speculative"]["num_speculative_tokens"] for act in acts]
    assert ks[-1] > 0 and 0 in ks and not acts[-1].asks
    drafted = [ask for act, k in zip(acts, ks) if k for ask in act.asks]
    assert all(ask in drafted for act, k in zip(acts, ks) if not k for ask in act.asks)
    for act in acts:
        assert len(act.asks) <= act.knobs.get("max_num_seqs", 16)
