"""Faults as data: what shall happen to which rank at which call.

A plan is a list of these, given to ``@pytest.mark.ranks(..., faults=[...])``. The kit carries them
out at the very call they name, on every backend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gradsync.errors import UsageError

__all__ = ["Fault", "delay", "drop_connection", "exit_", "kill", "raise_", "stop"]

_AT = re.compile(r"^(?P<op>[a-z_]+|\*)#(?P<number>[1-9][0-9]*)$")


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one rank, right before a call."""

    kind: str
    rank: int
    op: str
    number: int
    value: Any = None

    @property
    def is_deadly(self) -> bool:
        """Whether it ends the rank's process."""
        return self.kind in ("kill", "exit")

    @property
    def end(self) -> int | None:
        """The exit code of a process that it ends, negative for a signal."""
        if not self.is_deadly:
            return None
        return -int(self.value) if self.kind == "kill" else int(self.value) & 0xFF


def _fault(kind: str, rank: int, at: str, value: Any = None) -> Fault:
    match = _AT.match(at)
    if match is None:
        raise UsageError(
            f"at={at!r}: write the operation and which call of it, like 'all_reduce#3', or '*#5' "
            f"for the fifth call of any kind"
        )
    if rank < 0:
        raise UsageError(f"rank must not be negative, got {rank}")
    return Fault(kind, rank, match["op"], int(match["number"]), value)


def kill(rank: int, at: str, signal: int = 9) -> Fault:
    """Send the rank a real signal (SIGKILL) right before the call.

    >>> kill(rank=1, at="all_reduce#3")
    Fault(kind='kill', rank=1, op='all_reduce', number=3, value=9)
    """
    return _fault("kill", rank, at, signal)


def exit_(rank: int, at: str, code: int = 1) -> Fault:
    """End the rank's process with ``os._exit(code)`` right before the call."""
    return _fault("exit", rank, at, code)


def raise_(rank: int, at: str, error: BaseException | None = None) -> Fault:
    """Raise ``error`` in the rank right before the call."""
    return _fault("raise", rank, at, error or RuntimeError("injected fault"))


def delay(rank: int, at: str, seconds: float) -> Fault:
    """Make the rank sleep before the call."""
    return _fault("delay", rank, at, seconds)


def stop(rank: int, at: str, seconds: float) -> Fault:
    """Stop the rank's process with SIGSTOP before the call, and continue it after a while."""
    return _fault("stop", rank, at, seconds)


def drop_connection(rank: int, at: str) -> Fault:
    """Cut the rank's connection to the store before the call."""
    return _fault("drop_connection", rank, at)
