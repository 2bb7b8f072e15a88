"""Ranks as threads of one process, on the same native core: real results, started in no time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from gradsync import _native
from gradsync.backends.backend import Bootstrap
from gradsync.backends.invitation import STAGING_BYTES
from gradsync.backends.shm import ShmBackend
from gradsync.backends.translate import forming_error
from gradsync.backends.waits import names, places_to_tell, stack_of, watch_waits
from gradsync.base.deadline import Deadline
from gradsync.errors import AbortedError, PeerLostError, RendezvousError, UsageError

__all__ = ["ThreadsBackend"]

# A condition cannot be waited for without any limit and still be interrupted.
_LONGEST_WAIT_S = 3600.0


class ThreadsBackend(ShmBackend):
    """One rank of a group whose ranks are threads."""

    name = "threads"
    _rank: int
    _threads: list[int]
    """The thread of each rank, shared by all of them."""
    _world: _World | None = None
    """What the ranks share, in a world."""

    @classmethod
    def make(cls, ranks: int) -> list[ThreadsBackend]:
        """Return one backend for each rank; each thread must call ``enter`` on its own."""
        if ranks < 1:
            raise UsageError(f"a group needs at least one rank, got {ranks}")
        watch_waits()
        sessions = _native.local_sessions(ranks, STAGING_BYTES)
        made = cls._on(sessions)
        world = _World(sessions)
        for backend in made:
            backend._world = world
        return made

    @classmethod
    def _on(cls, sessions: Sequence[_native.Session]) -> list[ThreadsBackend]:
        made = [cls(session) for session in sessions]
        threads = [0] * len(made)
        for rank, backend in enumerate(made):
            backend._rank, backend._threads = rank, threads
        return made

    @classmethod
    def open(cls, bootstrap: Bootstrap) -> ThreadsBackend:
        """Return the caller's backend of a sub-group of such a world, when all ranks have come."""
        world = bootstrap.world
        assert isinstance(world, ThreadsBackend)
        assert world._world is not None
        deadline = Deadline(bootstrap.timeout_s)
        made = world._world.form(bootstrap, deadline, cls._on)
        made.session.name = bootstrap.group
        made.session.places = places_to_tell(bootstrap.places)
        made.enter(deadline.remaining())
        return made

    def enter(self, timeout_s: float) -> None:
        """Wait until every rank's thread has come."""
        self._threads[self._rank] = threading.get_ident()
        self._session.enter(timeout_s)

    def abort(self, reason: str) -> None:
        """Make every present and later call of every rank fail with ``reason``."""
        super().abort(reason)
        if self._world is not None:
            self._world.end(reason)

    def leave(self, note: str = "") -> None:
        """Tell the peers that this rank is going."""
        super().leave(note)
        self._go(note)

    def close(self) -> None:
        """Leave, after a moment for calls in flight; their handles get an error after that."""
        super().close()
        self._go("")

    def _go(self, note: str) -> None:
        if self._world is not None:
            self._world.lose(self._rank, note)

    def _standing_of(self, rank: int) -> str:
        return "\n".join(stack_of(sys._current_frames().get(self._threads[rank])))


_MakeAll = Callable[[Sequence[_native.Session]], list[ThreadsBackend]]


class _Round:
    """A sub-group while its ranks come."""

    def __init__(self, backends: list[ThreadsBackend]) -> None:
        self.backends = backends
        self.came: set[int] = set()


class _World:
    """Where the ranks of one world meet to form sub-groups.

    The first that comes makes all sessions. A rank that has gone, or the end of all, is told to
    those who wait.
    """

    def __init__(self, sessions: Sequence[_native.Session]) -> None:
        self._sessions = sessions
        self._changed = threading.Condition()
        self._rounds: dict[tuple[str, tuple[int, ...]], _Round] = {}
        self._gone: dict[int, str] = {}
        self._aborted: str | None = None

    def lose(self, rank: int, note: str) -> None:
        """Remember that a rank has gone, and why if something went wrong."""
        with self._changed:
            self._gone.setdefault(rank, note)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._aborted = reason
            self._changed.notify_all()

    def form(self, bootstrap: Bootstrap, deadline: Deadline, on: _MakeAll) -> ThreadsBackend:
        """Return the caller's part of a sub-group, once all of its ranks have come."""
        key, size = (bootstrap.group, bootstrap.places), len(bootstrap.places)
        with self._changed:
            if key not in self._rounds:
                self._rounds[key] = _Round(on(self._make_sessions(bootstrap.places)))
            this = self._rounds[key]
            this.came.add(bootstrap.rank)
            self._changed.notify_all()
            while len(this.came) < size:
                self._look_around(bootstrap, this, deadline)
                self._changed.wait(min(deadline.remaining(), _LONGEST_WAIT_S))
            self._rounds.pop(key, None)
        return this.backends[bootstrap.rank]

    def _make_sessions(self, places: Sequence[int]) -> list[_native.Session]:
        worlds = [self._sessions[place] for place in places]
        try:
            return _native.local_sessions(len(places), STAGING_BYTES, worlds)
        except _native.StatusError as error:
            raise forming_error(error) from None

    def _look_around(self, bootstrap: Bootstrap, this: _Round, deadline: Deadline) -> None:
        missing = [r for r in range(len(bootstrap.places)) if r not in this.came]
        gone = [r for r in missing if bootstrap.places[r] in self._gone]
        if self._aborted is not None:
            raise AbortedError(f"the world was aborted: {self._aborted}")
        if gone:
            note = self._gone[bootstrap.places[gone[0]]]
            how = f"failed: {note}" if note else "left before the group was formed"
            raise PeerLostError(f"{names(gone)} of {bootstrap.group!r} {how}", ranks=gone)
        if deadline.expired():
            raise RendezvousError(
                f"{names(missing)} of {bootstrap.group!r} did not come within "
                f"{bootstrap.timeout_s:g} s"
            )
