"""What an engine records, and of which it records nothing."""

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.events.types import (
    LogitsRecorded,
    RequestFinished,
    StepDone,
    TokenSampled,
)
from tests.engine.engines import Checked, tiny_engine
from tests.engine.greedy import GREEDY, check_against_oracle, prompt


def test_nobody_watching_records_nothing_and_late_watchers_see_all():
    engine = tiny_engine()
    engine.add_request(prompt(0, 9), GREEDY)
    engine.step()
    engine.step()
    checked = Checked(engine)  # attaches late
    checked.check()
    checked.run()
    steps = [e.step for e in checked.events if isinstance(e, StepDone)]
    assert steps == list(range(3, 13))
    assert [e.request_id for e in checked.events if isinstance(e, RequestFinished)] == ["req-0"]


def test_record_gives_a_log_of_the_block():
    engine = tiny_engine()
    with engine.record() as log:
        engine.watch("tokens", top=2)
        engine.generate([prompt(0, 5)], GREEDY)
    engine.generate([prompt(1, 5)], GREEDY)
    tokens = log.since(0).events
    sampled = [e for e in tokens if isinstance(e, TokenSampled)]
    assert [e.index for e in sampled] == list(range(12)) and all(len(e.top) == 2 for e in sampled)


def test_watch_names_what_it_knows():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="unknown observation 'tiles'"):
        engine.watch("tiles")
    with pytest.raises(ValueError, match="no unfinished request"):
        engine.watch("logits", "nobody")


def test_the_logits_of_a_sibling_can_be_watched_until_it_ends():
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 5), SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True))
    checked.step()
    engine.watch("logits", f"{request_id}#1", positions=50)
    engine.committer.finish(engine.siblings(request_id)[0], "length")
    with pytest.raises(ValueError, match="unfinished"):
        engine.watch("logits", request_id)
    checked.run()
    seen = [e.request_id for e in checked.events if isinstance(e, LogitsRecorded)]
    assert seen == [f"{request_id}#1"] * 5 and not engine.recorder.watched_logits


def test_a_logit_of_plus_infinity_is_recorded_as_its_limit(monkeypatch):
    engine = tiny_engine()
    run = engine.runner.run
    infinite = torch.zeros(engine.model_config.vocab_size)
    infinite[[7, 11]] = torch.inf
    monkeypatch.setattr(engine.runner, "run", lambda scheduled: run(scheduled) + infinite)
    checked = Checked(engine)
    engine.watch("logits", engine.add_request(prompt(0, 5), SamplingParams(seed=1, max_tokens=1)))
    checked.run()
    (recorded,) = [e for e in checked.events if isinstance(e, LogitsRecorded)]
    logits = np.frombuffer(recorded.logits, "<f2").astype(np.float32) + recorded.max_logit
    assert np.flatnonzero(logits > -np.inf).tolist() == [7, 11] and logits[7] == logits[11] == 0


def test_measured_cache_times_leave_no_trace():
    engine = tiny_engine()
    checked = Checked(engine)
    engine.add_request(prompt(0, 9), GREEDY)
    checked.step()
    with_cache, without = engine.measure_cache([4, 16, 64])
    assert len(with_cache) == len(without) == 3 and all(t > 0 for t in with_cache + without)
    checked.check()
    done = checked.run()
    check_against_oracle([done["req-0"]], [prompt(0, 9)])
    with pytest.raises(ValueError, match="lengths"):
        engine.measure_cache([0])
    with pytest.raises(ValueError, match="lengths"):
        engine.measure_cache([129])
