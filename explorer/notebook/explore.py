"""An engine and its explorer in one call."""

from collections.abc import Sequence
from typing import Any

from engine.request import SamplingParams
from explorer.notebook.widgets import Explorer
from explorer.sources.opening import launch


def explore(
    model: str = "smollm2-135m", prompt: str | Sequence[str] | None = None, *, params: SamplingParams | None = None,
    chat: bool = False, **config: Any,
) -> Explorer:  # fmt: skip
    """Start an engine in a process of its own and return its Explorer at once; the model loads meanwhile.

    ``prompt``: one text or several, sent right away with ``params``; with ``chat`` through the model's chat template.
    ``config``: fields of EngineConfig, such as ``max_num_seqs=4``. ValueError for an unknown field or a value out of range.
    The engine ends with ``explorer.source.session.stop()``, and with the kernel.
    """
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
