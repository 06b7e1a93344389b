"""The real app with the stand-in engine, as a server of its own: ``python -m tests.ui.fake_app PORT``."""

import sys
from pathlib import Path

import panel as pn

from engine.config import EngineConfig
from explorer.session import Session
from tests.explorer.fake import FakeProcess

MAIN = Path(__file__).parents[2] / "apps" / "main.py"


class Mortal(FakeProcess):
    """Dies of a prompt that says so."""

    def add_request(self, prompt, params, *, owner="local", **more):  # type: ignore[no-untyped-def]
        if prompt == "die":
            self.die("the engine's process was ended by signal 9")
        return super().add_request(prompt, params, owner=owner, **more)


if __name__ == "__main__":
    Session._shared = Session(Mortal(EngineConfig(num_kv_blocks=64), auto=True, step_s=0.03))
    pn.serve(
        {"/apps": MAIN}, port=int(sys.argv[1]), address="127.0.0.1", show=False, threaded=False, num_threads=2,
        check_unused_sessions_milliseconds=300, unused_session_lifetime_milliseconds=600,
    )  # fmt: skip
