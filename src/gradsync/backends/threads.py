"""Ranks as threads of one process, on the same native core: real results, started in no time."""

from __future__ import annotations

from gradsync import _native
from gradsync.backends.shm import STAGING_BYTES, ShmBackend
from gradsync.errors import UsageError

__all__ = ["ThreadsBackend"]


class ThreadsBackend(ShmBackend):
    """One rank of a group whose ranks are threads."""

    name = "threads"

    @classmethod
    def make(cls, ranks: int) -> list[ThreadsBackend]:
        """Return one backend for each rank; each thread must call ``enter`` on its own."""
        if ranks < 1:
            raise UsageError(f"a group needs at least one rank, got {ranks}")
        return [cls(session) for session in _native.local_sessions(ranks, STAGING_BYTES)]

    def enter(self, timeout_s: float) -> None:
        """Wait until every rank's thread has come."""
        self._session.enter(timeout_s)
