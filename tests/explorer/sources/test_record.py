"""The shipped runs, repeated with the default model; and the script that makes them."""

import pytest

from engine.events.log import EventLog
from explorer.compare.words import report
from explorer.runs import SHIPPED
from explorer.sources.record import MAKERS
from explorer.sources.rerun import verify


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n == "full-pool" else []) for n in SHIPPED])
def test_a_shipped_run_comes_out_the_same(name: str) -> None:
    """Or, on a processor that rounds otherwise, differs only where the choice was that close."""
    done = verify(EventLog.load(SHIPPED[name].path))
    c = done.comparison
    assert done.notes == [] and c.weights == ()
    assert all(pair.a is not None and pair.b is not None for pair in c.pairs)
    for pair in c.pairs:
        assert pair.first is None or (pair.first.cause.kind == "numerics" and not pair.first.cause.fault), report(c)
    if not c.computing and not c.versions:
        assert c.same, report(c)


def test_the_script_makes_every_run_that_is_shipped() -> None:
    assert set(MAKERS) == set(SHIPPED)
    for name, (_make, knobs) in MAKERS.items():
        started = EventLog.load(SHIPPED[name].path).started
        assert started is not None and {**started.config, **knobs} == started.config
