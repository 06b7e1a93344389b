"""A view without Panel: what a page's object tree shows, as data; and a small script that draws it.

A page's view is a tree of Panel objects. A ``Mirror`` walks it once and gives a *spec*: every node with its kind and its
properties. It then watches the same objects and gives *operations*: what has changed since. ``runtime_source()`` is one ES
module that draws a spec into an element and applies operations; what a person does there comes back as *actions*, which the
mirror carries out on the same Panel objects. So there is one implementation of every page, and the mirror knows nothing of
who shows it: notebooks (``explorer.notebook``) send operations as they come, a page saved as HTML plays recorded ones.

    mirror = Mirror(view)                 # any ExplorerView, Panel layout or pane
    spec = mirror.spec()                  # {"version", "root", "nodes", "sheets", "modules", "dark"...}: plain values and bytes
    view.clock.goto(12, 0, 99); view.update()
    operations = mirror.drain()           # [[node, property, value], ...] since spec() or the last drain()
    mirror.apply(["n7", "click", None])   # an action
    mirror.close()

``to_text`` and ``to_message`` carry both as JSON: bytes become base64, or buffers beside it. The page's side:

    <script type="module">
      import { mount } from "<blob or data address of runtime_source()>";
      const drawn = mount(element, spec, { bokeh: source, send: (action) => {} });
      drawn.apply(operations);            // in order, none left out
      drawn.destroy();
    </script>

``spec`` may be given as ``JSON.parse`` of ``to_text(spec)``. ``bokeh`` is the text of ``bokeh_source()`` or a function that
gives it (or a promise of it); it is asked for only when there is a figure, once a page. Without ``send`` the page is for
looking at: controls are disabled, hover works. Every canvas sends ["n3", "state", {"action": {...}}] when it has drawn and
some wait for an answer (their history), so a recording has to hold that: see ``Mirror.open_canvases``. Light or dark follows
the page: JupyterLab's and VS Code's attributes, ``data-theme`` on the root element, else what the system prefers.
"""

from explorer.mirror.mirror import Mirror
from explorer.mirror.source import bokeh_source, runtime_source
from explorer.mirror.wire import to_message, to_text

__all__ = ["Mirror", "bokeh_source", "runtime_source", "to_message", "to_text"]
