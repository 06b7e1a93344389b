"""Driving a server over HTTP, against a small stand-in."""

import socket
import time
from collections.abc import Iterator

import pytest

from engine.load.arrivals import Burst, Constant
from engine.load.generate import Load, as_words, conversations
from engine.load.http import Target, drive_http, request_body, served_models
from engine.load.lengths import Equal, Uniform
from engine.request import SamplingParams
from tests.engine.load.server import Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def load(**fields) -> Load:
    return Load(**{"arrivals": Burst(), "num_requests": 4, "prompt": Equal(5), "output": Equal(6), **fields})


def test_tokens_come_one_by_one(server: Server) -> None:
    made = load(arrivals=Constant(50.0), output=Uniform(2, 9), priorities={3: 1}, sampling={"seed": 9})
    server.gap_s = 0.01
    results = drive_http(Target(server.url, "counter", headers={"Authorization": "Bearer x"}), conversations(made))
    arrivals = {f"load-{c.turns[0].index}": c.turns[0] for c in conversations(made)}
    m = results.measures()
    assert m.num_completed == 4 and m.num_prompt_tokens == 20 and m.num_cached_tokens == 8
    for record in results.records:
        assert record.num_output_tokens == arrivals[record.request_id].max_tokens
        assert record.ttft_s >= 0.01 and record.finish_s >= record.token_times_s[-1] and record.priority == 3
    assert 0.008 < m.itl_s.p50 < 0.1
    prompts = sorted(body["prompt"] for body in server.got)
    assert prompts == sorted(list(a.token_ids) for a in arrivals.values())
    body = server.got[0]
    assert body["path"] == "/v1/completions" and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["priority"], body["seed"], body["ignore_eos"], body["temperature"]) == (
        "counter",
        3,
        9,
        True,
        0.0,
    )
    assert server.headers_seen[0]["Authorization"] == "Bearer x"


def test_conversations_in_words(server: Server) -> None:
    made = load(num_requests=2, turns=Equal(2), output=Equal(3), sampling={"ignore_eos": False})
    results = drive_http(Target(server.url + "/v1/", "counter", as_text=True), conversations(made))
    assert results.measures().num_completed == 4
    assert {r.num_prompt_tokens for r in results.records} == {5, 5 + 3 + 5} and "ignore_eos" not in server.got[0]
    for talk in conversations(made):
        first, second = (as_words(turn.token_ids) for turn in talk.turns)
        assert any(b["prompt"] == first for b in server.got)
        assert any(b["prompt"].split() == [*first.split(), "w0", "w1", "w2", *second.split()] for b in server.got)


def test_conversations_in_token_ids_are_refused(server: Server) -> None:
    with pytest.raises(ValueError, match="as_text"):
        drive_http(Target(server.url, "counter"), conversations(load(turns=Equal(2))))


@pytest.mark.parametrize(("mode", "tokens"), [("pairs", 6), ("ids", 9)])
def test_pieces_that_are_not_one_token(server: Server, mode: str, tokens: int) -> None:
    """Text held back (the usage has the count), and pieces that say their ids: 1, 2, 1, 2, 1, 2."""
    server.mode = mode
    results = drive_http(Target(server.url, "counter"), conversations(load(num_requests=1)))
    (record,) = results.records
    assert (record.outcome, record.num_output_tokens) == ("length", tokens)


@pytest.mark.parametrize("mode", ["429", "503"])
def test_a_server_that_is_full(server: Server, mode: str) -> None:
    server.mode = mode
    results = drive_http(Target(server.url, "counter"), conversations(load()))
    assert results.measures().outcomes["queue full"] == 4 == results.measures().num_requests and not results.records


@pytest.mark.parametrize(
    ("mode", "message"), [("400", "400 .*no, thank you"), ("error", "out of memory"), ("hang up", "Incomplete|finish_reason")]
)
def test_what_goes_wrong_is_told(server: Server, mode: str, message: str) -> None:
    import re

    server.mode = mode
    results = drive_http(Target(server.url, "counter"), conversations(load(num_requests=2)))
    assert results.measures().outcomes["error"] == 2 and re.search(message, results.first_error), results.first_error


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        target = Target(f"http://127.0.0.1:{taken.getsockname()[1]}", "counter")
        results = drive_http(target, conversations(load(num_requests=1)))
        assert "Refused" in results.first_error or "refused" in results.first_error
        with pytest.raises(OSError):
            served_models(target)


def test_limits_of_the_client(server: Server) -> None:
    server.gap_s = 0.05
    results = drive_http(Target(server.url, "counter"), conversations(load(num_requests=9)), max_connections=3)
    assert results.num_refused == 6 and results.measures().num_completed == 3
    results = drive_http(Target(server.url, "counter"), conversations(load(num_requests=9)), max_waiting=2)
    assert results.num_refused == 7 and results.measures().num_completed == 2


@pytest.mark.parametrize("mode", ["count", "a connection each"])
def test_a_run_that_is_stopped_hangs_up(server: Server, mode: str) -> None:
    server.gap_s, server.mode = 0.05, mode
    begun = time.monotonic()
    results = drive_http(Target(server.url, "counter"), conversations(load(num_requests=3, output=Equal(200))), stop_s=0.2)
    assert time.monotonic() - begun < 5
    assert results.measures().outcomes["abort"] == 3 and all(0 < r.num_output_tokens < 100 for r in results.records)


def test_models_and_addresses(server: Server) -> None:
    assert served_models(Target(server.url, "")) == ["counter"]
    with pytest.raises(RuntimeError, match="does not list models: 404"):
        served_models(Target(server.url + "/other", ""))
    for bad in ("localhost:8000", "ftp://x", "http://", "http://x:y"):
        with pytest.raises(ValueError, match="url must be"):
            Target(bad, "m")
    with pytest.raises(ValueError, match="max_connections"):
        drive_http(Target(server.url, "m"), [], max_connections=0)


def test_only_what_is_not_the_default_is_sent() -> None:
    body = request_body(Target("http://x", "m"), [1, 2], SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4))
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "top_p", "stream", "stream_options"}
