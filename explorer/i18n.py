"""Texts on the screen go through gettext, so that a translation is a catalogue file and no change of code."""

import gettext
import os
from pathlib import Path

DOMAIN = "cutaway"
LOCALES = Path(__file__).parent / "locale"

# CUTAWAY_LANG=zh_CN picks a catalogue; without one (or without the catalogue) the texts stay as they are in the code.
_catalogue = gettext.translation(DOMAIN, LOCALES, languages=[os.environ.get("CUTAWAY_LANG", "en")], fallback=True)

_ = _catalogue.gettext
ngettext = _catalogue.ngettext
