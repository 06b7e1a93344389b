"""Runs of a tiny random model in which much happens, for comparing and repeating."""

from typing import Any

from engine import SamplingParams
from engine.events.log import EventLog
from tests.engine.engines import tiny_engine


def busy_run(seed: int = 0, **config: Any) -> EventLog:
    """Requests that come at different steps, fork, are preempted, aborted and changed; knobs that move, some of them draining."""
    engine = tiny_engine(**{"num_kv_blocks": 20, "max_num_seqs": 4, "seed": seed, **config})
    engine.watch("tokens", top=5)
    with engine.record() as log:
        common = list(range(5, 30))
        engine.add_request([*common, 40], SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, ignore_eos=True))
        engine.add_request([*common, 41, 42], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), owner="ann")
        steps(engine, 3)
        forked = engine.add_request(common[:9], SamplingParams(max_tokens=14, n=3, temperature=1.5, ignore_eos=True))
        engine.add_request(
            common, SamplingParams(max_tokens=20, seed=7, repetition_penalty=1.3, ignore_eos=True), cache_salt="ann"
        )
        steps(engine, 5)
        engine.update_sampling(forked, temperature=0.3, by="bob")
        engine.reconfigure(max_num_seqs=3, by="bob")
        steps(engine, 4)
        engine.abort("req-0", "tired of it")
        engine.reconfigure(block_size=8, by="ann")
        engine.add_request([3, 4, 5], SamplingParams(max_tokens=6, ignore_eos=True))
        steps(engine, 200)
        engine.add_request([*common, 40], SamplingParams(max_tokens=9, temperature=0.8, ignore_eos=True))
        steps(engine, 200)
    engine.close()
    return log


def steps(engine: Any, count: int) -> None:
    for _ in range(count):
        if not engine.has_unfinished():
            return
        engine.step()
