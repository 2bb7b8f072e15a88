"""From failures of the native core to gradsync's errors: the one place where messages are made."""

from __future__ import annotations

import socket
from typing import NamedTuple

from gradsync import _native
from gradsync.backends.call import Call
from gradsync.backends.ops import describe
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import (
    AbortedError,
    BackendUnavailable,
    CollectiveTimeout,
    DistBackendError,
    DistError,
    MismatchError,
    PeerLostError,
    RendezvousError,
    UsageError,
)

__all__ = [
    "RankState",
    "broken_error",
    "call_error",
    "forming_error",
    "no_memory_error",
    "rank_states",
]


class RankState(NamedTuple):
    """What one rank last said of itself in its slot."""

    rank: int
    pid: int
    presence: str
    sequence: int
    doing: str


_PRESENCE = ("not there yet", "active", "left", "failed")


def rank_states(session: _native.Session) -> list[RankState]:
    """Return what every rank of a session last announced."""
    return [
        RankState(rank, pid, _PRESENCE[presence], sequence, describe(what, count))
        for rank, (pid, presence, sequence, what, count, _) in enumerate(session.report())
    ]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _patience(detail: str, timeout_s: float) -> str:
    """Say whose patience ended: the caller's own, or that of a rank that waited with it."""
    return f"ended: {detail}" if "gave up" in detail else f"timed out after {timeout_s:g} s"


def _last_call(state: RankState) -> str:
    return f"last call: #{state.sequence} {state.doing}" if state.sequence else "no call yet"


def _about(call: Call) -> str:
    if not call.op.has_reduce:
        return ""
    return f" ({call.reduce.name} of {DTYPE_NAMES[call.main_buffer.dtype]})"


def broken_error(first: DistBackendError) -> DistBackendError:
    """Return the exception for a call on a group that an earlier call has broken."""
    return type(first)(
        f"the group is broken since an earlier call failed: {first}",
        op=first.op,
        seq=first.seq,
        rank=first.rank,
        ranks=first.ranks,
        timeout_s=first.timeout_s,
    )


def call_error(error: _native.StatusError, session: _native.Session, call: Call) -> DistError:
    """Return the exception for a call that failed, with every rank's state in its message."""
    code, detail, ranks = error.args
    op, timeout_s = call.op, call.timeout_s
    if code == "invalid":
        return UsageError(f"{op.name}: {detail}{_about(call)}")
    states = rank_states(session)
    here = f"{op.name} #{session.sequence} on rank {session.rank} of {session.size}"
    table = "\n".join(f"  rank {s.rank} (pid {s.pid}): #{s.sequence} {s.doing}" for s in states)
    kind: type[DistBackendError] = DistBackendError
    message = f"{here}: {detail}"
    if code == "timeout" and not ranks:
        kind = CollectiveTimeout  # not for a peer, but for a thread of our own
    elif code == "timeout":
        kind = CollectiveTimeout
        missing = "; ".join(
            f"rank {r} (pid {states[r].pid}, {_last_call(states[r])})" for r in ranks
        )
        arrived = [r for r in range(session.size) if r not in ranks]
        message = (
            f"{here} {_patience(detail, timeout_s)}. Arrived: {_ranks(arrived)}. Missing: "
            f"{missing}. A missing rank is slow, stuck, or took another branch; give a longer "
            f"timeout if it is only slow."
        )
    elif code == "peer_lost":
        kind = PeerLostError
        message = (
            f"{here}: {_ranks(ranks)} on {socket.gethostname()} is gone ({detail}; "
            f"{_last_call(states[ranks[0]])}). Look at that rank's own output for the cause; "
            f"this group cannot be used any more."
        )
    elif code == "mismatch":
        kind = MismatchError
        message = (
            f"{here}: {detail}, so nothing was done:\n{table}\n"
            f"Every rank must make the same calls in the same order, with the same dtype and size."
        )
    elif code == "aborted":
        kind = AbortedError
        message = f"{here}: {_ranks(ranks)} aborted the group: {detail}"
    return kind(
        message,
        op=op.name,
        seq=session.sequence,
        rank=session.rank,
        ranks=ranks,
        timeout_s=timeout_s,
    )


def no_memory_error(error: _native.StatusError) -> DistError:
    """Return the exception for shared memory that could not be had."""
    return BackendUnavailable(
        f"shared memory could not be reserved: {error.args[1]}. "
        f"Free memory, or raise the container's memory limit."
    )


def forming_error(error: _native.StatusError) -> DistError:
    """Return the exception for a group whose shared memory could not be set up."""
    code, detail, ranks = error.args
    if code == "no_space":
        return no_memory_error(error)
    if code == "peer_lost":
        return PeerLostError(f"{_ranks(ranks)}: {detail}", ranks=ranks)
    about = f" ({_ranks(ranks)})" if ranks else ""
    return RendezvousError(f"the group's shared memory could not be set up: {detail}{about}")
