"""Re-run and verify in a process of its own."""

import time

from engine.events.log import EventLog
from explorer.sources.verifying import Verifier
from tests.engine.events.simulate import simulate
from tests.explorer.compare.runs import busy_run


def said(verifier: Verifier, seconds: float = 120) -> str:
    until = time.monotonic() + seconds
    while not verifier.said()[1] and time.monotonic() < until:
        time.sleep(0.05)
    assert verifier.said()[1], verifier.said()
    return verifier.said()[0]


def test_a_run_is_repeated_and_the_report_comes_back() -> None:
    text = said(Verifier(busy_run()))
    assert text.startswith("The same: every token"), text
    assert "req-0: " in text and "Repeating" not in text


def test_what_cannot_be_repeated_is_a_text_too() -> None:
    log = EventLog()
    log.extend(simulate(5))
    assert "The model of this run is not here: simulated" in said(Verifier(log))


def test_it_can_be_stopped() -> None:
    verifier = Verifier(busy_run())
    until = time.monotonic() + 60
    while verifier._process is None and time.monotonic() < until:
        time.sleep(0.01)
    verifier.stop()
    assert verifier._process is not None and verifier._process.wait(10) != 0
