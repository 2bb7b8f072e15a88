"""The shared-memory backend: ranks on one host, bytes moved by the native core."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from gradsync import _native
from gradsync.backends.backend import Bootstrap
from gradsync.backends.board import ShmBoard
from gradsync.backends.call import NO_BUFFER, Buffer, Call
from gradsync.backends.forming import share_memory
from gradsync.backends.freed_memory import keep_freed_memory
from gradsync.backends.ops import FINISH_BUCKETS
from gradsync.backends.pending import MOMENT_S, PendingWork
from gradsync.backends.pieces import run_call
from gradsync.backends.transfers import run_transfer
from gradsync.backends.translate import (
    RankState,
    broken_error,
    call_error,
    no_memory_error,
    rank_states,
)
from gradsync.backends.waits import answer, places_to_tell, watch_waits
from gradsync.backends.work import DoneWork, Work
from gradsync.errors import DistBackendError, DistError

__all__ = ["ShmBackend"]

# One handle for all: a call is done when it returns, and its outputs are the caller's own tensors.
_DONE = DoneWork([])

_log = logging.getLogger("gradsync")


class ShmBackend:
    """Runs calls on a native session: in the caller's own thread, or in the session's worker."""

    name = "shm"

    def __init__(self, session: _native.Session) -> None:
        self._session = session
        self._broken: DistBackendError | None = None
        self._answering: _native.Answering | None = None
        self._has_left = self._has_aborted = False
        # What asynchronous calls work on must live as long as they do, whoever drops their handles.
        self._in_flight: deque[tuple[_native.Pending, Call]] = deque()

    @property
    def session(self) -> _native.Session:
        """What carries the calls out, for a lane past this object."""
        return self._session

    @classmethod
    def open(cls, bootstrap: Bootstrap) -> ShmBackend:
        """Meet the other ranks in shared memory; all of them must be on this host."""
        if bootstrap.invitation is None:
            watch_waits()  # else that was done before anybody was met
        world = bootstrap.world._session if isinstance(bootstrap.world, ShmBackend) else None
        session = share_memory(bootstrap, world)
        session.name = bootstrap.group
        session.places = places_to_tell(bootstrap.places)
        backend = cls(session)
        if world is not None:
            session.ask_through(world, list(bootstrap.places))
        else:
            invitation = bootstrap.invitation
            server = None if invitation is None else invitation.server
            backend._answering = _native.Answering(session, answer, server)
        return backend

    def submit(self, call: Call) -> Work:
        """Carry out a call, or hand it in, and return its handle."""
        if call.op.has_peer:
            return run_transfer(self._session, call)
        if self._broken is not None:
            raise copy.copy(self._broken)
        try:
            pending = run_call(self._session, call)
        except _native.StatusError as error:
            raise self._failure(error, call) from None
        return _DONE if pending is None else self._started(pending, call)

    def _started(self, pending: _native.Pending, call: Call) -> Work:
        in_flight = self._in_flight
        # Taken out, looked at, and put back: other threads do the same, and of two that had looked
        # at the first call together, the second would drop one in flight.
        with contextlib.suppress(IndexError):
            while (first := in_flight.popleft())[0].done():
                pass
            in_flight.appendleft(first)
        in_flight.append((pending, call))
        return PendingWork(pending, call, self._failure)

    def _failure(self, error: _native.StatusError, call: Call) -> DistError:
        """Return the exception for a failure of the core, and remember that the group is broken."""
        failure = call_error(error, self._session, call, self._standing_of)
        code, _, ranks = error.args
        was_made = code != "timeout" or ranks  # else it waited for a thread of its own rank
        if isinstance(failure, DistBackendError) and was_made and self._broken is None:
            # A copy that is never raised: a traceback would keep this group's memory alive.
            self._broken = broken_error(failure)
        return failure

    def bucket_board(self, buckets: Sequence[tuple[Buffer, int]], timeout_s: float) -> ShmBoard:
        """Set up a board of shared buckets, each with its number of parameters; a collective."""
        keep_freed_memory()
        rows = [(b.address, b.numel, b.dtype, parts) for b, parts in buckets]
        try:
            return ShmBoard(self._session.make_board(rows, timeout_s), self._failure)
        except _native.StatusError as error:
            raise self._failure(error, Call(FINISH_BUCKETS, NO_BUFFER, timeout_s)) from None

    def shared_bytes(self, nbytes: int) -> Any:
        """Return an array of zeroed memory that every rank of the world has mapped."""
        try:
            return self._session.allocate(nbytes)
        except _native.StatusError as error:
            raise no_memory_error(error) from None

    def is_shared(self, address: int, nbytes: int) -> bool:
        """Return whether memory was made by ``shared_bytes``, on this group or its relatives."""
        return self._session.is_shared(address, nbytes)

    def has_calls_in_flight(self) -> bool:
        """Return whether asynchronous calls have not ended yet."""
        return any(not pending.done() for pending, _ in list(self._in_flight))

    def adopt(
        self, address: int, nbytes: int, memory: int, memory_bytes: int, copied_at_fork: bool
    ) -> _native.Adoption | None:
        """Let all ranks of the world reach a private tensor in ``memory``; None if that cannot be.

        Nobody else may write to the tensor meanwhile. A forked child gets a copy, or a view on
        which it writes alone.
        """
        try:
            return self._session.adopt(address, nbytes, memory, memory_bytes, copied_at_fork)
        except _native.StatusError:
            return None

    def abort(self, reason: str) -> None:
        """Make every present and later call of every rank fail with ``reason``."""
        self._has_aborted = True
        self._session.abort(printable(reason))

    def leave(self, note: str = "") -> None:
        """Tell the peers that this rank is going."""
        self._has_left = True
        self._session.leave(printable(note))

    def close(self) -> None:
        """Leave, after a moment for calls in flight; their handles get an error after that."""
        try:
            self._session.close(0 if self._has_left else MOMENT_S)
            if not self._has_left and not self._has_aborted:
                self._tell_of_failures()
        finally:  # also when Ctrl-C cuts the moment short
            self._in_flight.clear()
            if self._answering is not None:
                self._answering.stop()

    def _tell_of_failures(self) -> None:
        """Say it if a call failed and nobody has asked how it went, nor made one after it."""
        for pending, call in list(self._in_flight):
            if self._broken is not None or not pending.done():
                return
            try:
                pending.wait(0)
            except _native.StatusError as error:
                if error.args[0] == "interrupted":
                    return  # Ctrl-C was told where it came
                _log.error(
                    "gradsync: a call failed whose handle nobody waited for: %s",
                    self._failure(error, call),
                )

    def _standing_of(self, rank: int) -> str:
        """Return where a rank stands that the core cannot ask."""
        return ""

    def states(self) -> list[RankState]:
        """Return what every rank is doing."""
        return rank_states(self._session)


def printable(text: str) -> str:
    """Return a text that can cross into the core: a lone surrogate (a bad file name) cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
