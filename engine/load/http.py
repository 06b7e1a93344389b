"""Driving any server that speaks OpenAI's completions API, over HTTP with streaming; nothing but the standard library."""

import http.client
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from engine.load.agenda import Agenda, Due, Results
from engine.load.generate import Conversation, as_words
from engine.measures import COMPLETED, QUEUE_FULL
from engine.request import SamplingParams

_BUSY = (429, 503)  # too many requests; not now
_SENT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)


@dataclass(frozen=True)
class Target:
    """A server. ``url``: up to and with its version ("http://host:8000/v1"; "/v1" is put behind a bare host).

    ``as_text``: prompts of common words instead of token ids (which vLLM and this project's server take; conversations need text).
    ``timeout_s``: silence after which a request has failed. ``headers``: more of them, such as Authorization.
    """

    url: str
    model: str
    as_text: bool = False
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"url must be http://host[:port][/path] or https://..., got {self.url!r}")

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self.timeout_s)

    def path(self, of: str) -> str:
        return (urlsplit(self.url).path.rstrip("/") or "/v1") + of


def served_models(target: Target) -> list[str]:
    """What the server calls its models. OSError when it cannot be reached, RuntimeError when it answers something else."""
    connection = target.connect()
    try:
        connection.request("GET", target.path("/models"), headers=target.headers)
        response = connection.getresponse()
        body = response.read()
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise RuntimeError(f"{target.url} does not list models: {response.status} {_short(body)}") from None
    finally:
        connection.close()


def request_body(target: Target, prompt: list[Any], params: SamplingParams, priority: int = 0) -> dict[str, Any]:
    """What is sent: of the parameters, beside the length and the temperature, only those that are not the default."""
    defaults, wanted = asdict(SamplingParams()), asdict(params)
    body = {name: wanted[name] for name in _SENT if wanted[name] != defaults[name] or name == "temperature"}
    body |= {"priority": priority} if priority else {}
    return {
        "model": target.model, "prompt": " ".join(prompt) if target.as_text else prompt, "max_tokens": params.max_tokens, **body,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@dataclass(slots=True)
class _Said:
    """From a request's thread to the driver."""

    request_id: str
    kind: str  # "tokens" | "usage" | "ended"
    time_s: float
    count: int = 0
    text: str = ""
    outcome: str = ""
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, output and cached tokens


def drive_http(
    target: Target, load: Iterable[Conversation], *, max_waiting: int | None = None, max_connections: int = 256,
    stop_s: float | None = None,
) -> Results:  # fmt: skip
    """Run a load on a server to its end. Each request has a thread and a connection of its own; one that comes when ``max_connections``
    are open counts as "queue full", as one does that the server answers with 429 or 503.

    Times are the client's. A piece of the stream is taken for one token, unless it says its ``token_ids``; the server's usage
    corrects the count at the end. ValueError for a conversation in token ids: the answer's are not known.
    """
    return _HttpDriver(target, load, max_waiting, max_connections).run(stop_s)


class _HttpDriver:
    def __init__(self, target: Target, load: Iterable[Conversation], max_waiting: int | None, max_connections: int) -> None:
        if max_connections < 1:
            raise ValueError(f"max_connections must be an integer >= 1, got {max_connections!r}")
        self.target = target
        self.agenda = Agenda(load, (lambda ids: [as_words(ids)]) if target.as_text else list)
        self.results = Results(max_waiting)
        self.max_connections = max_connections
        self.said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self.streams: dict[str, _Stream] = {}
        self.origin = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.origin

    def run(self, stop_s: float | None) -> Results:
        stop, stopped = math.inf if stop_s is None else stop_s, False
        try:
            while self.results.live or self.agenda.next_time() < math.inf:
                if self.now() >= stop and not stopped:
                    stopped = True
                    self.agenda.stop()
                    self.close()
                for due in self.agenda.due(self.now()):
                    self._send(due)
                self._listen(min(self.agenda.next_time(), math.inf if stopped else stop))
        finally:
            self.close()
        return self.results

    def close(self) -> None:
        for stream in list(self.streams.values()):
            stream.close()

    def _send(self, due: Due) -> None:
        if due.rest and not self.target.as_text:
            raise ValueError("a conversation goes on from its answers' tokens, which a server does not tell: use as_text")
        if not self.results.has_room():
            return
        if len(self.streams) >= self.max_connections:
            self.results.num_refused += 1
            return
        request_id = f"load-{due.arrival.index}"
        body = request_body(self.target, due.prompt, due.arrival.params, due.arrival.priority)
        record = self.results.sent(request_id, due, self.now())
        if self.target.as_text:
            record.num_prompt_tokens = len(body["prompt"].split())  # until the server says
        self.streams[request_id] = _Stream(self, request_id, body)

    def _listen(self, until_s: float) -> None:
        """What the threads say, until ``until_s`` or for a moment."""
        try:
            self._take(self.said.get(timeout=max(0.0, min(0.1, until_s - self.now()))))
            while True:
                self._take(self.said.get_nowait())
        except queue.Empty:
            return

    def _take(self, said: _Said) -> None:
        if said.kind == "tokens":
            self.results.tokens(said.request_id, said.count, said.time_s)
        elif said.kind == "usage":
            self._usage(said)
        else:
            del self.streams[said.request_id]
            if said.outcome == QUEUE_FULL:
                self.results.ended(said.request_id, QUEUE_FULL, said.time_s)
                return
            due = self.results.ended(said.request_id, said.outcome, said.time_s, said.text if said.outcome == "error" else "")
            if said.outcome in COMPLETED:
                self.agenda.ended(due, [said.text], said.time_s)

    def _usage(self, said: _Said) -> None:
        """What the server counted: tokens whose text came in one piece with another's came when it did."""
        record = self.results.live[said.request_id][1]
        prompt, output, record.num_cached_tokens = said.usage
        record.num_prompt_tokens = prompt or record.num_prompt_tokens
        missing = output - record.num_output_tokens
        if missing > 0:
            last = record.token_times_s[-1] if record.token_times_s else said.time_s
            self.results.tokens(said.request_id, missing, last)
        elif missing < 0 and output:
            del record.token_times_s[output:]


class _Stream:
    """One request on its connection, read by a thread."""

    def __init__(self, driver: _HttpDriver, request_id: str, body: dict[str, Any]) -> None:
        self.driver = driver
        self.request_id = request_id
        self.body = body
        self.closed = False
        self.connection = driver.target.connect()
        self.sock: socket.socket | None = None  # the connection forgets its own where the server ends each answer by hanging up
        threading.Thread(target=self._run, name=request_id, daemon=True).start()

    def close(self) -> None:
        """Hang up, which ends the request; the thread then says so."""
        self.closed = True
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the other side was faster

    def _say(self, kind: str, **fields: Any) -> None:
        self.driver.said.put(_Said(self.request_id, kind, self.driver.now(), **fields))

    def _run(self) -> None:
        outcome, text = "error", ""
        try:
            outcome, text = self._talk()
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome, text = "error", f"{type(error).__name__}: {error}"
        finally:
            self.connection.close()
            self._say("ended", outcome="abort" if self.closed and outcome == "error" else outcome, text=text)

    def _talk(self) -> tuple[str, str]:
        """(outcome, the answer's text or what went wrong)."""
        target = self.driver.target
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **target.headers}
        self.connection.connect()
        self.sock = self.connection.sock
        if self.closed:  # before there was a line to hang up on
            return "error", "closed"
        self.connection.request("POST", target.path("/completions"), json.dumps(self.body), headers)
        response = self.connection.getresponse()
        if response.status in _BUSY:
            return QUEUE_FULL, ""
        if response.status != 200:
            return "error", f"{response.status} {_short(response.read(2000))}"
        pieces: list[str] = []
        reason = ""
        for data in _events(response):
            if "error" in data:
                return "error", _short(json.dumps(data["error"]).encode())
            for choice in data.get("choices") or ():
                piece, ids = choice.get("text") or "", choice.get("token_ids")
                if piece or ids:
                    pieces.append(piece)
                    self._say("tokens", count=len(ids) if ids else 1)
                reason = choice.get("finish_reason") or reason
            usage = data.get("usage")
            if usage:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                self._say("usage", usage=(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached))
        if reason not in COMPLETED:
            return "error", f"the stream ended with finish_reason {reason!r}"
        return reason, "".join(pieces)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, to its [DONE] or its end. ValueError for what is none."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError(f"an event of the stream must be an object, got {_short(data)}")
            yield value


def _short(body: bytes) -> str:
    text = body.decode("utf-8", "replace").strip()
    return text if len(text) <= 300 else text[:300] + " ..."
