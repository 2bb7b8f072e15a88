"""The shared-memory backend: ranks on one host, bytes moved by the native core.

Who shares memory with whom is found out by trying: ranks with the same boot id reach for each
other's lobby, and only those that get through are on one host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gradsync import _native
from gradsync.backends.backend import Bootstrap
from gradsync.backends.call import Call
from gradsync.backends.ops import ALL_REDUCE, BARRIER, BROADCAST
from gradsync.backends.pieces import run_pieces
from gradsync.backends.translate import RankState, call_error, forming_error, rank_states
from gradsync.backends.work import DoneWork, Work
from gradsync.base.host import HostEvidence, islands
from gradsync.errors import BackendUnavailable

__all__ = ["ShmBackend", "share_memory"]

STAGING_BYTES = 1 << 20
"""Shared memory per rank through which private tensors pass. Two halves of 512 KiB stay in the
second-level cache; larger ones gained nothing at 25 MB."""


_TO_PART_S = 5.0

# One handle for all: a call is done when it returns, and its outputs are the caller's own tensors.
_DONE = DoneWork([])


class ShmBackend:
    """Runs calls on a native session, in the caller's own thread."""

    name = "shm"

    def __init__(self, session: _native.Session) -> None:
        self._session = session

    @classmethod
    def open(cls, bootstrap: Bootstrap) -> ShmBackend:
        """Meet the other ranks in shared memory; all of them must be on this host."""
        return cls(share_memory(bootstrap))

    def submit(self, call: Call) -> Work:
        """Carry out a call and return its handle."""
        op, buffer, timeout_s = call.op, call.buffer, call.timeout_s
        try:
            if op is ALL_REDUCE:
                self._session.all_reduce(
                    buffer.address, buffer.numel, buffer.dtype, call.reduce, timeout_s
                )
            elif op is BROADCAST:
                self._session.broadcast(
                    buffer.address, buffer.numel, buffer.dtype, call.root, timeout_s
                )
            elif op is BARRIER:
                self._session.barrier(timeout_s)
            else:
                run_pieces(self._session, call)
        except _native.StatusError as error:
            raise call_error(error, self._session, op, timeout_s) from None
        return _DONE

    def abort(self, reason: str) -> None:
        """Make every present and later call of every rank fail with ``reason``."""
        self._session.abort(reason)

    def leave(self, note: str = "") -> None:
        """Tell the peers that this rank is going."""
        self._session.leave(note)

    def states(self) -> list[RankState]:
        """Return what every rank is doing."""
        return rank_states(self._session)


def share_memory(bootstrap: Bootstrap) -> _native.Session:
    """Find out who can map whose memory, and form one session of all ranks or say why not."""
    store, rank, evidence = bootstrap.store, bootstrap.rank, bootstrap.evidence
    size = len(evidence)
    lobby = _native.Lobby()
    store.set(f"lobby/{rank}", json.dumps([lobby.name, lobby.secret.hex()]))
    lobbies = [json.loads(text) for text in store.multi_get([f"lobby/{r}" for r in range(size)])]
    leader, link = _reach_lowest(rank, evidence, [name for name, _ in lobbies])
    store.set(f"leader/{rank}", str(leader))
    leaders = [int(text) for text in store.multi_get([f"leader/{r}" for r in range(size)])]
    groups = islands(evidence, dict(enumerate(leaders)))
    if len(groups) > 1:
        # Rank 0 may serve the store: nobody goes before everybody knows.
        store.barrier("islands", size, min(bootstrap.timeout_s, _TO_PART_S))
        raise BackendUnavailable(_explain(groups, evidence))
    try:
        if link is None:
            # A pid means the same process to us only within one pid namespace.
            here = evidence[rank].pid_namespace
            pids = [e.pid if here and e.pid_namespace == here else 0 for e in evidence]
            return lobby.host(pids, STAGING_BYTES, bootstrap.timeout_s)
        return link.join(bytes.fromhex(lobbies[0][1]), rank, size, bootstrap.timeout_s)
    except _native.StatusError as error:
        raise forming_error(error) from None


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
