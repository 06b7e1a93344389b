"""Who may look: a bare ``panel serve`` listens on all addresses, so visitors from other machines are refused unless wanted."""

import ipaddress
import os
from typing import Any

import panel as pn

from explorer.i18n import _


def refusal(request: Any) -> str | None:
    """Why this visitor is not served; None when it is welcome. ``request`` is the session's HTTP request (None: no visitor at all)."""
    if request is None or os.environ.get("CUTAWAY_ALLOW_REMOTE") == "1" or pn.config.oauth_provider or pn.config.basic_auth:
        return None
    address = getattr(request, "remote_ip", None)
    if address is not None and is_loopback(address):
        return None
    return _(
        "This Cutaway serves its own machine only, and you come from {address}. Whoever runs it can allow other machines: start it "
        "with CUTAWAY_ALLOW_REMOTE=1 on a network you trust, or with a login (panel serve --basic-auth ... --cookie-secret ...)."
    ).format(address=address or _("an unknown address"))


def is_loopback(address: str) -> bool:
    """Whether an address, as a server sees its visitor, is this machine. A name or garbage is not."""
    try:
        parsed = ipaddress.ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
