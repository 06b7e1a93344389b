"""The JavaScript that a mirror needs: our runtime, and BokehJS from the installed package. Nothing is fetched."""

import functools
from pathlib import Path

import bokeh

HERE = Path(__file__).parent


@functools.cache
def runtime_source() -> str:
    """One ES module: ``mount``, ``unpack``, ``isDark``, ``showError``."""
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("theme.js", "controls.js", "runtime.js"))


@functools.cache
def bokeh_source() -> str:
    """BokehJS (about 1.2 MB), of the version that writes the documents."""
    return (Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js").read_text(encoding="utf-8")
