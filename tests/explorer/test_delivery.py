"""What Panel leaves lying is sent."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from bokeh.document import Document
from panel.io import document as outbox
from panel.io.state import set_curdoc
from tornado.locks import Lock

from explorer.delivery import as_one, connected, deliver


class Socket:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.free = asyncio.Event()

    async def write(self, message: str) -> None:
        await self.free.wait()
        self.written.append(message)


class BusySocket:
    """Somebody writes a message of several parts at the moment."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.write_lock = Lock()

    async def write(self, message: str) -> None:
        self.written.append(message)


class Connection:
    def __init__(self, socket: "Socket | BusySocket") -> None:
        self._socket = socket
        self.protocol = SimpleNamespace(create=lambda _kind, events: events[0])


def test_messages_that_come_while_another_is_written_are_not_left_lying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(outbox.extra_socket_handlers, Socket, lambda connection, msg: [connection._socket.write(msg)])

    async def run() -> tuple[list[str], list[str]]:
        document, socket = Document(), Socket()
        connections: Any = [Connection(socket)]
        outbox.schedule_write_events(document, connections, ["first"])  # type: ignore[list-item]
        await asyncio.sleep(0)  # it is being written now
        socket.free.set()  # and will be done before the turn of the task that is made for the second
        outbox.schedule_write_events(document, connections, ["second"])  # type: ignore[list-item]
        await asyncio.sleep(0.05)
        before = list(socket.written)
        deliver(document)
        await asyncio.sleep(0.05)
        deliver(document)
        await asyncio.sleep(0.05)
        return before, socket.written

    with ThreadPoolExecutor(1) as thread:  # of its own: where browser tests ran before, this one has a loop that runs
        before, after = thread.submit(asyncio.run, run()).result()
    assert after == ["first", "second"]
    assert before == ["first"], "Panel no longer leaves messages lying: deliver() may go"


def test_what_was_drawn_is_sent_as_soon_as_the_socket_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(outbox.extra_socket_handlers, BusySocket, lambda connection, msg: [connection._socket.write(msg)])

    async def run() -> list[list[str]]:
        document, socket = Document(), BusySocket()
        connections: Any = [Connection(socket)]
        seen = []
        with await socket.write_lock.acquire(), set_curdoc(document):
            with as_one():
                outbox.schedule_write_events(document, connections, ["answer"])  # type: ignore[list-item]
            await turns()
            seen.append(list(socket.written))
        await turns()  # no time passes: Panel alone would look again in 10 ms
        seen.append(list(socket.written))
        await asyncio.sleep(0.05)
        return [*seen, list(socket.written)]

    async def turns() -> None:
        for _turn in range(8):
            await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(asyncio.run, run()).result() == [[], ["answer"], ["answer"]]


def test_without_a_document_nothing_is_sent() -> None:
    with as_one():
        pass


def test_a_document_is_connected_once_the_browser_has_spoken() -> None:
    document = Document()
    connected(document)
    assert outbox.state._connected[document] is True
