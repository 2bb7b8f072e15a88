"""Where the ranks of a job meet: plain values, made by ``spec`` and opened by ``resolve``.

Named tuples, like the other records on the way to a group: every process defines them before its
ranks have met, and a frozen dataclass takes a millisecond for that, ten times as long.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AgentPlace", "Alone", "FilePlace", "Place", "TcpPlace", "UnixPlace", "is_loopback"]


@dataclass(frozen=True)  # a tuple without fields would be false
class Alone:
    """A world of one: nobody to meet, nothing to open."""

    def __str__(self) -> str:
        return "this process alone"


class UnixPlace(NamedTuple):
    """A Unix socket in the abstract namespace: no file, no port.

    The launcher serves it when ``launched``; otherwise rank 0 does, and the user's id becomes part
    of the name.
    """

    name: str
    launched: bool = False

    @classmethod
    def for_port(cls, port: int) -> UnixPlace:
        """Return the socket that stands for a port of this host."""
        return cls(f"port-{port}")

    def __str__(self) -> str:
        stands_for = self.name.removeprefix("port-")
        if stands_for != self.name and not self.launched:
            return f"localhost:{stands_for} (a Unix socket)"
        return f"unix:{self.name}"


class TcpPlace(NamedTuple):
    """A host and a port; rank 0 serves it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class FilePlace(NamedTuple):
    """A file on a file system that all ranks share."""

    path: str

    def __str__(self) -> str:
        return f"file {self.path}"


class AgentPlace(NamedTuple):
    """The store that torchrun's agent serves; ``prefix`` keeps a restart away from old keys."""

    host: str
    port: int
    prefix: str

    def __str__(self) -> str:
        return f"torchrun's store at {self.host}:{self.port}"


Place = Alone | UnixPlace | TcpPlace | FilePlace | AgentPlace


def is_loopback(host: str) -> bool:
    """Return whether ``host`` by its spelling alone can only mean this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.53"), is_loopback("node-7")
    (True, True, False)
    """
    name = host.strip("[]").lower()
    if name in ("localhost", "127.0.0.1", "localhost.localdomain", "ip6-localhost"):
        return True
    with contextlib.suppress(OSError):
        return socket.inet_pton(socket.AF_INET, name)[0] == 127
    with contextlib.suppress(OSError):
        return socket.inet_pton(socket.AF_INET6, name) == socket.inet_pton(socket.AF_INET6, "::1")
    return False
