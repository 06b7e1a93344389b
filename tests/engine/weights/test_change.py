"""Weights that change under running requests: what is computed again, what is never mixed, and what stays as it was on an error."""

import gc
import queue
import time
import weakref

import pytest
import torch

from engine import SamplingParams, SpeculativeConfig
from engine import messages as m
from engine.events.quantization import KvObserved, LayerQuantized, QuantizationProgress, WeightsChanged
from engine.events.types import KnobChanged, RequestPreempted
from engine.quantization import methods
from engine.weights import disk
from engine.weights.build import Source
from engine.weights.plan import MATRICES, make_plan
from engine.worker import Mailbox, Worker
from tests.engine.engines import Checked
from tests.engine.greedy import GREEDY, prompt

LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(engine, prompts, params=LONG):
    return [out.token_ids for out in engine.generate(prompts, params)]


@pytest.mark.parametrize("method", ["int8", "int8_w8a8", "int4", "nf4", "fp8", "int3", "gptq", "awq"])
def test_a_method_runs_and_the_original_comes_back(make, method):
    engine = make()
    before = tokens(engine, [prompt(0, 9)])
    engine.reconfigure(quantization=method)
    assert engine.config.quantization == method and engine.parts.weights.bits_per_weight < 16
    tokens(engine, [prompt(0, 9)])
    engine.reconfigure(quantization=None)
    assert engine.config.quantization is None and engine.config.quantization_group_size is None
    assert tokens(engine, [prompt(0, 9)]) == before


@pytest.mark.parametrize("options", [
    {}, {"speculative": SpeculativeConfig("ngram", num_speculative_tokens=3)}, {"kv_cache_dtype": "int8"},
    {"max_num_batched_tokens": 5},
])  # fmt: skip
def test_running_requests_are_computed_again_under_the_new_weights(make, options):
    # NF4 runs dequantised here: in float32 for any number of rows, so that tokens can be compared.
    engine = make(**options)
    checked = Checked(engine)
    ids = [engine.add_request(prompt(i, 7 + i), LONG) for i in range(3)]
    for _ in range(4):
        checked.step()
    so_far = {r.request_id: list(r.token_ids) for r in engine.scheduler.running}
    engine.reconfigure(quantization="nf4", by="teacher")
    changed = [e for e in checked.events if isinstance(e, WeightsChanged)]
    assert len(changed) == 1 and set(changed[0].recomputed) == set(so_far) and changed[0].method == "nf4"
    assert {e.request_id for e in checked.events if isinstance(e, RequestPreempted)} == set(so_far)
    assert len(engine.pool.index) == 0, "what the old weights cached is never found"
    done = checked.run()
    fresh = make(quantization="nf4", **options)
    for request_id in ids:
        start, whole = so_far[request_id], done[request_id]
        left = len(whole.prompt_token_ids) + 24 - len(start)
        rest = fresh.generate([start], SamplingParams(temperature=0, max_tokens=left, ignore_eos=True))[0].token_ids
        assert [*whole.prompt_token_ids, *whole.token_ids] == [*start, *rest]
    engine.close()


def test_siblings_and_beams_survive_a_change(make):
    engine = make()
    checked = Checked(engine)
    engine.add_request(prompt(0, 6), SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True))
    engine.add_request(prompt(1, 6), SamplingParams(temperature=0, beam_width=3, max_tokens=12))
    for _ in range(4):
        checked.step()
    engine.reconfigure(quantization="int4")
    done = checked.run()
    assert len(done) == 2 and engine.pool.num_used == 0


def test_knobs_of_the_weights_change_together(make):
    engine = make()
    with engine.record() as log:
        engine.reconfigure(quantization="int4", quantization_group_size=64, by="a")
        engine.reconfigure(quantization_options={"symmetric": True}, by="b")
        assert engine.config.quantization_group_size == 64 and engine.config.quantization_options == {"symmetric": True}
        engine.reconfigure(quantization="nf4", by="c")
    assert engine.config.quantization_group_size == 64 and engine.config.quantization_options is None
    told = [(e.name, e.new, e.by) for e in log if isinstance(e, KnobChanged)]
    assert [new for name, new, _by in told if name == "quantization"] == ["int4", "int4", "nf4"], "once for each change"
    assert ("quantization", "int4", "a") in told and ("quantization", "nf4", "c") in told
    assert ("quantization_options", {"symmetric": True}, "b") in told and ("quantization_options", None, "c") in told
    assert log.at(log.last_step).knobs["quantization"] == "nf4"


@pytest.mark.parametrize(("knobs", "message"), [
    ({"quantization": "int5"}, "int8_w8a8"), ({"quantization": "int4", "quantization_group_size": 0}, "1 column or more"),
    ({"quantization": "int8", "quantization_group_size": 64}, "takes no group size"),
    ({"quantization": "int4", "quantization_options": {"damping": 0.1}}, "has the options"),
    ({"quantization": "int4", "quantization_options": {"symmetric": 1}}, "must be a bool"),
    ({"quantization": "gptq", "quantization_options": {"bits": 5}}, "bits 2, 3, 4 or 8"),
    ({"quantization": "int4", "quantization_options": {"only": ["9"]}}, "layers of 3"),
    ({"quantization": "int4", "quantization_options": {"only": ["1.head"]}}, "down_proj"),
    ({"quantization": "int4", "quantization_options": {"error_between": [1, 0]}}, r"\[low, high\]"),
    ({"quantization_group_size": 32}, "goes with a quantization"),
])  # fmt: skip
def test_what_does_not_go_changes_nothing(make, knobs, message):
    engine = make()
    layers, config = engine.parts.model.layers, engine.config
    with pytest.raises(ValueError, match=message):
        engine.reconfigure(max_num_seqs=2, **knobs)
    assert engine.parts.model.layers is layers and engine.config == config and engine.requantizer.job is None


@pytest.mark.parametrize("error", [ValueError("no such luck"), RuntimeError("broken")])
def test_a_method_that_fails_leaves_the_old_weights(make, monkeypatch, error):
    engine = make()
    before = tokens(engine, [prompt(0, 9)])
    real = methods.quantize

    def failing(*args, **options):
        raise error

    monkeypatch.setattr(methods, "quantize", failing)
    with engine.record() as log, pytest.raises(type(error)):
        engine.reconfigure(quantization="int4")
    assert engine.config.quantization is None and tokens(engine, [prompt(0, 9)]) == before
    assert any(isinstance(e, QuantizationProgress) and e.doing.startswith("failed: ") for e in log)
    monkeypatch.setattr(methods, "quantize", real)
    engine.reconfigure(quantization="int4")
    assert engine.config.quantization == "int4"


def settle(engine):
    end = time.monotonic() + 60
    while engine.busy_beside_steps and time.monotonic() < end:
        engine.poll()
        time.sleep(0.005)
    assert not engine.busy_beside_steps


def test_in_the_background_steps_go_on_and_the_last_plan_counts(make):
    engine = make()
    checked = Checked(engine)
    engine.add_request(prompt(0, 6), LONG)
    engine.reconfigure(quantization="gptq", wait=False)
    assert engine.config.quantization is None and checked.state.draining["quantization"] == "gptq"
    engine.reconfigure(quantization="int8", wait=False)
    checked.run()
    settle(engine)
    assert engine.config.quantization == "int8" and checked.state.knobs["quantization"] == "int8" and not checked.state.draining
    assert [e.method for e in checked.events if isinstance(e, WeightsChanged)] == ["int8"]


def test_a_change_that_is_cancelled_never_comes(make):
    engine = make()
    checked = Checked(engine)
    engine.reconfigure(quantization="gptq", wait=False)
    engine.cancel_quantization()
    settle(engine)
    assert engine.config.quantization is None and not checked.state.draining
    assert [e.doing for e in checked.events if isinstance(e, QuantizationProgress)][-1] == "cancelled"
    engine.reconfigure(quantization="awq", wait=False)
    engine.close()  # nothing hangs


def test_back_to_what_runs_before_anything_came_of_it(make):
    engine = make()
    checked = Checked(engine)
    engine.reconfigure(quantization="gptq", wait=False, by="a")
    engine.reconfigure(quantization=None, wait=False, by="b")
    settle(engine)
    assert not checked.state.draining and checked.state.knobs["quantization"] is None
    assert not [e for e in checked.events if isinstance(e, WeightsChanged)]


def test_a_comparison_that_is_overtaken_is_not_told_as_cancelled(make):
    engine = make()
    with engine.record() as log:
        engine.watch("weights")
        engine.reconfigure(quantization="int8")
        settle(engine)
        engine.unwatch("weights")
    assert not [e for e in log if isinstance(e, QuantizationProgress) and e.doing == "cancelled"]
    assert len([e for e in log if isinstance(e, LayerQuantized) and e.method == "int8"]) == 21


def test_a_cache_that_cannot_be_written_costs_only_time(make, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    engine = make()
    monkeypatch.setattr(disk, "directory", lambda: tmp_path / "file" / "quantized")
    engine.reconfigure(quantization="awq")
    assert engine.config.quantization == "awq" and not engine.parts.weights.cached


def test_from_the_process_that_owns_an_engine(make):
    """Commands as they come from a page: nothing waits, and the answers are events."""
    engine, mailbox = make(), Mailbox()
    worker = Worker(engine, mailbox, queue.SimpleQueue())
    worker.observe(True)
    for command in (
        m.Watch("weights"), m.Reconfigure({"quantization": "gptq"}, "a"), m.Study("observe_kv", {"layer": 1}),
        m.Study("observe_matrix", {"layer": 9, "name": "q_proj"}), m.Study("close"), m.Reconfigure({"quantization": "int1"}, "a"),
    ):  # fmt: skip
        worker._obey(command)
    end = time.monotonic() + 60
    while engine.busy_beside_steps and time.monotonic() < end:
        worker._poll()
        time.sleep(0.01)
    messages = mailbox.take(0.0)
    events = [e for message in messages if isinstance(message, m.Events) for e in message.events]
    assert [e.method for e in events if isinstance(e, WeightsChanged)] == ["", "gptq"]
    assert [e.layer for e in events if isinstance(e, KvObserved)] == [1]
    refused = [(r.command, r.error) for r in messages if isinstance(r, m.Rejected)]
    assert [command for command, _message in refused] == ["Study", "Study", "Reconfigure"]
    assert "layer must be" in refused[0][1] and "observe_kv" in refused[1][1] and "int8_w8a8" in refused[2][1]


def test_what_was_calibrated_is_kept_on_disk(make, monkeypatch, parts):
    engine = make()
    engine.reconfigure(quantization="gptq")
    first = engine.parts.weights
    made = {
        key: weight.dequantize() for key, weight in disk.load(first.plan, parts.checkpoint.checksum, shapes(parts))[0].items()
    }
    assert not first.cached and first.calibration_tokens > 0 and len(made) == 12
    monkeypatch.setattr("engine.weights.make.build_calibrated", lambda *a, **o: pytest.fail("calibrated again"))
    engine.reconfigure(quantization=None)
    engine.reconfigure(quantization="gptq")
    assert engine.parts.weights.cached
    again = disk.load(engine.parts.weights.plan, parts.checkpoint.checksum, shapes(parts))
    assert all(torch.equal(made[key], weight.dequantize()) for key, weight in again[0].items())


def test_what_is_kept_is_known_by_what_it_was_made_of(make, parts):
    engine = make(quantization="awq")
    plan, checksum = engine.parts.weights.plan, parts.checkpoint.checksum
    assert disk.load(plan, checksum, shapes(parts)) is not None
    assert disk.load(plan, checksum, {**shapes(parts), (0, "o"): (64, 96)}) is None  # not the matrix that is asked for
    assert disk.load(plan, checksum, {**shapes(parts), (9, "o"): (64, 64)}) is None
    plans = [make_plan("awq"), make_plan("awq", 32), make_plan("gptq"), make_plan("awq", None, {"clip": True})]
    keys = [p.key(c, version) for p in plans for c in ("a", "b") for version in (1, 2)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("damage", ["cut", "bits", "empty"])
def test_a_damaged_file_is_made_again(make, parts, damage):
    engine = make()
    engine.reconfigure(quantization="awq")
    path = disk.path_of(engine.parts.weights.plan, parts.checkpoint.checksum)
    data = bytearray(path.read_bytes())
    if damage == "bits":
        data[40:80] = b"x" * 40
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"" if damage == "empty" else data)
    engine.reconfigure(quantization=None)
    engine.reconfigure(quantization="awq")
    assert not engine.parts.weights.cached and engine.config.quantization == "awq"


def shapes(parts):
    return disk.shapes_of(parts.model_config)


def test_an_engine_gets_the_weights_of_its_own_configuration(make):
    first = make(quantization="int3")
    quantized = tokens(first, [prompt(2, 8)])
    first.close()
    plain = make()
    assert plain.parts.weights.plan.method is None and tokens(plain, [prompt(2, 8)]) != quantized
    again = make(quantization="int3")
    assert tokens(again, [prompt(2, 8)]) == quantized


def test_only_what_was_chosen_is_rounded(make, parts):
    engine = make()
    source = Source(parts.checkpoint.tensors)
    engine.reconfigure(quantization="int2", quantization_options={"only": ["0", "1.v_proj"]})
    seen = {(e.layer, e.name): e for e in observed(engine)}
    for (layer, name), e in seen.items():
        rounded = layer == 0 or (layer, name) == (1, "v_proj")
        assert (e.sqnr_db < 30) == rounded, (layer, name)
    assert len(seen) == 3 * len(MATRICES) and source.matrix(0, "q_proj").shape == (64, 64)


def test_only_errors_between_are_made(make, parts):
    engine = make()
    original = Source(parts.checkpoint.tensors).matrix(2, "down_proj")
    every = methods.quantize(original, "int2").dequantize() - original
    high = 0.6 * float(every.max())
    plan = {"only": ["2.down_proj"], "error_between": [0.0, high]}
    engine.reconfigure(quantization="int2", quantization_options=plan)
    seen = engine.observe_matrix(2, "down_proj")
    now = torch.frombuffer(bytearray(seen.running), dtype=getattr(torch, seen.running_dtype)).float()
    change = now.view(original.shape) - original
    wanted = torch.where((every >= 0) & (every <= high), every, 0)
    assert torch.allclose(change, wanted, atol=1e-3 * float(original.abs().max())) and 0 < int((wanted > 0).sum()) < int(
        (every > 0).sum()
    )
    assert make_plan("int2", None, plan, 3).takes(2, "down_proj") and not make_plan("int2", None, plan, 3).takes(1, "down_proj")


def observed(engine):
    with engine.record() as log:
        engine.watch("weights")
        settle(engine)
        engine.unwatch("weights")
    return [e for e in log if isinstance(e, LayerQuantized)]


def test_the_head_is_rounded_when_asked(make):
    engine = make()
    plain = engine.parts.model.head
    engine.reconfigure(quantization="int8", quantization_options={"head": True})
    assert engine.parts.model.head.form == "int8_kernel"
    tokens(engine, [prompt(0, 5)], GREEDY)
    engine.reconfigure(quantization=None)
    assert type(engine.parts.model.head) is type(plain)


def test_a_step_counts_the_bytes_of_what_runs(make, parts):
    engine = make()
    before = parts.cost_facts.layer_weight_bytes
    engine.reconfigure(quantization="int8")
    assert parts.cost_facts.layer_weight_bytes == before - parts.weights.plain_bytes + parts.weights.linear_bytes
    assert parts.weights.linear_bytes < 0.3 * parts.weights.plain_bytes


def test_weights_that_were_replaced_go_at_once(make):
    """Without the collector: in a process of its own an engine's objects are out of its sight (``engine.hardware.heap.settle``)."""
    engine = make()
    gc.collect()
    gc.disable()
    try:
        for method in ("int8", "int4", None):
            before = [weakref.ref(layer) for layer in engine.parts.model.layers]
            engine.reconfigure(quantization=method)
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
            assert not any(layer() is not None for layer in before)
    finally:
        gc.enable()
