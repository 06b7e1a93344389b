"""Trials over a Ray cluster (docs.ray.io): each is one Ray task, which runs it in a fresh process of the node that it comes to.

Every node needs this package and the model. Trials of one search should meet equal machines: what differs between two nodes would
be taken for what differs between two configurations.
"""

import logging
from concurrent.futures import Future
from typing import Any

from engine.tuning.apart import run_apart
from engine.tuning.trial import Report, Task, TrialFailed


def _on_node(task: Task, seconds: float | None) -> Report | str:
    """The report, or why there is none (an exception would come back wrapped in one of Ray's)."""
    try:
        return run_apart(task, seconds)
    except TrialFailed as error:
        return str(error)


class RayTrials:
    """``address``: of a cluster; None: the one of RAY_ADDRESS or of this process, or a new local one. ``cpus``, ``gpus``: what a trial
    reserves. ValueError where Ray is not installed, RuntimeError where no cluster can be reached."""

    def __init__(self, address: str | None = None, *, cpus: float = 1, gpus: float = 0) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError("executor='ray' needs Ray: pip install 'cutaway[ray]'") from None
        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray has no class of its own for a cluster that cannot be reached or does not come up
                raise RuntimeError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
        # A node that is lost is a failed trial, not a second try.
        self._remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_on_node)
        self._refs: list[Any] = []

    def submit(self, task: Task, seconds: float | None) -> "Future[Report]":
        ref = self._remote.remote(task, seconds)
        self._refs.append(ref)
        done: Future[Report] = Future()
        done.set_running_or_notify_cancel()
        ref.future().add_done_callback(lambda answer: _pass_on(answer, done))
        return done

    def close(self) -> None:
        for ref in self._refs:
            self._ray.cancel(ref, force=True)
        if self._ours:
            self._ray.shutdown()


def _pass_on(answer: "Future[Report | str]", done: "Future[Report]") -> None:
    error = answer.exception()
    if error is not None:
        done.set_exception(TrialFailed(f"Ray: {str(error).strip() or type(error).__name__}"[:500]))
        return
    found = answer.result()
    if isinstance(found, str):
        done.set_exception(TrialFailed(found))
    else:
        done.set_result(found)
