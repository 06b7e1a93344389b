import pytest

from explorer import knobs
from explorer.knobs import KNOBS, KnobPanel
from tests.explorer.conftest import Desk

NAMES = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")


def panels(desk: Desk) -> tuple[KnobPanel, KnobPanel]:
    pair = (KnobPanel(desk.session, desk.session.join(), NAMES), KnobPanel(desk.session, desk.session.join(), NAMES))
    for panel in pair:
        panel.sync(desk.store.latest())
    return pair


def reconfigured(desk: Desk) -> list[dict[str, object]]:
    return [call[1][1] for call in desk.process.calls if call[0] == "reconfigure"]


def test_knobs_show_what_the_engine_has(desk: Desk) -> None:
    panel, _ = panels(desk)
    assert {name: widget.value for name, widget in panel.widgets.items()} == {
        "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": True,
    }  # fmt: skip
    assert reconfigured(desk) == []  # showing is not moving


def test_a_value_between_the_stops_becomes_a_stop(make_desk: type[Desk]) -> None:
    panel, _ = panels(make_desk(max_num_seqs=5))
    assert panel.widgets["max_num_seqs"].value == 5


def test_two_tabs_move_the_same_knob_and_both_show_the_engines_value(desk: Desk) -> None:
    first, second = panels(desk)
    first.widgets["max_num_seqs"].value = 2
    second.widgets["max_num_seqs"].value = 16
    desk.deliver()
    for panel in (first, second):
        panel._moved.clear()  # as after SETTLE_S
        panel.sync(desk.store.latest())
    assert reconfigured(desk) == [{"max_num_seqs": 2}, {"max_num_seqs": 16}]
    assert desk.store.latest().knobs["max_num_seqs"] == 16
    assert first.widgets["max_num_seqs"].value == second.widgets["max_num_seqs"].value == 16


def test_a_knob_being_dragged_does_not_jump_back_to_an_older_answer(desk: Desk) -> None:
    panel, _ = panels(desk)
    panel.widgets["max_num_seqs"].value = 4
    panel.sync(desk.store.latest())  # the engine has not answered yet
    assert panel.widgets["max_num_seqs"].value == 4 and panel.unsettled
    desk.deliver()
    panel.sync(desk.store.latest())
    assert panel.widgets["max_num_seqs"].value == 4 and not panel.unsettled


def test_a_refused_knob_falls_back_to_what_the_engine_has(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    panel, _ = panels(desk)
    monkeypatch.setattr(desk.process, "reconfigure", lambda **_: None)
    monkeypatch.setattr(knobs, "SETTLE_S", 0.0)
    panel.widgets["max_num_seqs"].value = 64
    panel.sync(desk.store.latest())
    assert panel.widgets["max_num_seqs"].value == 8


def test_without_an_engine_nothing_can_be_moved(desk: Desk) -> None:
    from engine.events.state import State

    panel, _ = panels(desk)
    panel.sync(State())
    assert all(widget.disabled for widget in panel.widgets.values())


def test_every_knob_says_its_name_and_what_it_does() -> None:
    for knob in KNOBS.values():
        assert knob.label and knob.hint.endswith(".")


# -- drop-downs -------------------------------------------------------------------------------------------------------------

WEIGHTS = ("quantization", "quantization_group_size", "kv_cache_dtype")


def shown(panel: KnobPanel, **knobs: object) -> dict[str, tuple[object, bool]]:
    from engine.events.state import State

    state = State()
    state.draining = dict(knobs.pop("draining", {}))  # type: ignore[call-overload]
    state.knobs = {"quantization": None, "quantization_group_size": None, "kv_cache_dtype": "auto", **knobs}
    panel._moved.clear()  # as after SETTLE_S
    panel.sync(state)
    return {name: (widget.value, widget.disabled) for name, widget in panel.widgets.items()}


def test_weights_and_kv_cache_are_chosen_from_lists(desk: Desk) -> None:
    panel = KnobPanel(desk.session, "ann", WEIGHTS)
    assert shown(panel) == {"quantization": ("", False), "quantization_group_size": ("", True), "kv_cache_dtype": ("auto", False)}
    assert next(iter(panel.widgets["quantization"].options)) == "not rounded"
    found = shown(panel, quantization="nf4", quantization_group_size=64, kv_cache_dtype="int4")
    assert found == {"quantization": ("nf4", False), "quantization_group_size": ("64", False), "kv_cache_dtype": ("int4", False)}
    assert reconfigured(desk) == []
    panel.widgets["quantization_group_size"].value = "32"
    panel.widgets["quantization"].value = ""  # 16 bits
    panel.widgets["kv_cache_dtype"].value = "fp8"
    assert reconfigured(desk) == [{"quantization_group_size": 32}, {"quantization": None}, {"kv_cache_dtype": "fp8"}]


def test_a_group_size_from_elsewhere_is_one_of_the_choices(desk: Desk) -> None:
    panel = KnobPanel(desk.session, "ann", WEIGHTS)
    assert shown(panel, quantization="int4", quantization_group_size=48)["quantization_group_size"] == ("48", False)


def test_weights_that_are_being_made_show_where_they_go(desk: Desk) -> None:
    panel = KnobPanel(desk.session, "ann", WEIGHTS)
    assert shown(panel, draining={"quantization": "gptq"})["quantization"] == ("gptq", False)
    assert panel._note.visible and "being made" in panel._note.object
    shown(panel, quantization="gptq", quantization_group_size=64)
    assert not panel._note.visible


def test_every_method_and_dtype_of_the_engine_can_be_chosen() -> None:
    from engine.config import EngineConfig
    from engine.quantization.base import METHODS

    assert {value for _label, value in KNOBS["quantization"].choices} == {None, *METHODS}
    for name in WEIGHTS:
        for _label, value in KNOBS[name].choices:
            more = {"quantization": "int4"} if name == "quantization_group_size" else {}
            assert getattr(EngineConfig(**{**more, name: value}), name) == value
            assert KNOBS[name].meant(KNOBS[name].shown(value)) == value
