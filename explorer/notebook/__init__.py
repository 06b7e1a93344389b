"""The explorer in notebooks: JupyterLab, Notebook 7, VS Code. Everything here is reached from ``explorer`` itself.

    from engine import Engine
    from explorer import Explorer, KVCacheView, RunView, explore

    engine = Engine()
    KVCacheView(engine)                     # one page; as the last line of a cell it shows itself
    Explorer(engine)                        # all pages, with tabs
    Explorer.load("run.cutaway")            # a saved run; no engine, no model
    explore(prompt="The capital of France is", max_num_seqs=4)     # starts an engine in a process of its own

The cell returns at once: an Engine of the kernel is stepped by a thread of ours, which ``engine.generate()`` and its other
methods take turns with. Views are the app's own (``explorer.mirror`` draws them without Panel) and follow also while another
cell runs; with JupyterLab 4.4 and later controls work meanwhile too.
"""

from explorer.notebook.explore import explore
from explorer.notebook.widgets import Explorer, View, view_class

__all__ = ["Explorer", "View", "explore", "view_class"]
