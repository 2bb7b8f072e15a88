"""The shared-memory backend: ranks on one host, bytes moved by the native core.

Who shares memory with whom is found out by trying: ranks with the same boot id reach for each
other's lobby, and only those that get through are on one host.
"""

from __future__ import annotations

import copy
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from gradsync import _native
from gradsync.backends.backend import Bootstrap
from gradsync.backends.board import ShmBoard
from gradsync.backends.call import NO_BUFFER, Buffer, Call
from gradsync.backends.ops import FINISH_BUCKETS
from gradsync.backends.pending import PendingWork
from gradsync.backends.pieces import run_call
from gradsync.backends.transfers import run_transfer
from gradsync.backends.translate import (
    RankState,
    broken_error,
    call_error,
    forming_error,
    no_memory_error,
    rank_states,
)
from gradsync.backends.waits import Answering, watch_waits
from gradsync.backends.work import DoneWork, Work
from gradsync.base.deadline import Deadline
from gradsync.base.host import HostEvidence, is_dead, islands
from gradsync.errors import (
    BackendUnavailable,
    DistBackendError,
    DistError,
    PeerLostError,
    RendezvousError,
    StoreConnectionError,
    StoreTimeout,
)

__all__ = ["ShmBackend", "failure_key", "share_memory"]

STAGING_BYTES = 1 << 20
"""Shared memory per rank through which private tensors pass. Two halves of 512 KiB stay in the
second-level cache; larger ones gained nothing at 25 MB."""


_TO_PART_S = 5.0
_LOOK_S = 0.1

# One handle for all: a call is done when it returns, and its outputs are the caller's own tensors.
_DONE = DoneWork([])


_MOMENT_S = 5.0
"""For calls in flight when their group is destroyed: enough for ranks that do it at the same time,
and no long wait for one that never comes."""


class ShmBackend:
    """Runs calls on a native session: in the caller's own thread, or in the session's worker."""

    name = "shm"

    def __init__(self, session: _native.Session) -> None:
        self._session = session
        self._broken: DistBackendError | None = None
        self._stop_answering: Callable[[], object] = lambda: None
        self._has_left = False
        # What asynchronous calls work on must live as long as they do, whoever drops their handles.
        self._in_flight: deque[tuple[_native.Pending, Call]] = deque()

    @property
    def session(self) -> _native.Session:
        """What carries the calls out, for a lane past this object."""
        return self._session

    @classmethod
    def open(cls, bootstrap: Bootstrap) -> ShmBackend:
        """Meet the other ranks in shared memory; all of them must be on this host."""
        watch_waits()
        session = share_memory(bootstrap)
        session.name = bootstrap.group
        backend = cls(session)
        if isinstance(bootstrap.world, ShmBackend):
            session.ask_through(bootstrap.world._session, list(bootstrap.places))
        else:
            backend._answer_peers()
        return backend

    def _answer_peers(self) -> None:
        # Also when the backend is dropped, and at the end of the process.
        self._stop_answering = weakref.finalize(self, Answering(self._session).stop)

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
        while in_flight and in_flight[0][0].done():
            in_flight.popleft()
        in_flight.append((pending, call))
        return PendingWork(pending, call, self._failure)

    def _failure(self, error: _native.StatusError, call: Call) -> DistError:
        """Return the exception for a failure of the core, and remember that the group is broken."""
        failure = call_error(error, self._session, call, self._standing_of)
        if isinstance(failure, DistBackendError) and self._broken is None:
            # A copy that is never raised: a traceback would keep this group's memory alive.
            self._broken = broken_error(failure)
        return failure

    def bucket_board(self, buckets: Sequence[tuple[Buffer, int]], timeout_s: float) -> ShmBoard:
        """Set up a board of shared buckets, each with its number of parameters; a collective."""
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

    def abort(self, reason: str) -> None:
        """Make every present and later call of every rank fail with ``reason``."""
        self._session.abort(printable(reason))

    def leave(self, note: str = "") -> None:
        """Tell the peers that this rank is going."""
        self._has_left = True
        self._session.leave(printable(note))

    def close(self) -> None:
        """Leave, after a moment for calls in flight; their handles get an error after that."""
        self._session.close(0 if self._has_left else _MOMENT_S)
        self._in_flight.clear()
        self._stop_answering()

    def _standing_of(self, rank: int) -> str:
        """Return where a rank stands that the core cannot ask."""
        return ""

    def states(self) -> list[RankState]:
        """Return what every rank is doing."""
        return rank_states(self._session)


def printable(text: str) -> str:
    """Return a text that can cross into the core: a lone surrogate (a bad file name) cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def share_memory(bootstrap: Bootstrap) -> _native.Session:
    """Find out who can map whose memory, and form one session of all ranks or say why not."""
    rank, evidence = bootstrap.rank, bootstrap.evidence
    size = len(evidence)
    lobby = _native.Lobby()
    swap = _Swap(bootstrap)
    lobbies = [
        json.loads(text) for text in swap("lobby", json.dumps([lobby.name, lobby.secret.hex()]))
    ]
    leader, link = _reach_lowest(rank, evidence, [name for name, _ in lobbies])
    leaders = [int(text) for text in swap("leader", str(leader))]
    groups = islands(evidence, dict(enumerate(leaders)))
    if len(groups) > 1:
        # Rank 0 may serve the store: nobody goes before everybody knows.
        bootstrap.store.barrier("islands", size, min(bootstrap.timeout_s, _TO_PART_S))
        raise BackendUnavailable(_explain(groups, evidence))
    world = bootstrap.world._session if isinstance(bootstrap.world, ShmBackend) else None
    try:
        if link is None:
            # A pid means the same process to us only within one pid namespace.
            here = evidence[rank].pid_namespace
            pids = [e.pid if here and e.pid_namespace == here else 0 for e in evidence]
            return lobby.host(pids, STAGING_BYTES, bootstrap.timeout_s, world)
        return link.join(bytes.fromhex(lobbies[0][1]), rank, size, bootstrap.timeout_s, world)
    except _native.StatusError as error:
        raise forming_error(error) from None


class _Swap:
    """Exchanges a text with every rank through the store, and looks who is still there meanwhile.

    Without that, a rank that dies or fails after rendezvous would keep the others waiting for the
    whole timeout.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._deadline = Deadline(bootstrap.timeout_s)

    def __call__(self, name: str, text: str) -> list[bytes]:
        store = self._bootstrap.store
        keys = [f"{name}/{rank}" for rank in range(len(self._bootstrap.evidence))]
        store.set(keys[self._bootstrap.rank], text)
        while True:
            try:
                store.wait(keys, min(_LOOK_S, max(self._deadline.remaining(), 0.001)))
            except StoreTimeout:
                self._look_around([r for r, key in enumerate(keys) if not store.check([key])])
            except StoreConnectionError:
                # Its server may have gone because of a rank that had gone before.
                self._find_dead(range(len(keys) - 1, -1, -1))
                raise
            else:
                return store.multi_get(keys)

    def _look_around(self, missing: list[int]) -> None:
        store, evidence = self._bootstrap.store, self._bootstrap.evidence
        for rank in missing:
            who = f"rank {rank} ({evidence[rank].where})"
            if store.check([failure_key(rank)]):
                why = store.get(failure_key(rank)).decode("utf-8", "replace")
                self._lost(rank, f"{who} failed before the group was formed: {why}")
        self._find_dead(missing)
        if self._deadline.expired():
            who = "; ".join(f"rank {rank} ({evidence[rank].where})" for rank in missing)
            raise RendezvousError(
                f"the group was not formed within {self._bootstrap.timeout_s:g} s: nothing was "
                f"heard of {who} after they had arrived"
            )

    def _find_dead(self, ranks: Iterable[int]) -> None:
        evidence = self._bootstrap.evidence
        for rank in ranks:
            if is_dead(evidence[rank], evidence[self._bootstrap.rank]):
                who = f"rank {rank} ({evidence[rank].where})"
                self._lost(rank, f"{who} ended before the group was formed")

    def _lost(self, rank: int, message: str) -> NoReturn:
        # We may serve the store: let the others look around too before we go.
        time.sleep(3 * _LOOK_S)
        raise PeerLostError(message, ranks=[rank])


def failure_key(rank: int) -> str:
    """Return where a rank says that it failed while its group was being formed."""
    return f"failed/{rank}"


def _reach_lowest(
    rank: int, evidence: Sequence[HostEvidence], lobbies: list[str]
) -> tuple[int, _native.Link | None]:
    """Return the lowest rank whose lobby can be reached from here, and the way to it."""
    for other in range(rank):
        if not evidence[rank].boot_id or evidence[other].boot_id != evidence[rank].boot_id:
            continue
        try:
            return other, _native.Link(lobbies[other])
        except _native.StatusError:
            continue  # the same kernel, but another network namespace: not reachable
    return rank, None


def _explain(groups: list[list[int]], evidence: Sequence[HostEvidence]) -> str:
    parts = "; ".join(
        f"ranks {', '.join(map(str, ranks))} on {evidence[ranks[0]].host} "
        f"(boot {evidence[ranks[0]].boot_id[:8]})"
        for ranks in groups
    )
    return (
        f"the shared-memory backend serves ranks that can map each other's memory, but these "
        f"cannot: {parts}. Start all ranks on one host, in one network namespace."
    )
