"""That what changes reaches the browser, and soon: two ways in which Panel 1.9 loses messages, and what mends them.

Both are seen on a busy machine only, and then a knob does nothing, or the end of a measurement is never told.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import panel as pn
from bokeh.document import Document
from panel.io import document as outbox


def connected(document: Document) -> None:
    """The browser has this document: what changes from now on must be sent to it.

    Panel counts a browser as connected only once it has drawn everything, and drops many a change that comes before that, since "the
    document is sent whole on connecting". It was sent whole long before: on a slow machine seconds lie between.
    """
    pn.state._connected[document] = True


def deliver(document: Document) -> None:
    """Send messages that were left lying. Called often: with nothing there it looks into two tables.

    While Panel waits for one message to be written, the next ones are put aside for a task of their own. If that task runs only after the
    first has taken the mark of work to do away, it does nothing, and they lie there until something else is sent.
    """
    if document in outbox._WRITE_MSGS and document not in outbox._WRITE_BLOCK:
        outbox._WRITE_BLOCK[document] = True
        outbox._dispatch_write_task(document, outbox._dispatch_msgs, document)


@contextmanager
def as_one() -> Iterator[None]:
    """What changes inside is sent, and drawn by the browser, as one; and it is sent as soon as the socket is free.

    Mostly it is not free, since the browser is just being told that its message has come; Panel then looks again after 10 ms.
    """
    document = pn.state.curdoc
    with pn.io.hold(document):
        yield
    if document is not None and document in outbox._WRITE_MSGS:
        task = asyncio.get_running_loop().create_task(_send_when_free(document))
        _sending.add(task)
        task.add_done_callback(_sending.discard)


_sending: set["asyncio.Task[None]"] = set()  # a task that nobody holds may go


async def _send_when_free(document: Document) -> None:
    for connection in list(outbox._WRITE_MSGS.get(document, ())):
        lock = getattr(connection._socket, "write_lock", None)
        if lock is not None:
            with await lock.acquire():
                pass
    await outbox._dispatch_msgs(document)
