"""Scenes against a session that only writes down what it is asked."""

from typing import Any

import pytest

from engine.events.recorder import Recorder
from engine.events.state import State
from engine.events.types import KnobChanged, PoolResized
from explorer.kv_cache.scenes import SCENES, Director
from tests.explorer.kv_cache.pool_events import PoolSim


class Desk:
    """Writes down what it is asked; ids are a-1, a-2, ..."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any, str]] = []
        self.knobs: list[tuple[str, dict[str, Any]]] = []
        self.refuse = ""
        self.absent = False

    def submit(self, prompt: Any, params: Any, owner: str) -> str | None:
        if self.refuse:
            raise ValueError(self.refuse)
        self.sent.append((prompt, params, owner))
        return None if self.absent else f"a-{len(self.sent)}"

    chat = submit

    def reconfigure(self, owner: str, **knobs: Any) -> None:
        self.knobs.append((owner, knobs))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def director(desk: Desk) -> Director:
    return Director(desk, lambda: "ann")


def state_of(sim: PoolSim) -> State:
    return State().apply_all(sim.events)


def test_shared_prefix_sends_the_rest_once_the_first_has_computed_the_prompt(desk, director):
    sim = PoolSim(num_blocks=200, block_size=16)
    director.start("shared", state_of(sim))
    assert len(desk.sent) == 1 and not desk.knobs and director.said[0] == "wait"
    director.advance(state_of(sim))
    assert len(desk.sent) == 1
    sim.add("a-1", list(range(40)))
    sim.prefill("a-1")
    sim.step()  # its first token exists
    director.advance(state_of(sim))
    assert len(desk.sent) == 6 and director.said == ("look", SCENES["shared"].look)
    systems = {messages[0]["content"] for messages, _, _ in desk.sent}
    assert len(systems) == 1 and {owner for _, _, owner in desk.sent} == {"ann"}
    director.advance(state_of(sim))
    assert len(desk.sent) == 6


def test_pool_too_small_waits_for_the_pool_and_restores_it(desk, director):
    sim = PoolSim(num_blocks=64, block_size=16)
    sim.add("x", [1, 2, 3])
    sim.prefill("x")
    sim.step()
    state = state_of(sim)
    director.start("small", state)
    assert desk.knobs == [("ann", {"num_kv_blocks": 15})] and not desk.sent
    assert "num_kv_blocks = 15" in director.said[1] and "draining" in director.said[1]
    director.advance(state)
    assert not desk.sent
    state = state.copy()
    state.apply(PoolResized(step=1, time_ns=0, num_blocks=15, block_size=16, kv_bytes_per_block=1, kv_pool_bytes=15))
    director.advance(state)
    assert len(desk.sent) == 4 and director.said[0] == "look"
    assert director.changed == {"num_kv_blocks": 64}
    director.restore()
    assert desk.knobs[-1] == ("ann", {"num_kv_blocks": 64}) and director.changed == {} and director.said == ("", "")


def test_a_restore_still_draining_is_what_the_next_scene_goes_back_to(desk, director):
    """The small pool runs on, 64 blocks are asked for again, and the next scene starts meanwhile."""
    state = state_of(PoolSim(num_blocks=15, block_size=16)).copy()
    state.draining["num_kv_blocks"] = 64
    director.start("fork", state)
    assert desk.knobs[-1] == ("ann", {"num_kv_blocks": 96})
    director.restore()
    assert desk.knobs[-1] == ("ann", {"num_kv_blocks": 64})


def test_the_small_pool_has_room_for_the_beginnings_but_not_for_the_ends():
    """15 blocks of 16: four prompts of some 50 tokens fit, four texts of 160 do not."""
    assert SCENES["small"].knobs({"block_size": 16, "max_num_seqs": 8}) == {"num_kv_blocks": 15}
    (wave,) = SCENES["small"].waves()
    assert len(wave) == 4 and all(p.ignore_eos and 4 * (40 + p.max_tokens) > 240 for _, p in wave)


def test_a_knob_changed_twice_goes_back_to_its_first_value(desk, director):
    sim = PoolSim(num_blocks=64, block_size=16)
    director.start("small", state_of(sim))
    small = state_of(PoolSim(num_blocks=15, block_size=16))
    director.start("fork", small)  # wants a roomier pool than the small one
    assert desk.knobs[-1] == ("ann", {"num_kv_blocks": 96})
    director.restore()
    assert desk.knobs[-1] == ("ann", {"num_kv_blocks": 64})


def test_copy_on_write_forks_four_and_wants_blocks_that_can_be_partly_full(desk, director):
    sim = PoolSim(num_blocks=2000, block_size=1)
    director.start("fork", state_of(sim))
    assert desk.knobs == [("ann", {"block_size": 8})]
    sim = PoolSim(num_blocks=2000, block_size=8)
    director.advance(state_of(sim))
    (_, params, _), *rest = desk.sent
    assert params.n == 4 and params.temperature == 1.0 and not rest


def test_prefix_caching_is_switched_on_where_it_was_off(desk, director):
    sim = PoolSim(num_blocks=200, block_size=16)
    recorder = Recorder()
    recorder.attach(sim.events.append)
    recorder.emit(KnobChanged, name="enable_prefix_caching", old=True, new=False)
    director.start("shared", state_of(sim))
    assert desk.knobs == [("ann", {"enable_prefix_caching": True})] and not desk.sent
    director.restore()
    assert desk.knobs[-1] == ("ann", {"enable_prefix_caching": False})


def test_a_refusal_ends_the_scene_and_is_shown(desk, director):
    desk.refuse = "the prompt has 5 tokens; the KV pool allows 4"
    director.start("fork", state_of(PoolSim(num_blocks=200, block_size=16)))
    assert director.said == ("error", desk.refuse) and director.scene is None
    director.advance(state_of(PoolSim(num_blocks=200, block_size=16)))
    assert not desk.sent


def test_a_new_engine_ends_the_scene_and_keeps_its_own_knobs(desk, director):
    director.start("small", state_of(PoolSim(num_blocks=64, block_size=16)))
    director.forget()
    director.advance(state_of(PoolSim(num_blocks=15, block_size=16)))
    director.restore()
    assert not desk.sent and len(desk.knobs) == 1 and director.said == ("", "")


def test_no_engine_no_scene(desk, director):
    desk.absent = True
    director.start("shared", state_of(PoolSim(num_blocks=200, block_size=16)))
    assert director.scene is None and director.said == ("", "")
    with pytest.raises(ValueError, match="scene must be one of shared, small, fork"):
        director.start("storm", State())
