"""An engine and its explorer in one call."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from engine.config import EngineConfig
from engine.request import SamplingParams
from explorer.notebook.widgets import Explorer
from explorer.sources.opening import launch

OWN = ("prompt", "params", "chat")  # what is no field of EngineConfig


def explore(
    model: str = "smollm2-135m", prompt: str | Sequence[str] | None = None, *, params: SamplingParams | None = None,
    chat: bool = False, **config: Any,
) -> Explorer:  # fmt: skip
    """Start an engine in a process of its own and return its Explorer at once; the model loads meanwhile.

    ``prompt``: one text or several, sent right away with ``params``; with ``chat`` through the model's chat template.
    ``config``: fields of EngineConfig, such as ``max_num_seqs=4``. ValueError for an unknown name or a value out of range.
    The engine ends with ``explorer.source.session.stop()``, and with the kernel.
    """
    known = [*OWN, *(f.name for f in fields(EngineConfig))]
    for name in config:
        if name not in known:
            raise ValueError(f"unknown argument {name!r} of explore; known: {', '.join(known)}")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt or ())
    if not all(isinstance(each, str) for each in prompts):
        raise ValueError(f"prompt must be text or a list of texts, got {prompt!r:.200}")
    explorer = Explorer(launch(model=model, **config))
    session, owner = explorer.source.session, explorer.clock.owner
    assert session is not None
    for each in prompts:
        if chat:
            session.chat([{"role": "user", "content": each}], params or SamplingParams(), owner)
        else:
            session.submit(each, params or SamplingParams(), owner)
    return explorer
