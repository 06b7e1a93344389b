from types import SimpleNamespace

import panel as pn
import pytest

from explorer.access import is_loopback, refusal


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::ffff:127.0.0.1", True), ("192.168.1.4", False), ("::ffff:10.0.0.1", False),
     ("0.0.0.0", False), ("localhost", False), ("", False), ("fe80::1%eth0", False)],
)  # fmt: skip
def test_loopback(address: str, here: bool) -> None:
    assert is_loopback(address) is here


def test_visitors_from_elsewhere_are_refused_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTAWAY_ALLOW_REMOTE", raising=False)
    stranger, local = SimpleNamespace(remote_ip="192.0.2.7"), SimpleNamespace(remote_ip="127.0.0.1")
    assert refusal(local) is None
    assert refusal(None) is None  # the server's own warm-up
    message = refusal(stranger)
    assert message is not None and "192.0.2.7" in message and "CUTAWAY_ALLOW_REMOTE=1" in message
    assert refusal(SimpleNamespace()) is not None  # an address that nobody knows is not this machine
    monkeypatch.setenv("CUTAWAY_ALLOW_REMOTE", "1")
    assert refusal(stranger) is None


@pytest.mark.parametrize("variable", ["PANEL_BASIC_AUTH", "PANEL_OAUTH_PROVIDER"])
def test_a_login_lets_visitors_in(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("CUTAWAY_ALLOW_REMOTE", raising=False)
    monkeypatch.setenv(variable, "somebody")
    assert pn.config.basic_auth or pn.config.oauth_provider
    assert refusal(SimpleNamespace(remote_ip="192.0.2.7")) is None
