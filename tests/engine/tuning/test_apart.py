"""Trials in processes of their own: what they measure, and how each of them may die."""

import subprocess
import threading
import time

import pytest

from engine.config import EngineConfig
from engine.load.arrivals import Burst
from engine.load.generate import Load
from engine.load.lengths import Equal, Uniform
from engine.measures import Limits
from engine.tuning.apart import ProcessTrials, run_apart
from engine.tuning.search import Budget, Search
from engine.tuning.space import POOL_SHARE, Space, as_text
from engine.tuning.trial import Task, TrialFailed, run_trial
from tests.engine.engines import tiny_parts
from tests.engine.tuning.fake import LIMITS, LOAD, formula, run_named


def task(max_num_seqs: int) -> Task:
    return Task(EngineConfig(max_num_seqs=max_num_seqs), LOAD, LIMITS, run_named)


def test_the_report_comes_back() -> None:
    assert repr(run_apart(task(16), 60).measures) == repr(formula(EngineConfig(max_num_seqs=16), LIMITS))  # NaN equals nothing


@pytest.mark.parametrize(
    ("max_num_seqs", "reason"),
    [
        (1, "^its process ended with status 7$"),
        (2, "^of 3 requests: 1 error$"),
        (3, "^its process ended with signal 9: words on the way$"),
        (5, "^MemoryError: no room$"),
    ],
)
def test_a_trial_that_fails_says_why(max_num_seqs: int, reason: str) -> None:
    with pytest.raises(TrialFailed, match=reason):
        run_apart(task(max_num_seqs), 60)


def test_one_that_hangs_is_ended_in_time() -> None:
    processes: list[subprocess.Popen] = []
    began = time.monotonic()
    with pytest.raises(TrialFailed, match=r"it took more than 1\.5 s"):
        run_apart(task(4), 1.5, processes.append)
    assert time.monotonic() - began < 20 and processes[0].poll() is not None


def test_one_that_hangs_ends_with_whoever_started_it() -> None:
    trials = ProcessTrials()
    future = trials.submit(task(4), None)
    while not trials._processes:
        time.sleep(0.01)
    (process,) = trials._processes
    trials.close()
    assert process.poll() is not None and isinstance(future.exception(0), TrialFailed)
    # Without a chance to end it: the end of its standard input is enough.
    orphans: list[subprocess.Popen] = []
    ready, failed = threading.Event(), []

    def wait_for_it() -> None:
        try:
            run_apart(task(4), 60, lambda process: (orphans.append(process), ready.set()))
        except TrialFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert ready.wait(30)
    time.sleep(0.2)  # the order is written
    assert orphans[0].stdin is not None
    orphans[0].stdin.close()
    thread.join(30)
    assert not thread.is_alive() and orphans[0].poll() is not None and failed == ["its process ended with status 1"]


def test_a_search_over_processes_outlives_its_trials() -> None:
    space = Space({"max_num_seqs": (1, 3, 8)})
    found = Search(LOAD, LIMITS, space=space, budget=Budget(trials=3), workers=2, measure=run_named).run()
    assert sorted((t.knobs["max_num_seqs"], t.state) for t in found.trials) == [(1, "failed"), (3, "failed"), (8, "done")]
    assert found.chosen is found.trials[0] and found.stopped == "trials"


def test_three_trials_of_a_real_engine() -> None:
    _parts, made = tiny_parts()
    config = EngineConfig(
        model=str(made.path), dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=32, block_size=4, max_num_seqs=2
    )
    load = Load(arrivals=Burst(), num_requests=6, prompt=Uniform(4, 12), output=Equal(5))
    space = Space({"max_num_seqs": (1, 2, 4), POOL_SHARE: (0.25, 1.0), "enable_chunked_prefill": (True, False)})
    found = Search(load, Limits(ttft_s=60.0), config, space=space, budget=Budget(trials=3, repeats=0), seed=1).run()
    assert [t.state for t in found.trials] == ["done"] * 3, found.table()
    for trial in found.trials:
        m = trial.measures
        assert m is not None and m.steps is not None
        assert m.outcomes["length"] == 6 and m.num_output_tokens == 30 and m.good_share == 1.0 and m.itl_s.count == 24
        assert m.steps.running_max <= trial.knobs["max_num_seqs"]
        assert trial.config.num_kv_blocks == (32 if trial.knobs[POOL_SHARE] == 1.0 else 8)
    assert found.trials[0].config == config and found.text == as_text(found.chosen.config) and found.front()


def test_a_request_that_never_fits_fails_the_trial_with_its_reason() -> None:
    _parts, made = tiny_parts()
    config = EngineConfig(model=str(made.path), dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=4, block_size=4)
    load = Load(arrivals=Burst(), num_requests=2, prompt=Equal(40), output=Equal(5))
    with pytest.raises(TrialFailed, match="of 2 requests: 2 error; the first error: the prompt has 40 tokens"):
        run_trial(Task(config, load, LIMITS, run_trial))
