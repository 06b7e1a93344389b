"""The page's view without a browser and without processes: what it shows, what it asks for."""

import json
from typing import Any

import pytest

from engine.events.types import EngineStarted, Run, StepDone
from explorer.attention import view as views
from explorer.attention import words
from explorer.attention.scenes import SCENES
from explorer.attention.shape import Shape
from explorer.attention.view import KNOBS, TABS, AttentionView
from explorer.base import Clock
from explorer.mirror import Mirror
from explorer.store import EventStore
from explorer.theme import in_file
from tests.explorer.attention.made import traced
from tests.explorer.attention.test_memory import report

GOOD = {
    **report(), "spills": 3, "instructions": {"FFMA": 90, "HGMMA": 16, "LDGSTS": 32, "STL": 3}, "seconds": 3.2, "cached": False,
    "versions": {"triton": "3.7.1"},
}  # fmt: skip


class FakeLab:
    """Answers with ``answer``; None: not yet."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []

    def ask(self, who: str, shape: Shape) -> Any:
        self.asked.append(shape)
        return self.answer

    def seconds(self, _shape: Shape) -> float:
        return 2.0

    def known(self) -> list[Any]:
        return [(shape, self.answer) for shape in self.asked[-1:]] if self.answer else []

    def forget(self, who: str) -> None:
        self.asked.append(who)


class Desk:
    status = "running"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def trace_attention(self, owner: str, layer: int, **options: Any) -> None:
        self.calls.append((owner, layer, options))


@pytest.fixture(autouse=True)
def labs(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeLab]:
    made = {"INTERPRETER": FakeLab(None), "COMPILER": FakeLab(None)}
    for name, each in made.items():
        monkeypatch.setattr(views.lab, name, each)
    monkeypatch.setattr(views, "SETTLED_S", 0.0)
    return made


def started() -> EngineStarted:
    model = {"name": "made", "num_layers": 12, "num_attention_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    return EngineStarted(
        step=0, time_ns=0, config={"block_size": 16, "num_kv_blocks": 64}, model=model, device={}, versions={}, kv_bytes_per_block=1,
        kv_pool_bytes=64,
    )  # fmt: skip


def step_done(step: int, *runs: Run) -> StepDone:
    return StepDone(
        step=step, time_ns=step, runs=list(runs), num_waiting=0, num_running=len(runs), token_budget=64, max_num_seqs=8, used_blocks=0,
        cached_free_blocks=0, schedule_ms=0, forward_ms=1, sample_ms=0, commit_ms=0, step_ms=1, record_ms=0, flops=0, weight_bytes=0,
        kv_read_bytes=0, kv_write_bytes=0,
    )  # fmt: skip


def make(live: bool = True, **params: Any) -> AttentionView:
    store = EventStore()
    store.replayed = not live
    return AttentionView(store, Desk() if live else None, Clock(owner="ann"), **params)


def give(view: AttentionView, *events: Any) -> None:
    view.store.append(events)
    view.update()


def test_before_the_kernel_has_run_its_arithmetic_is_drawn_and_said_to_be(labs: dict[str, FakeLab]) -> None:
    view = make()
    tiles = view.panels["tiles"]
    assert tiles.made.num_tiles == 36 and "derived" in tiles.state.object and "2 s so far" in tiles.state.object
    assert labs["INTERPRETER"].asked[-1] == view.shape.run and labs["COMPILER"].asked[-1] == view.shape.compiled
    assert tiles.canvas.meta["count"] == 36 and tiles.canvas.soft["program"] == tiles._program
    assert [bar["used"] for bar in tiles.canvas.memory] == [None, None]
    labs["COMPILER"].answer = GOOD
    view.update()
    assert tiles.canvas.memory[0]["used"] == 65536
    tiles.lanes.value = "dealt"
    view.update()
    assert tiles.canvas.meta["clock"] == "modelled"


def test_a_moved_knob_draws_at_once_and_asks_for_the_new_shape_alone(labs: dict[str, FakeLab]) -> None:
    view = make()
    view.seq_len = 1024
    view.update()
    assert view.panels["tiles"].made.num_tiles == 136 and labs["INTERPRETER"].asked[-1].seq_len == 1024
    compiled = len(set(labs["COMPILER"].asked))
    assert compiled == 1  # the code does not depend on the number of tokens
    view.num_warps = 8
    view.update()
    assert labs["COMPILER"].asked[-1].num_warps == 8 and len(set(labs["INTERPRETER"].asked)) == 2
    before = len(labs["INTERPRETER"].asked)
    view.param.update(seq_len=4096, block_m=16, block_n=16)
    view.update()
    assert view.too_many and len(labs["INTERPRETER"].asked) == before and "too many" in view.panels["tiles"].state.object
    view.close()
    assert view.who in labs["INTERPRETER"].asked and view.who in labs["COMPILER"].asked


def test_a_click_on_a_tile_sends_the_scores_of_its_programs_row() -> None:
    view = make()
    canvas = view.panels["tiles"].canvas
    canvas.action = {"seq": 1, "kind": "look", "program": 7}
    view.update()
    assert canvas.soft["program"] == 7 and canvas.soft["row"] == 63 and len(canvas.scores) == 4 * 512
    for bad in (-1, 10_000, "7", None, True):
        canvas.action = {"seq": 2, "kind": "look", "program": bad}
        view.update()
    assert canvas.soft["program"] == 7


def test_without_triton_the_page_says_so_and_the_rest_works(labs: dict[str, FakeLab]) -> None:
    for each in labs.values():
        each.answer = {"error": views.lab.NO_TRITON}
    view = make()
    assert "Triton is not installed" in view.panels["tiles"].state.object and view.panels["tiles"].made.num_tiles == 36
    for tab in TABS:
        view.tab = tab
        view.update()
    assert "Triton is not installed" in view.panels["compile"].state.object
    assert view.panels["traffic"].traffic.flash.data["x"] and "twice as long" in view.panels["traffic"].doubled.object


def test_the_compilers_own_words_are_shown_and_escaped(labs: dict[str, FakeLab]) -> None:
    labs["COMPILER"].answer = {**GOOD, "refused": "out of resource: shared memory, Required: 460800 <b>"}
    view = make(tab="compile")
    panel = view.panels["compile"]
    assert "Required: 460800 &lt;b&gt;" in panel.state.object and "Refused" in panel.state.object
    labs["COMPILER"].answer = GOOD
    view.block_m = 128
    view.update()
    assert "no GPU was needed" in panel.state.object and "HGMMA" in panel.mix.object and panel.parts.visible
    assert "registers" in panel.room.object and "3" in panel.numbers.object and "▸" not in panel.tried.object
    assert "128 × 64" in panel.tried.object


@pytest.mark.parametrize("key", SCENES)
def test_a_scene_moves_the_knobs_and_says_what_to_look_at(key: str) -> None:
    view = make()
    view._scene_clicked(key, None)
    view.update()
    assert view.tab == SCENES[key].tab and all(getattr(view, name) == value for name, value in SCENES[key].knobs.items())
    assert set(SCENES[key].knobs) <= set(KNOBS) and "at-said look" in view.said.object
    view.block_n = 256
    view.update()
    assert view.said.object == ""


def test_the_traffic_of_twice_the_tokens_is_four_times_for_long_texts() -> None:
    view = make(tab="traffic", seq_len=4096, causal=False)
    data = view.panels["traffic"].traffic
    flash, standard = data.flash.data["y"], data.standard.data["y"]
    assert 3.9 < flash[-1] / flash[-2] < 4 and 3.9 < standard[-1] / standard[-2] < 4 and standard[-1] > 1.5 * flash[-1]
    sram = [y for y in view.panels["traffic"].sram.line.data["y"] if y == y]
    assert sram == sorted(sram, reverse=True)


def test_the_engines_own_batch_is_what_decodes_in_the_step_on_the_screen() -> None:
    view = make(tab="decode")
    panel = view.panels["decode"]
    assert not panel.inside.visible and "No request decodes" in panel.state.object
    give(
        view, started(), step_done(1, Run("a", "prefill", 0, 40, True)),
        step_done(2, Run("a", "decode", 40, 1, True), Run("b", "decode", 999, 1, True), Run("c", "prefill", 0, 30, False)),
    )  # fmt: skip
    assert panel.inside.visible and "2 requests with 41 to 1,000 keys, 3 KV heads" in panel.state.object
    said = view.step_words.object
    assert "2 decodes with 2 query tokens" in said and "1 prompt’s chunk with 30 query tokens over a context of 30" in said
    view.clock.goto(1, 0, 2)
    view.update()
    assert not panel.inside.visible
    panel.source.value = "what-if"
    view.update()
    assert panel.inside.visible and "tried" in panel.state.object


def test_the_next_step_is_traced_and_shown_with_its_block_table() -> None:
    view = make(tab="engine")
    panel = view.panels["engine"]
    give(view, started(), step_done(1, Run("req-0", "prefill", 0, 40, True)))
    assert panel.layer.options == list(range(12)) and panel.nothing.visible
    panel.layer.value = 2
    panel.button.clicks += 1
    view.update()
    assert view.session.calls == [("ann", 2, {"num_sms": 132})] and "Asked" in panel.state.object
    give(view, traced(1))
    assert panel.inside.visible and "order, not time" in panel.state.object and "4, 9, 2" in panel.tables.object
    assert panel.canvas.meta["count"] == 48 and len(panel.canvas.meta["planes"]) == 6
    assert panel.canvas.soft["count"] == 70 and panel.canvas.soft["program"] >= 0
    give(view, traced(1, trace_id="u", sms=4, where="cuda", kernel_ms=0.2, untraced_ms=0.1, dropped=5))
    assert panel.canvas.meta["clock"] == "time" and "5 records were dropped" in panel.state.object
    assert "0.200 ms" in panel.state.object


def test_a_file_holds_what_needs_no_process_and_asks_for_none(labs: dict[str, FakeLab]) -> None:
    token = in_file.set(True)
    try:
        view = make(live=False)
    finally:
        in_file.reset(token)
    view.update()
    assert set(view.panels) == set(TABS) and not labs["INTERPRETER"].asked and not labs["COMPILER"].asked
    assert "in a file no kernel runs" in view.panels["tiles"].state.object
    assert view.panels["tiles"].canvas.soft


def test_what_an_address_may_carry_is_checked() -> None:
    assert set(AttentionView.url_params) == {"tab", *KNOBS}
    for name, bad in (("block_m", 48), ("gpu", "abacus"), ("head_dim", 65), ("tab", "none")):
        with pytest.raises(ValueError, match=name):
            make(**{name: bad})


def test_it_can_be_mirrored_into_a_notebook() -> None:
    view = make()
    spec = json.dumps(Mirror(view).spec(), default=str)
    assert "Query rows a tile" in spec and "The schedule of the kernel" in spec


def test_words_tell_instructions_apart() -> None:
    assert [words.kind_of(name) for name in ("HGMMA", "LDGSTS", "LDL", "FFMA")] == ["tensor", "copy", "spill", ""]


def test_what_is_to_be_hidden_says_nothing_of_its_own_display() -> None:
    hidden = (make(tab="decode").panels["decode"].own, make(tab="compile").panels["compile"].parts)
    for part in hidden:
        assert not part.visible and not any("!important" in str(sheet) for sheet in part.stylesheets)
