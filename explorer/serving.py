"""The frame of one browser session, put into the document that is being served."""

import functools
from typing import Any

import panel as pn
from panel.io.resources import get_dist_path

from engine.hardware.heap import settle
from explorer.shell import Shell
from explorer.url import format_query

_settle = functools.cache(settle)  # once a server, when all has been imported


def serve(session: Any) -> Shell:
    """Put the frame into the current document: what the app's script calls once a browser session."""
    _settle()
    arguments = pn.state.session_args
    search = format_query({name: values[-1].decode("utf-8", "replace") for name, values in arguments.items() if values})
    agent = str(pn.state.headers.get("User-Agent", "")) if pn.state.headers else ""
    # A browser that comes late (its first session has expired) gets a document of which Panel has not yet said where its
    # stylesheets are, and would look for them on a CDN.
    document = pn.state.curdoc
    assert document is not None
    document.template_variables.setdefault("dist_url", get_dist_path(cdn=False))
    shell = Shell(session, search, phone="Mobi" in agent)
    shell.document = document
    pn.state.onload(shell.begin)
    # The script's globals are gone when this runs, so it holds what it needs.
    pn.state.on_session_destroyed(functools.partial(_closed, shell))
    shell.page.servable()
    return shell


def _closed(shell: Shell, _context: Any) -> None:
    shell.close()
