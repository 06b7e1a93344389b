"""Python imports this at its start in every process that has this folder on its path: no connection leaves this machine."""

import socket

_connect, _connect_ex = socket.socket.connect, socket.socket.connect_ex
_LOCAL = ("127.", "::1", "localhost")


def _check(self: socket.socket, address: object) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOCAL):  # type: ignore[index]
        raise OSError(f"a notebook must run offline, and this one wanted to reach {address}")


def connect(self: socket.socket, address: object) -> None:
    _check(self, address)
    _connect(self, address)  # type: ignore[arg-type]


def connect_ex(self: socket.socket, address: object) -> int:
    _check(self, address)
    return _connect_ex(self, address)  # type: ignore[arg-type]


socket.socket.connect = connect  # type: ignore[assignment]
socket.socket.connect_ex = connect_ex  # type: ignore[assignment]
