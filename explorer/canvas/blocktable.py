"""The block tables of the requests: logical block to physical block, one row a request."""

from typing import Any

import param
from panel.custom import AnyWidgetComponent

from explorer.canvas.base import parts

ESM = parts("blocktable.js")


class BlockTable(AnyWidgetComponent):
    """Rows as ``explorer.kv_cache.rows.table_rows`` gives them. Watch ``selected_request`` and ``selected_block``."""

    rows = param.List(default=[], doc="One dict a request; the browser redraws only the rows that changed.")
    omitted = param.Integer(default=0, doc="Requests that are not among the rows.")
    selected_request = param.String(default="", doc="The request that is lit up, '' for none; a click sets it.")
    selected_block = param.Integer(default=-1, doc="The physical block that is ringed, -1 for none; a click sets it.")
    message = param.String(default="", doc="Shown when there is no row.")

    _esm = ESM

    def __init__(self, **params: Any) -> None:
        params.setdefault("sizing_mode", "stretch_width")
        super().__init__(**params)
