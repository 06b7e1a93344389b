"""What the KV cache page says where there is nothing to show: beside an engine what to press, of a recorded run where to look."""

from explorer.i18n import _

LIVE = {
    "tables": _("No request holds a block now. Press one of the scenes above, or send a prompt on the Run page."),
    "usage": _("Nothing has run yet. Press a scene, or send a prompt on the Run page."),
    "lookups": _("No request has been admitted yet. Send the same prompt twice: the second hits the first one's blocks."),
}
RECORDED = {
    "tables": _("No request holds a block at this step of the recorded run."),
    "usage": _("Nothing has run yet at this step of the recorded run: step forward."),
    "lookups": _("No request has been admitted yet at this step of the recorded run: step forward."),
}
