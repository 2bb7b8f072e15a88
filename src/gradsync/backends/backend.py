"""The waist: every engine is four verbs, and everything above talks to it through ``submit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gradsync.backends.call import Call
from gradsync.backends.work import Work
from gradsync.base.host import HostEvidence
from gradsync.stores.store import Store

if TYPE_CHECKING:
    from gradsync.backends.invitation import Invitation

__all__ = ["Backend", "Bootstrap"]


class Bootstrap(NamedTuple):
    """What a backend gets to find its peers with: a store of its own, who it is, who they are."""

    store: Store
    rank: int
    evidence: Sequence[HostEvidence]
    """Where each rank runs, in rank order."""
    timeout_s: float
    group: str = ""
    """The group's name, for messages."""
    world: Backend | None = None
    """The world's backend when this is for a sub-group, which may share what that has."""
    places: tuple[int, ...] = ()
    """The ranks in that world, in the order of ranks in the group."""
    invitation: Invitation | None = None
    """What was made ready before everyone had come, for a backend that does."""


class Backend(Protocol):
    """An engine that carries out the calls of one group."""

    name: str

    def submit(self, call: Call) -> Work:
        """Carry out a call, or start an asynchronous one; calls follow the ones before them."""

    def abort(self, reason: str) -> None:
        """Make every present and later call of every rank fail with ``reason``."""

    def leave(self, note: str = "") -> None:
        """Tell the peers that this rank is going; a note says what went wrong. Never blocks."""

    def close(self) -> None:
        """Leave, after a moment for calls in flight, and give back what the group holds."""
