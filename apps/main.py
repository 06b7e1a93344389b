"""The app: ``panel serve apps/`` (or ``make app``), then open http://localhost:5006/apps.

The engine runs in a process of its own, which starts with the server; everybody who comes shares it. Environment:

CUTAWAY_MODEL                   model to run: a known name, a directory, a .gguf file, a Hugging Face id (default smollm2-135m)
CUTAWAY_DEVICE, CUTAWAY_DTYPE   "auto" (the default), "cpu", "cuda"; "auto", "float32", "bfloat16", "float16"
CUTAWAY_MAX_NUM_SEQS, CUTAWAY_MAX_NUM_BATCHED_TOKENS, CUTAWAY_MAX_MODEL_LEN, CUTAWAY_BLOCK_SIZE, CUTAWAY_NUM_KV_BLOCKS
                                as in EngineConfig; what is live on the page starts from these
CUTAWAY_ALLOW_REMOTE=1          serve visitors from other machines too, without a login: on a network you trust only
CUTAWAY_LANG                    language of the texts, where a catalogue for it exists
"""

import panel as pn

from explorer.access import refusal

pn.extension()
context = pn.state.curdoc.session_context if pn.state.curdoc is not None else None
why_not = refusal(context.request if context is not None else None)
if why_not is not None:
    pn.pane.Str(why_not, styles={"font-size": "16px", "max-width": "40em", "white-space": "normal"}).servable("Cutaway")
else:
    from explorer.serving import serve
    from explorer.session import Session

    session = Session.shared()
    session.start()
    serve(session)
