"""That what changes reaches the browser: two ways in which Panel 1.9 loses messages, and what mends them.

Both are seen on a busy machine only, and then a knob does nothing, or the end of a measurement is never told.
"""

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
