"""From failures of the native core to gradsync's errors: the one place where messages are made."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gradsync import _native
from gradsync.backends.call import Call
from gradsync.backends.ops import describe
from gradsync.backends.waits import names, short_path
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import (
    AbortedError,
    BackendUnavailable,
    CollectiveTimeout,
    DistBackendError,
    DistError,
    InternalError,
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
    "last_call",
    "legend",
    "no_memory_error",
    "rank_states",
    "stands_at",
    "whereabouts",
    "who_is_late",
]


class RankState(NamedTuple):
    """What one rank last said of itself in its slot."""

    rank: int
    pid: int
    presence: str
    sequence: int
    doing: str
    site: str = ""
    """The line of the user's program that asked for that call, where known."""
    standing: str = ""
    """Where its program stood when it was asked, a line for each frame."""


_PRESENCE = ("not there yet", "active", "left", "failed")

_Row = tuple[int, int, int, int, int, int, int, str, str]


def _states(rows: list[_Row]) -> list[RankState]:
    return [
        RankState(
            rank,
            pid,
            _PRESENCE[presence],
            sequence,
            describe(what, count),
            # One of an older call would mislead.
            short_path(site) if site_of >= sequence else "",
            standing,
        )
        for rank, (pid, presence, sequence, what, count, _, site_of, site, standing) in enumerate(
            rows
        )
    ]


def rank_states(session: _native.Session) -> list[RankState]:
    """Return what every rank of a session last announced."""
    return _states(session.report())


def _patience(detail: str, timeout_s: float) -> str:
    """Say whose patience ended: the caller's own, or that of a rank that waited with it."""
    return f"ended: {detail}" if "gave up" in detail else f"timed out after {timeout_s:g} s"


def last_call(state: RankState) -> str:
    """Say what a rank did last in its group.

    >>> last_call(RankState(1, 4711, "active", 0, "nothing yet"))
    'no call yet'
    """
    return f"last call: #{state.sequence} {state.doing}" if state.sequence else "no call yet"


def _about(call: Call) -> str:
    if not call.op.has_reduce:
        return ""
    return f" ({call.reduce.name} of {DTYPE_NAMES[call.main_buffer.dtype]})"


def broken_error(first: DistBackendError) -> DistBackendError:
    """Return the exception for a call on a group that an earlier call has broken."""
    return type(first)(
        f"the group is broken since an earlier call failed: {first}",
        group=first.group,
        op=first.op,
        seq=first.seq,
        rank=first.rank,
        ranks=first.ranks,
        timeout_s=first.timeout_s,
    )


def call_error(
    error: _native.StatusError,
    session: _native.Session,
    call: Call,
    standing_of: Callable[[int], str] = lambda rank: "",
) -> DistError:
    """Return the exception for a call that failed, with every rank's state in its message.

    ``standing_of`` tells where a rank stands that the core could not ask.
    """
    code, detail, ranks = error.args
    op, timeout_s = call.op, call.timeout_s
    if code == "invalid":
        return UsageError(f"{op.name}: {detail}{_about(call)}")
    states, places = _states(session.findings()), session.places
    here = f"{op.name} #{session.call} on {whereabouts(session)}"
    kind: type[DistBackendError] = DistBackendError
    message = f"{here}: {detail}"
    if code == "timeout":
        kind = CollectiveTimeout
        if ranks:  # else it waited for a thread of its own
            begin = f"{here} {_patience(detail, timeout_s)}"
            message = _timeout(begin, states, ranks, places, standing_of)
    elif code == "peer_lost":
        kind = PeerLostError
        message = (
            f"{here}: {names(ranks, places)} on {socket.gethostname()} is gone ({detail}; "
            f"{last_call(states[ranks[0]])}). Look at that rank's own output for the cause; "
            f"this group cannot be used any more.{_sites(states)}"
        )
    elif code == "mismatch":
        kind = MismatchError
        message = (
            f"{here}: {detail}, so nothing was done:\n{_table(states)}\n"
            f"Every rank must make the same calls in the same order, with the same dtype and size."
        )
    elif code == "aborted":
        kind = AbortedError
        message = f"{here}: {names(ranks, places)} aborted the group: {detail}"
    elif code == "interrupted":
        message = f"{here}: a signal (Ctrl-C, say) interrupted a call, which ended the group"
    elif code not in ("system", "connection", "no_space"):
        return InternalError(f"{here}: the native core failed in an unknown way ({code}): {detail}")
    return kind(
        message + legend(session),
        group=session.name,
        op=op.name,
        seq=session.call,
        rank=session.rank,
        ranks=ranks,
        timeout_s=timeout_s,
    )


def _table(states: list[RankState]) -> str:
    return "\n".join(
        f"  rank {s.rank} (pid {s.pid}): #{s.sequence} {s.doing}"
        + (f" at {s.site}" if s.site else "")
        for s in states
    )


def _sites(states: list[RankState]) -> str:
    """Say which lines asked for the calls, as far as they are known."""
    return "".join(
        f"\n  rank {s.rank}: #{s.sequence} {s.doing} at {s.site}" for s in states if s.site
    )


def whereabouts(session: _native.Session) -> str:
    """Say which rank of which group this is."""
    here = f"{names([session.rank], session.places)} of {session.size}"
    return f"{here} in the group {session.name!r}" if session.places else here


def legend(session: _native.Session) -> str:
    """Say which ranks of the world those of a sub-group are, in a line that follows a message."""
    if not session.places:
        return ""
    return (
        f"\n  Ranks {', '.join(map(str, range(session.size)))} of this group are ranks "
        f"{', '.join(map(str, session.places))} of the world."
    )


def who_is_late(states: list[RankState], ranks: list[int], places: list[int]) -> str:
    """Name ranks that did not come, with what each did last."""
    return "; ".join(
        f"{names([r], places)} (pid {states[r].pid}, {last_call(states[r])})" for r in ranks
    )


def _timeout(
    begin: str,
    states: list[RankState],
    missing: list[int],
    places: list[int],
    standing_of: Callable[[int], str],
) -> str:
    arrived = [state for state in states if state.rank not in missing]
    late = who_is_late(states, missing, places)
    came = names([state.rank for state in arrived], places)
    lines = [
        f"{begin}. Arrived: {came}. Missing: {late}. A missing rank "
        f"is slow, stuck, or took another branch; give a longer timeout if it is only slow."
    ]
    lines += [f"  rank {s.rank} waits at {s.site}" for s in arrived if s.site]
    standings = ((rank, states[rank].standing or standing_of(rank)) for rank in missing)
    return "\n".join(lines) + stands_at(standings)


def stands_at(standings: Iterable[tuple[int, str]]) -> str:
    """Say where ranks stand, as far as it is known, in lines that follow a message.

    >>> print(stands_at([(1, "train.py:3 in step"), (2, "")]).strip())
    rank 1 stands at
        train.py:3 in step
    """
    return "".join(
        f"\n  rank {rank} stands at\n    " + standing.replace("\n", "\n    ")
        for rank, standing in standings
        if standing
    )


def no_memory_error(error: _native.StatusError) -> DistError:
    """Return the exception for shared memory that could not be had."""
    if error.args[0] == "invalid":  # in a forked child
        return UsageError(error.args[1])
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
        return PeerLostError(f"{names(ranks)}: {detail}", ranks=ranks)
    about = f" ({names(ranks)})" if ranks else ""
    return RendezvousError(f"the group's shared memory could not be set up: {detail}{about}")
