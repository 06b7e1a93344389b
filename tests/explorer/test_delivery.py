"""What Panel leaves lying is sent."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from bokeh.document import Document
from panel.io import document as outbox

from explorer.delivery import connected, deliver


class Socket:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.free = asyncio.Event()

    async def write(self, message: str) -> None:
        await self.free.wait()
        self.written.append(message)


class Connection:
    def __init__(self, socket: Socket) -> None:
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


def test_a_document_is_connected_once_the_browser_has_spoken() -> None:
    document = Document()
    connected(document)
    assert outbox.state._connected[document] is True
