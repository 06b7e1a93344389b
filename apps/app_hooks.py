"""Called by the server itself: the engine starts with it, so that the model is loading before the first browser comes."""

from typing import Any


def on_server_loaded(server_context: Any) -> None:
    from explorer.session import Session

    Session.shared().start()
