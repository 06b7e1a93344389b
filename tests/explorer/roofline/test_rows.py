"""Steps as points, what is judged of them, and the modelled points beside them: against sums worked out by hand."""

import math

import msgspec
import pytest

from engine.hardware.cost import CostFacts, step_cost
from engine.hardware.gpus import gpu, gpus
from engine.hardware.planner import _Run
from engine.hardware.roofline import Roofs, gpu_roofs
from explorer.roofline.figure import RooflineFigure, bound_words, power, roof_columns, span, steady, step_columns, times
from explorer.roofline.rows import RooflineRows, Step, judge, roofs_of, running_bits, step_of
from explorer.roofline.whatif import BATCHES, kv_head_choices, what_if, with_kv_heads, workload
from tests.explorer.roofline.made import MODEL, memory, roofs, started, step

ROOFS = Roofs(name="x", kind="measured", bandwidth=1e10, peak={"float32": 1e11, "bfloat16": 4e10})


def made(n: int = 1, **more: float) -> Step:
    found = step_of(step(n, "decode", **more))
    assert found is not None
    return found


def test_a_step_is_a_point() -> None:
    s = made()
    assert (s.bytes, s.intensity, s.rate, s.bandwidth) == (4e8, 0.5, 2e9, 4e9)
    assert (s.requests, s.tokens, s.context, s.phase) == (1, 1, 11, "decode")


def test_the_wait_for_a_gpu_counts() -> None:
    on_gpu = step_of(step(1, "decode"), on_gpu=True)
    assert on_gpu is not None and on_gpu.seconds == pytest.approx(0.15)
    rows = RooflineRows()
    rows.feed([started(device="cuda:0", dtype="bfloat16"), step(1, "decode")])
    assert rows.steps[0].seconds == pytest.approx(0.15)


@pytest.mark.parametrize(
    "more", [{"flops": 0.0}, {"forward_ms": 0.0}, {"weight_bytes": 0.0, "kv_read_bytes": 0.0, "kv_write_bytes": 0.0}]
)
def test_a_step_without_work_is_none(more: dict[str, float]) -> None:
    assert step_of(step(1, "decode", **more)) is None
    assert step_of(step(1)) is None


@pytest.mark.parametrize(
    ("phases", "phase"), [(["prefill"], "prefill"), (["decode"] * 3, "decode"), (["decode", "prefill"], "mixed")]
)
def test_phases(phases: list[str], phase: str) -> None:
    found = step_of(step(1, *phases))
    assert found is not None and found.phase == phase


def test_what_binds_and_how_near() -> None:
    # 4e8 B at 1e10 B/s take 40 ms, 2e8 operations at 1e11 a second 2 ms; the step took 100.
    found = judge(made(), ROOFS, "float32")
    assert found.bound.by == "memory" and found.bound.times == pytest.approx(20) and found.share == pytest.approx(0.4)
    far = judge(made(flops=4e10), ROOFS, "float32")
    assert far.bound.by == "compute" and far.bound.times == pytest.approx(10) and far.share == pytest.approx(4)
    with pytest.raises(ValueError, match="no rate for 'float16'"):
        judge(made(), ROOFS, "float16")


def test_rows_follow_the_run() -> None:
    rows = RooflineRows()
    rows.feed([started(), step(1, "prefill"), step(2, "decode"), roofs(2), memory(), step(3, "decode")])
    assert (
        [s.step for s in rows.up_to(2)] == [1, 2] and [s.step for s in rows.up_to(9, window=2)] == [2, 3] and rows.up_to(0) == []
    )
    assert rows.device_roofs is not None and rows.device_roofs.bandwidth == 1e10 and len(rows.memory) == 1
    rows.feed([step(3, "decode")])  # told again
    assert len(rows.steps) == 3
    rows.feed([started()])
    assert not rows.steps and rows.device_roofs is None  # another engine, perhaps elsewhere


def test_the_larger_bandwidth_is_the_roof() -> None:
    assert roofs_of(roofs(copy_bandwidth=2e10)).bandwidth == 2e10 and roofs_of(roofs()).bandwidth == 1e10


@pytest.mark.parametrize(
    ("method", "dtype", "bits"),
    [
        (None, "float32", 32),
        (None, "bfloat16", 16),
        ("", "float16", 16),
        ("int8", "float32", 8),
        ("fp8", "bfloat16", 8),
        ("gptq", "bfloat16", 4),
    ],
)
def test_running_bits(method: str | None, dtype: str, bits: int) -> None:
    assert running_bits(method, dtype) == bits


# -- what if ---------------------------------------------------------------------------------------------------------------


def test_a_modelled_point_is_the_counted_cost_under_the_roofs() -> None:
    work = workload(batch=4, context=512, bits=0, running=32, dtype="float32")
    found = what_if(MODEL, work, ROOFS)
    facts = CostFacts.from_facts(MODEL, "float32")
    cost = step_cost(facts, [_Run(511, 1)] * 4)
    moved = cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes
    assert (found.decode.flops, found.decode.bytes) == (cost.flops, moved)
    assert found.decode.bound.seconds == pytest.approx(max(cost.flops / 1e11, moved / 1e10))
    assert found.decode.rate == pytest.approx(min(1e11, found.decode.intensity * 1e10))
    assert found.prefill.flops == step_cost(facts, [_Run(0, 512)]).flops and found.prefill.bound.by == "compute"
    assert [p.batch for p in found.sweep] == list(BATCHES)
    assert found.sweep[2] == found.decode  # batch 4
    at_64 = step_cost(facts, [_Run(511, 1)] * 64)
    assert found.sweep[6].flops == pytest.approx(at_64.flops)


@pytest.mark.parametrize(
    ("bits", "running", "dtype", "want"),
    [(0, 32, "float32", ("float32", 32)), (16, 32, "float32", ("bfloat16", 16)), (4, 32, "float32", ("float32", 4)),
     (8, 16, "bfloat16", ("bfloat16", 8)), (32, 16, "bfloat16", ("float32", 32)), (16, 16, "float16", ("float16", 16)), (0, 4, "bfloat16", ("bfloat16", 4))],
)  # fmt: skip
def test_bits_and_dtype(bits: int, running: int, dtype: str, want: tuple[str, int]) -> None:
    work = workload(batch=1, context=64, bits=bits, running=running, dtype=dtype)
    assert (work.dtype, work.weight_bits) == want


def test_other_kv_heads_change_cache_and_projections() -> None:
    assert kv_head_choices(MODEL) == [9, 3, 1] and kv_head_choices({}) == []
    assert with_kv_heads(MODEL, 0) == with_kv_heads(MODEL, 3) == MODEL
    mha = with_kv_heads(MODEL, 9)
    assert mha["num_kv_heads"] == 9 and mha["num_parameters"] - MODEL["num_parameters"] == 30 * 2 * 576 * 64 * 6
    with pytest.raises(ValueError, match="divide the 9 query heads, got 2"):
        with_kv_heads(MODEL, 2)
    work = workload(batch=1, context=2048, bits=16, running=16, dtype="bfloat16")
    own, all_of_them = (what_if(m, work, gpu_roofs(gpu("h100-sxm"))).decode for m in (MODEL, mha))
    kv = 30 * 2 * 64 * 2 * 2048  # a KV head's K and V, 2 bytes each
    assert all_of_them.bytes - own.bytes == pytest.approx(
        6 * kv + 30 * 2 * 64 * 2 * 6 + 2 * (mha["num_parameters"] - MODEL["num_parameters"]), rel=1e-6
    )


@pytest.mark.parametrize("key", gpus())
def test_batch_one_is_bound_by_memory_everywhere(key: str) -> None:
    work = workload(batch=1, context=1024, bits=16, running=16, dtype="bfloat16")
    found = what_if(MODEL, work, gpu_roofs(gpu(key)))
    assert found.decode.bound.by == "memory" and found.decode.intensity == pytest.approx(1, abs=0.35)


# -- the figure ------------------------------------------------------------------------------------------------------------


def test_roofs_are_drawn_through_the_ridge() -> None:
    columns = roof_columns(ROOFS, "float32", 0.1, 100)
    assert columns["x"] == [0.1, 10, 100] and columns["y"] == [1e9, 1e11, 1e11]
    assert "ridge at 10.0 FLOP/B" in columns["at"][0]
    assert roof_columns(None, "float32", 0.1, 100)["x"] == [] and len(roof_columns(ROOFS, "float32", 20, 100)["x"]) == 2
    assert "in tf32" in roof_columns(gpu_roofs(gpu("l4")), "float32", 1, 1000)["at"][0]


def test_the_hover_says_what_binds() -> None:
    (row,) = zip(*[step_columns([made()], ROOFS, "float32")[name] for name in ("bound", "share", "took")])
    assert row == ("memory: moving the bytes takes 20.0 times as long as the arithmetic", "40 %", "100 ms")
    assert step_columns([made()], None, "float32")["bound"] == ["measure the roofs to see"]
    assert bound_words("compute", 1.5) == "arithmetic: it takes 1.50 times as long as moving the bytes"
    assert times(math.inf) == "∞ times"


def test_axes_hold_everything_and_ticks_are_readable() -> None:
    low, high = span([0.5, 300.0])
    assert low < 0.5 and high > 300
    low, high = span([2.0])
    assert math.log10(high / low) == pytest.approx(3)
    assert span([]) == (10**-0.5, 10**2.5)
    assert [power(e) for e in (-1, 0, 2, 9, 11, 15)] == ["0.1", "1", "100", "1 G", "100 G", "1 P"]


def test_shapes_tell_the_phases_and_a_tap_finds_its_step() -> None:
    figure = RooflineFigure()
    many = [
        s
        for n, phase, flops in ((1, "prefill", 9e10), (2, "decode", 2e8), (3, "decode", 4e8))
        if (s := step_of(step(n, phase, flops=flops)))
    ]
    work = workload(batch=2, context=64, bits=0, running=32, dtype="float32")
    whats = [what_if(MODEL, work, r) for r in (ROOFS, gpu_roofs(gpu("l4")))]
    figure.show(many, 2, "float32", ROOFS, whats[1].roofs, "float32", whats)
    assert figure.steps["prefill"].data["step"] == [1] and figure.steps["decode"].data["step"] == [2, 3]
    assert figure.here.data == {"x": [0.5], "y": [2e9]}
    assert len(figure.modelled["decode"].data["x"]) == 2 and len(figure.sweeps[1].data["x"]) == len(BATCHES)
    x, y = figure.root.x_range, figure.root.y_range
    assert x.start < 0.5 and x.end > max(figure.modelled["prefill"].data["x"]) and y.end > whats[1].roofs.peak_of("float32")
    assert figure.nearest(0.51, 2.1e9) == 2 and figure.nearest(1.0, 4.1e9) == 3 and figure.nearest(0.5, 1e14) is None
    assert figure.nearest(-1.0, 5.0) is None and figure.nearest(float("nan"), 1.0) is None
    figure.show([], -1, "float32", None, None, "bf16", [])
    assert all(not source.data["x"] for source in (*figure.steps.values(), figure.here, figure.device, figure.gpu))


@pytest.mark.parametrize(
    ("name", "title"), [("smollm2-135m", "smollm2-135m"), ("/a/b-model/", "b-model"), ("org/name", "org/name"), ("/", "/")]
)
def test_a_directory_is_named_by_its_last_part(name: str, title: str) -> None:
    rows = RooflineRows()
    assert rows.title == "the model"
    rows.started = msgspec.structs.replace(started(), model={"name": name})
    assert rows.title == title


def test_an_axis_stands_still_while_what_is_needed_fits() -> None:
    axis = (1.0, 1000.0)
    assert steady(axis, (2.0, 900.0)) == (1.0, 1000.0)
    assert steady(axis, (0.9, 1100.0)) == (1.0, 1000.0)  # some of the room around is used up
    assert steady(axis, (0.2, 900.0)) == (0.2, 900.0)
    assert steady(axis, (2.0, 9000.0)) == (2.0, 9000.0)
    assert steady(axis, (20.0, 900.0)) == (20.0, 900.0)  # more than a decade would be empty


def test_moving_a_knob_leaves_the_axes_and_what_was_measured_alone() -> None:
    """What moves lies in the layer above, so that the browser draws no more than that."""
    made = RooflineFigure()
    changed: list[str] = []

    def show(context: int) -> None:
        work = workload(batch=4, context=context, bits=0, running=32, dtype="float32")
        made.show([], -1, "float32", ROOFS, None, "float32", [what_if(MODEL, work, ROOFS)])

    show(512)
    levels = {id(r.data_source): r.level for r in made.root.renderers}
    for name, source in [("device", made.device), *((k, s) for k, s in made.modelled.items()), ("sweep", made.sweeps[0])]:
        source.on_change("data", lambda _attr, _old, _new, name=name: changed.append(name))
    ranges = (made.root.x_range.start, made.root.x_range.end, made.root.y_range.start, made.root.y_range.end)
    show(600)
    assert {"decode", "sweep"} <= set(changed) and "device" not in changed
    assert ranges == (made.root.x_range.start, made.root.x_range.end, made.root.y_range.start, made.root.y_range.end)
    assert {levels[id(s)] for s in (*made.modelled.values(), *made.sweeps, made.here)} == {"overlay"}
    assert {levels[id(s)] for s in (*made.steps.values(), made.device, made.gpu)} == {"glyph"}
