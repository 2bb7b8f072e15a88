"""Ranks as threads of one process, on the same native core: real results, started in no time."""

from __future__ import annotations

import sys
import threading

from gradsync import _native
from gradsync.backends.forming import STAGING_BYTES
from gradsync.backends.shm import ShmBackend
from gradsync.backends.waits import stack_of, watch_waits
from gradsync.errors import UsageError

__all__ = ["ThreadsBackend"]


class ThreadsBackend(ShmBackend):
    """One rank of a group whose ranks are threads."""

    name = "threads"
    _rank: int
    _threads: list[int]
    """The thread of each rank, shared by all of them."""

    @classmethod
    def make(cls, ranks: int) -> list[ThreadsBackend]:
        """Return one backend for each rank; each thread must call ``enter`` on its own."""
        if ranks < 1:
            raise UsageError(f"a group needs at least one rank, got {ranks}")
        watch_waits()
        made = [cls(session) for session in _native.local_sessions(ranks, STAGING_BYTES)]
        threads = [0] * ranks
        for rank, backend in enumerate(made):
            backend._rank, backend._threads = rank, threads
        return made

    def enter(self, timeout_s: float) -> None:
        """Wait until every rank's thread has come."""
        self._threads[self._rank] = threading.get_ident()
        self._session.enter(timeout_s)

    def _standing_of(self, rank: int) -> str:
        return "\n".join(stack_of(sys._current_frames().get(self._threads[rank])))
