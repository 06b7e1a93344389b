"""What the device reaches and what the engine holds, measured on a tiny engine; and the way there from another process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams, device_study
from engine.events.hardware import MemoryMeasured, RoofsMeasured
from engine.events.log import EventLog
from engine.hardware import roofs
from engine.messages import STUDIES, Study
from engine.worker import Mailbox, Worker
from tests.engine.engines import tiny_engine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(roofs, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofs, "MATRIX", {"cpu": 256})
    monkeypatch.setattr(roofs.measured_roofs, "__kwdefaults__", {**roofs.measured_roofs.__kwdefaults__, "seconds": 0.01})
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path))
    return tmp_path


def test_roofs_are_measured_once_kept_and_told(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    assert engine.measure_roofs(only_kept=True) is None
    with engine.record() as log:
        first = engine.measure_roofs()
        assert not first.kept and list((quick / "roofs").iterdir())
        monkeypatch.setattr(roofs, "matrix_rate", lambda *_a: 7e9)
        again = engine.measure_roofs(only_kept=True)
        fresh = engine.measure_roofs(again=True)
    assert again.kept and (again.peak, again.copy_bandwidth) == (first.peak, first.copy_bandwidth)
    assert not fresh.kept and set(fresh.peak.values()) == {7e9}
    assert [e.peak for e in log if isinstance(e, RoofsMeasured)] == [first.peak, again.peak, fresh.peak]
    assert (first.device, first.threads) == ("cpu", torch.get_num_threads())
    assert engine.measure_roofs().peak == fresh.peak  # the newer took the place of the older on the disk


def test_a_device_without_room_is_the_askers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_a: Any, **_o: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for 128 MiB")

    monkeypatch.setattr(device_study, "measured_roofs", full)
    with pytest.raises(ValueError, match="could not be measured: no memory"):
        tiny_engine().measure_roofs()


def test_memory_is_that_of_the_tensors() -> None:
    engine = tiny_engine()
    with engine.record() as log:
        held = engine.measure_memory()
    parameters = engine.parts.model_facts["num_parameters"]
    assert held.linear_bytes + held.other_bytes == 4 * parameters  # float32, each once
    assert held.model_bytes >= 4 * parameters and held.process_bytes > held.model_bytes
    assert held.kv_pool_bytes == engine.kv.nbytes == engine.pool.num_blocks * engine.kv.bytes_per_block
    assert held.logit_bytes == 4 * engine.model_config.vocab_size and held.activation_tokens == 127  # max_model_len - 1
    hidden = 4 * held.activation_tokens * engine.model_config.hidden_size
    assert hidden < held.activation_bytes < 100 * hidden
    (told,) = [e for e in log if isinstance(e, MemoryMeasured)]
    assert told.activation_bytes == held.activation_bytes


def test_more_tokens_take_more_and_whoever_runs_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    alone = engine.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    engine.add_request([3, 4, 5], SamplingParams(temperature=0, max_tokens=6))
    engine.step()
    many = engine.measure_memory().activation_bytes
    monkeypatch.setattr(device_study, "TOKENS", 32)
    few = engine.measure_memory().activation_bytes
    assert 2 < many / few < 8  # 127 against 32
    engine.check_integrity()
    done = None
    while engine.has_unfinished():
        for output in engine.step():
            done = output.finished or done
    assert done is not None and list(done.token_ids) == list(alone)


def test_shared_storages_count_once() -> None:
    a = torch.zeros(100)
    assert device_study.storage_bytes([a, a.view(10, 10), a[:5], {"b": torch.zeros(3, dtype=torch.int8)}]) == 403
    loop: list[Any] = [a]
    loop.append(loop)
    assert device_study.storage_bytes(loop) == 400


@pytest.mark.parametrize("what", ["measure_roofs", "measure_memory"])
def test_both_are_studies_that_another_process_may_ask_for(what: str) -> None:
    assert what in STUDIES
    engine, box = tiny_engine(), Mailbox()
    worker = Worker(engine, box, None)  # type: ignore[arg-type]
    worker.observe(True)
    worker._obey(Study(what))
    worker._obey(Study(what, {"colour": "red"}))
    messages = box.take(0)
    kinds = [type(event).__name__ for m in messages if hasattr(m, "events") for event in m.events]
    assert kinds[-1] == ("RoofsMeasured" if what == "measure_roofs" else "MemoryMeasured")
    (refused,) = [m for m in messages if type(m).__name__ == "Rejected"]
    assert "colour" in refused.error


def test_both_events_survive_a_file(tmp_path: Path) -> None:
    engine = tiny_engine()
    with engine.record() as log:
        found = engine.measure_roofs(), engine.measure_memory()
    log.save(tmp_path / "run.cutaway")
    read = [e for e in EventLog.load(tmp_path / "run.cutaway") if isinstance(e, (RoofsMeasured, MemoryMeasured))]
    assert [e.peak for e in read if isinstance(e, RoofsMeasured)] == [found[0].peak]
    assert [e.linear_bytes for e in read if isinstance(e, MemoryMeasured)] == [found[1].linear_bytes]
