"""The engine in its own process: what is sent arrives, what is refused is said, and a death is a message."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from engine import messages as m
from engine.config import EngineConfig
from engine.events.state import State
from engine.events.types import EngineStarted, Snapshot, StepDone
from engine.process import EngineProcess
from engine.request import SamplingParams
from engine.worker import Outbox
from tests.engine.engines import tiny_engine
from tests.engine.fake_engine import FakeEngine

FAKE = "tests.engine.fake_engine:FakeEngine"


class Client:
    """Polls an EngineProcess as the explorer's session does, and keeps what came."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.got: list[Any] = []

    def until(self, wanted: Callable[[Any], bool], timeout: float = 180.0) -> Any:
        """The first message that came from now on (or waits already) for which ``wanted`` holds."""
        end = time.monotonic() + timeout
        seen = 0
        while time.monotonic() < end:
            for message in self.got[seen:]:
                if wanted(message):
                    return message
            seen = len(self.got)
            self.got += self.process.poll(0.05)
        raise AssertionError(f"nothing came; got {self.got[-5:]}")

    def kind(self, kind: type, **fields: Any) -> Any:
        return self.until(lambda x: isinstance(x, kind) and all(getattr(x, k) == v for k, v in fields.items()))

    def events(self) -> list[Any]:
        return [e for x in self.got if isinstance(x, m.Events) for e in x.events]

    def text(self, request_id: str) -> str:
        return "".join(x.text for x in self.got if isinstance(x, m.TextPiece) and x.request_id == request_id)


@pytest.fixture
def client() -> Iterator[Client]:
    with EngineProcess(EngineConfig(model="fake", num_kv_blocks=4), factory=FAKE) as process:
        client = Client(process)
        client.kind(m.Ready)
        yield client
    assert not process.alive


def test_a_request_runs_and_its_events_rebuild_the_state(client: Client) -> None:
    request_id = client.process.add_request("count", SamplingParams(max_tokens=5), owner="ada")
    done = client.kind(m.Finished, request_id=request_id)
    assert (done.reason, done.text, done.last) == ("length", "0 1 2 3 4 ", True)
    assert client.text(request_id) == done.text
    client.until(lambda x: isinstance(x, m.Events) and any(isinstance(e, StepDone) and e.step == 5 for e in x.events))
    events = client.events()
    assert isinstance(events[0], EngineStarted) and isinstance(events[1], Snapshot)
    view = State().apply_all(events).requests[request_id]
    assert (view.owner, view.status, view.num_output_tokens) == ("ada", "finished", 5)
    assert client.process.unfinished == []


def test_loading_is_told_before_ready() -> None:
    with EngineProcess(EngineConfig(model="slow"), factory=FAKE) as process:
        client = Client(process)
        request_id = process.add_request("early", SamplingParams(max_tokens=2))  # it waits for the engine
        client.kind(m.Finished, request_id=request_id)
        kinds = [type(x) for x in client.got]
        assert kinds.index(m.Loading) < kinds.index(m.Ready) < kinds.index(m.Events)
        assert process.started is not None and process.started.device == {"name": "fake"}


def test_events_come_in_batches(client: Client) -> None:
    client.process.add_request("count", SamplingParams(max_tokens=400))
    client.kind(m.Finished)
    batches = [x for x in client.got if isinstance(x, m.Events)]
    assert sum(isinstance(e, StepDone) for e in client.events()) > 300
    assert len(batches) < 100  # 400 steps of half a millisecond, at 40 batches a second


@pytest.mark.parametrize(
    ("command", "name", "error"),
    [
        (lambda p: p.add_request("", request_id="bad"), "AddRequest", "empty"),
        (lambda p: p.reconfigure(max_num_seqs=0), "Reconfigure", "max_num_seqs"),
        (lambda p: p.reconfigure(colour="red"), "Reconfigure", "colour"),
        (lambda p: p.watch("dreams"), "Watch", "dreams"),
        (lambda p: p.watch("tokens", bottom=3), "Watch", "bottom"),
        (lambda p: p.step(0), "Step", "at least 1"),
    ],
)
def test_a_bad_command_is_rejected_and_the_engine_goes_on(client: Client, command: Any, name: str, error: str) -> None:
    command(client.process)
    rejected = client.kind(m.Rejected)
    assert rejected.command == name and error in rejected.error
    assert client.process.unfinished == []
    client.kind(m.Finished, request_id=client.process.add_request("still there", SamplingParams(max_tokens=1)))


def test_what_cannot_be_sent_is_refused_at_once(client: Client) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        client.process.add_request("lone \ud800 surrogate")
    with pytest.raises(ValueError, match="cannot be sent"):
        client.process.add_request([2**70])
    client.process.add_request("sleepless", SamplingParams(max_tokens=10**6), request_id="x")
    with pytest.raises(ValueError, match="unused"):
        client.process.add_request("again", request_id="x")


@pytest.mark.parametrize(
    "command",
    [
        lambda p: p.add_request([1, 2.5]),
        lambda p: p.add_request("x", request_id=5),
        lambda p: p.add_request("x", cache_salt=3),
        lambda p: p.add_chat([{"role": "user", "content": None}]),
        lambda p: p.step("many"),
        lambda p: p.measure_cache([1.5]),
        lambda p: p.watch(5),
        lambda p: p.abort(None),
    ],
)
def test_a_field_of_another_type_is_refused_at_once_and_the_engine_still_listens(client: Client, command: Any) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        command(client.process)
    assert client.process.unfinished == []
    client.kind(m.Finished, request_id=client.process.add_request("still there", SamplingParams(max_tokens=1)))


def test_a_command_too_large_for_a_frame_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.messages.MAX_FRAME", 1000)
    with pytest.raises(ValueError, match="at most 1,000"):
        client.process.add_request("x" * 1000)


def test_a_frame_that_is_no_command_ends_the_engine_rather_than_leaving_it_deaf(client: Client) -> None:
    assert client.process._child is not None
    client.process._child.commands.put(b"\xc1")
    assert "no message" in client.kind(m.Died).stderr


def test_ids_that_are_taken_are_passed_over(client: Client) -> None:
    endless = SamplingParams(max_tokens=10**6)
    assert client.process.add_request("a", endless, request_id="req-0") == "req-0"
    assert client.process.add_request("b", endless) == "req-1"


def test_abort_and_abort_owner(client: Client) -> None:
    endless = SamplingParams(max_tokens=10**6)
    first = client.process.add_request("a", endless, owner="ada")
    second = client.process.add_request("b", endless, owner="bob")
    client.kind(m.TextPiece, request_id=second)
    client.process.abort(first)
    assert client.kind(m.Finished, request_id=first).reason == "abort"
    client.process.abort_owner("bob")
    assert client.kind(m.Finished, request_id=second).reason == "abort"


def test_pause_step_resume(client: Client) -> None:
    request_id = client.process.add_request("count", SamplingParams(max_tokens=10**6))
    client.kind(m.TextPiece)
    client.process.pause()
    at = client.kind(m.LoopState, paused=True).step
    assert client.process.paused
    client.got.clear()
    client.process.step(3)
    assert client.kind(m.LoopState, paused=True).step == at + 3
    assert [x.paused for x in client.got if isinstance(x, m.LoopState)] == [False, True]
    client.process.abort(request_id)  # its end is told although no step runs
    client.kind(m.Finished, request_id=request_id)
    client.got.clear()
    client.process.step()  # nothing to run
    assert client.kind(m.LoopState, paused=True).step == at + 3
    client.process.resume()
    client.kind(m.LoopState, paused=False)
    client.kind(m.Finished, request_id=client.process.add_request("on", SamplingParams(max_tokens=1)))


def test_observing_can_be_switched(client: Client) -> None:
    client.process.observe(False)
    client.kind(m.Finished, request_id=client.process.add_request("unseen", SamplingParams(max_tokens=3)))
    client.got.clear()
    client.process.add_request("unseen too", SamplingParams(max_tokens=3))
    client.kind(m.Finished)
    assert client.events() == []
    client.process.observe(True)
    client.kind(m.Events)
    assert isinstance(client.events()[0], EngineStarted) and isinstance(client.events()[1], Snapshot)


def test_a_step_that_fails_ends_its_requests_only(client: Client) -> None:
    bad = client.process.add_request("fail")
    assert client.kind(m.Finished, request_id=bad).reason == "error"
    assert "no memory for the logits" in client.kind(m.Rejected, command="Step").error
    client.kind(m.Finished, request_id=client.process.add_request("fine", SamplingParams(max_tokens=1)))


def test_killed_mid_run_then_restarted(client: Client) -> None:
    client.process.watch("tokens", top=3)
    lost = client.process.add_request("count", SamplingParams(max_tokens=10**6))
    client.kind(m.TextPiece)
    assert client.process.pid is not None
    os.kill(client.process.pid, signal.SIGKILL)
    died = client.kind(m.Died)
    assert died.returncode == -signal.SIGKILL and "signal 9" in died.error
    assert died.request_ids == [lost] and "fake engine up" in died.stderr
    assert not client.process.alive and client.process.poll() == []
    with pytest.raises(RuntimeError, match="restart"):
        client.process.add_request("too late")
    client.got.clear()
    client.process.restart()
    client.kind(m.Ready)
    client.kind(m.Finished, request_id=client.process.add_request("again", SamplingParams(max_tokens=2)))
    client.until(lambda x: isinstance(x, m.Events) and any(getattr(e, "name", "") == "watch" and e.new == 3 for e in x.events))


@pytest.mark.parametrize(("prompt", "code", "words"), [("crash", 1, "block 3 is in two places"), ("exit", 7, "last words")])
def test_a_crash_comes_with_its_last_lines(client: Client, prompt: str, code: int, words: str) -> None:
    client.process.add_request(prompt)
    died = client.kind(m.Died)
    assert died.returncode == code and words in died.stderr


def test_a_start_that_fails_says_why() -> None:
    with EngineProcess(EngineConfig(model="missing"), factory=FAKE) as process:
        client = Client(process)
        assert "no model called 'missing'" in client.kind(m.Died).error
        process.restart(EngineConfig(model="fake"))
        client.kind(m.Ready)


def test_stop_ends_even_a_step_that_hangs(client: Client) -> None:
    client.process.add_request("sleep")
    time.sleep(0.2)
    start = time.monotonic()
    client.process.stop(patience=0.5)
    assert time.monotonic() - start < 3 and not client.process.alive
    client.process.stop()  # nothing to do
    assert client.process.poll() == []


def test_the_child_ends_when_its_parent_is_killed() -> None:
    script = (
        "import time; from engine.config import EngineConfig; from engine.process import EngineProcess\n"
        f"p = EngineProcess(EngineConfig(model='fake'), factory={FAKE!r}); p.start()\n"
        "while p.started is None: p.poll(0.1)\n"
        "p.add_request('sleep'); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while time.monotonic() < end and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class StuckConnection:
    """A reader that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.frames: list[bytes] = []

    def send_bytes(self, frame: bytes) -> None:
        self.free.wait(10)
        self.frames.append(frame)


class Unsendable:
    """Not an event, and nothing that MessagePack knows."""


def test_what_cannot_be_sent_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("engine.worker.os._exit", codes.append)
    outbox = Outbox(StuckConnection())  # type: ignore[arg-type]
    outbox.message(Unsendable())
    outbox.close()
    assert 4 in codes


def test_a_slow_reader_loses_events_but_never_text_and_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.MAX_PENDING_BYTES", 20_000)
    engine = FakeEngine(EngineConfig(model="fake", num_kv_blocks=4))
    connection = StuckConnection()
    outbox = Outbox(connection)  # type: ignore[arg-type]
    engine.recorder.attach(outbox.event)
    outbox.event(engine.started_event())
    outbox.event(engine.snapshot())
    engine.add_request("count", SamplingParams(max_tokens=10**6), owner="ada", request_id="r")
    total = 3
    for _ in range(300):
        for output in engine.step():
            outbox.text(output.request_id, output.index, output.new_text, 1)
        total += 1
        if outbox.overflowed:
            outbox.resume(engine.snapshot())
            total += 1
    connection.free.set()
    outbox.close()
    got = [x for frame in connection.frames for x in m.decode_batch(frame).messages]
    batches = [x for x in got if isinstance(x, m.Events)]
    dropped = sum(x.dropped for x in batches)
    assert dropped > 0 and dropped + sum(len(x.events) for x in batches) == total
    assert all(isinstance(x.events[0], Snapshot) for x in batches if x.dropped)
    assert max(sum(300 for _ in x.events) for x in batches) <= 20_000
    state = State().apply_all(e for x in batches for e in x.events)
    assert state.snapshot().requests[0].num_computed_tokens == engine.snapshot().requests[0].num_computed_tokens
    assert "".join(x.text for x in got if isinstance(x, m.TextPiece)) == "".join(f"{i} " for i in range(300))


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x81\xa7message\xa5Batch", msgspec.msgpack.encode({"message": "Rm"})]
)
def test_frames_that_are_no_messages_are_value_errors(frame: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        m.decode_batch(frame)
    with pytest.raises(ValueError, match="no message"):
        m.decode_command(frame)


# -- the real engine ----------------------------------------------------------------------------------------------------------


def test_the_real_engine_killed_and_restarted() -> None:
    """Greedy texts are those of an engine in this process, before and after a kill; the events rebuild its state."""
    engine = tiny_engine()
    prompts, params = ["the quick", "brown fox jumps", "over"], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = engine.generate(prompts, params)
    wanted = [o.text for o in alone]
    with EngineProcess(engine.config) as process:
        client = Client(process)
        client.kind(m.Ready)
        assert process.started is not None and process.started.config["block_size"] == 4
        process.watch("tokens", top=2)
        ids = [process.add_request(p, params, owner="ada") for p in prompts]
        assert [client.kind(m.Finished, request_id=i).text for i in ids] == wanted == [client.text(i) for i in ids]
        client.until(lambda x: isinstance(x, m.Events) and any(isinstance(e, StepDone) and not _more(e) for e in x.events))
        state = State().apply_all(client.events())
        assert [state.requests[i].num_output_tokens for i in ids] == [24] * 3 and state.num_used_blocks == 0
        assert [len(state.requests[i].output_token_ids) for i in ids] == [24] * 3

        branch = process.branch(ids[0], len(prompts[0]) + 4, 70, owner="ada")  # a byte is a token
        told = client.kind(m.Finished, request_id=branch)
        assert told.token_ids[:5] == [*alone[0].token_ids[:4], 70] and client.text(branch) == told.text
        assert "position must be" in client.kind(m.Rejected, request_id=process.branch(ids[0], 999, 70)).error
        beams = process.add_request(prompts[0], params.changed(beam_width=3, n=2))
        texts = [client.kind(m.Finished, request_id=beams, index=i) for i in (0, 1)]
        assert [o.text for o in engine.generate([prompts[0]], params.changed(beam_width=3, n=2))[0].outputs] == [
            t.text for t in texts
        ]
        assert process.unfinished == []

        endless = [process.add_request(p, SamplingParams(max_tokens=100, ignore_eos=True)) for p in prompts * 8]
        client.kind(m.TextPiece, request_id=endless[0])
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert set(client.kind(m.Died).request_ids) & set(endless)
        process.restart()
        again = process.add_request(prompts[0], params)
        assert client.kind(m.Finished, request_id=again).text == wanted[0]
        client.kind(m.Rejected, request_id=process.add_request("x" * 1_000_000))


def _more(e: StepDone) -> bool:
    return bool(e.num_running or e.num_waiting)


def test_a_process_that_the_engine_leaves_behind_holds_nobody_up():
    """It holds the engine's output open, so that there is always more to read."""
    process = EngineProcess(EngineConfig(model="fake", num_kv_blocks=4), factory="tests.engine.orphans:Orphaning")
    process.start()
    Client(process).kind(m.Ready)
    end = time.monotonic() + 60
    while not process._child.stderr:
        assert time.monotonic() < end
        time.sleep(0.02)
    (pid,) = (int(line.split()[1]) for line in process._child.stderr if line.startswith("orphan"))
    ended = threading.Thread(target=process.stop, daemon=True)
    ended.start()
    try:
        ended.join(60)
        assert not ended.is_alive() and not process.alive
    finally:
        os.kill(pid, signal.SIGKILL)
