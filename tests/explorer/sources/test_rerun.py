"""Re-run and verify: a real engine does again what it did, event by event, and what differs is named with its cause."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams
from engine.events.log import EventLog
from engine.events.types import (
    BlockAllocated,
    BlockCopied,
    BlockEvicted,
    BlockFreed,
    BlockShared,
    Event,
    PoolResized,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
)
from engine.loading import load_parts
from explorer.compare.comparison import compare
from explorer.compare.words import report, verdict
from explorer.sources.plan import Add, plan_of
from explorer.sources.rerun import ModelMissing, changed_plan, main, verify
from tests.engine.engines import tiny_engine, tiny_parts
from tests.explorer.compare.runs import busy_run, steps

POOL = (BlockAllocated, BlockCopied, BlockEvicted, BlockFreed, BlockShared, PoolResized, PrefixLookup, RequestPreempted)


@pytest.fixture(scope="module")
def run() -> EventLog:
    return busy_run()


def again(log: EventLog, **changes: Any) -> Any:
    return verify(log, plan=changed_plan(plan_of(log), changes), parts=tiny_parts()[0])


def deeds(log: EventLog, kinds: tuple[type[Event], ...]) -> list[Any]:
    """These events without their times."""
    return [
        {**{f: getattr(e, f) for f in e.__struct_fields__}, "time_ns": 0, "kind": type(e)} for e in log if isinstance(e, kinds)
    ]


def test_the_run_has_what_a_repetition_must_repeat(run: EventLog) -> None:
    kinds = {type(e) for e in run}
    assert {RequestPreempted, BlockShared, PoolResized, BlockEvicted} <= kinds
    assert {e.reason for e in run if isinstance(e, RequestFinished)} == {"length", "abort"}


def test_a_repetition_is_the_same_down_to_the_blocks(run: EventLog, tmp_path: Path) -> None:
    run.save(tmp_path / "run.cutaway")
    saved = EventLog.load(tmp_path / "run.cutaway")
    done = again(saved)
    assert done.notes == [] and done.comparison.environment == ()
    assert done.comparison.same, report(done.comparison)
    assert verdict(done.comparison).startswith("The same:")
    assert deeds(done.log, POOL) == deeds(run, POOL)
    assert sum(pair.num_equal for pair in done.comparison.pairs) > 80


def test_branches_and_beams_are_repeated_too() -> None:
    engine = tiny_engine(num_kv_blocks=80)
    engine.watch("tokens", top=3)
    with engine.record() as log:
        source = engine.add_request([5, 6, 7], SamplingParams(max_tokens=12, seed=3, ignore_eos=True))
        engine.add_request([9, 8, 7], SamplingParams(max_tokens=6, beam_width=3, n=2, temperature=0, ignore_eos=True))
        steps(engine, 8)
        engine.branch(source, 6, 44, owner="ann")
        steps(engine, 60)
    engine.close()
    plan = plan_of(log)
    assert [type(a).__name__ for a in plan.actions] == ["Add", "Add", "Branch"] and plan.num_requests == 3
    done = verify(log, plan=plan, parts=tiny_parts()[0])
    assert done.notes == [] and done.comparison.same, report(done.comparison)
    assert deeds(done.log, POOL) == deeds(log, POOL)
    branch = next(p.a for p in done.comparison.pairs if p.a is not None and p.a.owner == "ann")
    assert branch.token_ids[3] == 44 and sum(len(p.a.token_ids) for p in done.comparison.pairs if p.a is not None) >= 36


def test_a_run_that_was_cut_is_repeated_up_to_there() -> None:
    engine = tiny_engine()
    engine.watch("tokens", top=2)
    with engine.record() as log:
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
        steps(engine, 10)
    engine.close()
    done = again(log)
    assert done.comparison.same and done.log.last_step == 10


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"temperature": 2.5}, "distribution"),
        ({"top_k": 1}, "distribution"),
        ({"seed": 99}, "draw"),
        ({"max_tokens": 5}, "end"),
    ],
)
def test_one_thing_changed_is_named_as_the_cause(run: EventLog, changes: dict[str, Any], kind: str) -> None:
    c = again(run, **changes).comparison
    first = c.first
    assert first is not None and first.cause.kind == kind, report(c)
    (name,) = changes
    assert name in {d.name for d in first.cause.changed}, first.cause
    assert first.a.token_ids[: first.index] == first.b.token_ids[: first.index]
    if kind == "draw":
        assert first.tokens[0].u != first.tokens[1].u
    if kind == "distribution":
        assert first.tokens[0].u == first.tokens[1].u


def test_another_batch_size_gives_the_same_tokens_on_another_schedule(run: EventLog) -> None:
    """Tokens depend on request and seed, not on the batch; in float32 what differs must be a near tie."""
    c = again(run, max_num_seqs=1).comparison
    assert c.schedule is not None and [d.name for d in c.config] == ["max_num_seqs"]
    for pair in c.pairs:
        if pair.first is not None and pair.first.cause.kind != "end":  # the abort and the knob come at another place
            assert pair.first.cause.kind in ("numerics", "distribution") and not pair.first.cause.fault


def test_other_weights_are_the_cause(run: EventLog, tmp_path: Path) -> None:
    from tests.engine.engines import write_byte_tokenizer
    from tests.engine.model import tiny

    made = tiny.make("llama", tmp_path, seed=5) if "seed" in tiny.make.__code__.co_varnames else tiny.make("qwen2", tmp_path)
    write_byte_tokenizer(tmp_path)
    other = load_parts(EngineConfig(model=str(made.path), dtype="float32", device="cpu"))
    plan = plan_of(run)
    done = verify(run, plan=dataclasses.replace(plan, config=plan.config.changed(model=str(made.path))), parts=other)
    assert [d.name for d in done.comparison.weights] == ["sha256"]
    first = done.comparison.first
    assert first is not None and first.cause.kind in ("distribution", "draw")
    assert "sha256" in first.cause.words and "Different beforehand, the model" in "\n".join(report(done.comparison))


def test_a_log_without_tokens_says_so() -> None:
    engine = tiny_engine()
    with engine.record() as log:
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        steps(engine, 20)
    engine.close()
    c = again(log).comparison
    assert c.unwatched and c.same and "which tokens, the logs do not hold" in verdict(c)


def test_what_cannot_be_repeated_is_said() -> None:
    engine = tiny_engine(max_num_seqs=2)
    engine.watch("tokens", top=2)
    engine.add_request(list(range(5, 30)), SamplingParams(max_tokens=4, ignore_eos=True))
    steps(engine, 20)
    engine.add_request([9, 8, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    steps(engine, 2)
    with engine.record() as log:
        late = engine.add_request(list(range(5, 30)), SamplingParams(max_tokens=4, ignore_eos=True))
        steps(engine, 40)
    engine.close()
    plan = plan_of(log)
    assert [a.request_id for a in plan.actions if isinstance(a, Add)] == [late]
    assert len(plan.notes) == 2 and "Running already" in plan.notes[0] and "cached prefixes" in plan.notes[1]
    c = verify(log, plan=plan, parts=tiny_parts()[0]).comparison
    pair = next(p for p in c.pairs if p.a is not None and p.a.request_id == late)
    assert pair.first is None and pair.num_equal == 4


def test_a_log_whose_beginning_was_dropped_says_so(run: EventLog) -> None:
    short = EventLog(capacity=120)
    short.extend(run)
    assert short.dropped
    plan = plan_of(short)
    assert "no longer in the log" in plan.notes[0]
    assert compare(short, short).same


def test_a_model_that_is_not_here_is_named(run: EventLog, tmp_path: Path) -> None:
    run.save(tmp_path / "run.cutaway")
    log = EventLog.load(tmp_path / "run.cutaway")
    plan = plan_of(log)
    gone = dataclasses.replace(plan, config=plan.config.changed(model="no/such-model-here"))
    with pytest.raises(ModelMissing, match=r"no/such-model-here.*SHA-256 [0-9a-f]{64}"):
        verify(log, plan=gone)
    assert log.at(log.last_step).num_blocks and len(list(log)) == len(run)  # it can be looked at all the same


def test_a_device_that_is_not_here_is_replaced_and_said(run: EventLog) -> None:
    from explorer.sources.rerun import here

    plan = plan_of(run)
    far = dataclasses.replace(plan, config=plan.config.changed(device="cuda:7"))
    there = here(far)
    assert there.config.device == "auto" and "repeated with what there is" in there.notes[-1]


def test_a_configuration_of_another_version_is_refused(run: EventLog) -> None:
    log = EventLog()
    started = run.started
    log.append(
        type(started)(**{**{f: getattr(started, f) for f in started.__struct_fields__}, "config": {**started.config, "warp": 9}})
    )
    with pytest.raises(ValueError, match=r"does not fit this version.*warp"):
        plan_of(log)
    with pytest.raises(ValueError, match="EngineStarted"):
        plan_of(EventLog())


def test_a_refused_action_is_a_note_and_the_rest_goes_on(run: EventLog) -> None:
    done = again(run, max_model_len=20)
    assert any("not done again: Add" in note for note in done.notes)
    assert any(p.b is None for p in done.comparison.pairs) and not done.comparison.same


def test_an_unknown_change_is_refused(run: EventLog) -> None:
    for bad in ({"warp": 1}, {"temperature": -1}, {"max_num_seqs": 0}):
        with pytest.raises(ValueError):
            changed_plan(plan_of(run), bad)


def test_the_command(run: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, saved = tmp_path / "run.cutaway", tmp_path / "again.cutaway"
    run.save(path)
    assert main([str(path), "--save", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("The same:")
    assert compare(run, EventLog.load(saved)).same
    assert main([str(path), "--set", "temperature=3"]) == 1
    assert "the distribution moved (temperature: 0.8 → 3" in capsys.readouterr().out
    (tmp_path / "junk").write_bytes(b"junk")
    for arguments in (["junk"], ["none.cutaway"]):
        assert main([str(tmp_path / arguments[0])]) == 2
        assert "error:" in capsys.readouterr().err
    assert main([str(path), "--set", "temperature"]) == 2


def test_progress_is_told(run: EventLog) -> None:
    told: list[tuple[int, int]] = []
    report_: Callable[[int, int], None] = lambda done, total: told.append((done, total))
    verify(run, parts=tiny_parts()[0], progress=report_)
    assert told[-1] == (run.last_step, run.last_step)
