"""The same search over a Ray cluster: a local one. Skipped where Ray is not installed."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.tuning.search import Budget, Search
from engine.tuning.space import Space
from tests.engine.tuning.fake import LIMITS, LOAD, formula, run_named

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A local one of two CPUs."""
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()  # it gives its own processes 30 s to come up, which is not enough on a machine that others use fully
        pytest.skip(f"no local Ray cluster came up in the time that Ray allows: {error}")
    yield ray
    ray.shutdown()


@pytest.mark.long
def test_trials_spread_over_a_local_cluster(cluster: Any) -> None:
    """A trial that dies is a failed trial there too, and the cluster goes on."""
    space = Space({"max_num_seqs": (1, 8, 16)})
    budget = Budget(trials=3, repeats=0)
    search = Search(LOAD, LIMITS, space=space, budget=budget, executor="ray", workers=2, measure=run_named, options={"cpus": 0.5})
    found = search.run()
    states = {t.knobs["max_num_seqs"]: (t.state, t.reason) for t in found.trials}
    assert states == {
        1: ("failed", "its process ended with status 7"),
        8: ("done", ""),
        16: ("done", ""),
    }
    assert found.chosen is not None and found.chosen.knobs == {"max_num_seqs": 16}
    assert repr(found.chosen.measures) == repr(formula(EngineConfig(max_num_seqs=16), LIMITS))
    assert cluster.is_initialized()  # it was there before, and stays


def test_a_search_that_is_cancelled_leaves_the_cluster_at_once(cluster: Any) -> None:
    search = Search(
        LOAD, LIMITS, EngineConfig(max_num_seqs=4), space=Space({"max_num_seqs": (4,)}), executor="ray", measure=run_named,
        progress=lambda found: search.cancel(),
    )  # fmt: skip
    found = search.run()
    assert found.stopped == "cancelled" and [t.state for t in found.trials] == ["stopped"] and found.seconds < 10


def test_a_cluster_that_is_not_there_is_said(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**_options: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", unreachable)
    with pytest.raises(RuntimeError, match="no Ray cluster at head:6379: nobody answers"):
        Search(LOAD, executor="ray", options={"address": "head:6379"}).run()
