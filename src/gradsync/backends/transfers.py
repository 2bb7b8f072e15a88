"""From sends and receives to the native session's arguments."""

from __future__ import annotations

import socket
from functools import cache

from gradsync import _native
from gradsync.backends.backend import Backend
from gradsync.backends.call import Call
from gradsync.backends.ops import SEND
from gradsync.backends.pending import PendingWork
from gradsync.backends.translate import (
    legend,
    rank_states,
    stands_at,
    whereabouts,
    who_is_late,
)
from gradsync.backends.waits import names, present_site, short_path
from gradsync.backends.work import DoneWork, Work
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import (
    AbortedError,
    CollectiveTimeout,
    DistBackendError,
    DistError,
    MismatchError,
    PeerLostError,
    UsageError,
)

__all__ = ["LaneFailure", "explain_failure", "run_transfer"]

LaneFailure = _native.StatusError
"""What a lane raises when a message could not be sent or received."""

_SENT = DoneWork([])

_TO_ANSWER_S = 0.3


def run_transfer(session: _native.Session, call: Call) -> Work:
    """Send or receive a message, or post it, and return its handle.

    Failures concern the message alone: the group can still be used.
    """
    address, count, dtype, owner = call.buffer
    peer, tag, timeout_s = call.peer, call.tag, call.timeout_s
    try:
        if call.asynchronous:
            post = session.post_send if call.op is SEND else session.post_recv
            request = post(address, count, dtype, peer, tag, timeout_s, owner)
            return PostedWork(request, call, session)
        if call.op is SEND:
            session.send(address, count, dtype, peer, tag, timeout_s)
            return _SENT
        return _received(session.recv(address, count, dtype, peer, tag, timeout_s))
    except _native.StatusError as error:
        raise _failure(error, session, call, present_site()) from None


def explain_failure(error: _native.StatusError, backend: Backend, call: Call) -> DistError:
    """Return the exception for a message that a lane could not send or receive."""
    return _failure(error, backend.session, call, present_site())  # type: ignore[attr-defined]


class ReceivedWork(DoneWork):
    """The handle of a message that has been received."""

    __slots__ = ("_source",)

    def __init__(self, source: int) -> None:
        super().__init__([])
        self._source = source

    def source_rank(self) -> int:
        """Return which rank of the group the message came from."""
        return self._source


# One handle for each sender: there is nothing else in it.
_received = cache(ReceivedWork)


class PostedWork(PendingWork):
    """The handle of a send or a receive in flight."""

    __slots__ = ("_request",)

    def __init__(self, request: _native.Request, call: Call, session: _native.Session) -> None:
        def explain(error: _native.StatusError, call: Call) -> DistError:
            return _failure(error, session, call, short_path(request.site()))

        super().__init__(request, call, explain)
        self._request = request

    def source_rank(self) -> int:
        """Return which rank of the group the message came from, once it has come."""
        if self._call.op is SEND:
            return super().source_rank()
        if not self.is_success():
            raise UsageError("a receive that has not ended well has no source rank")
        return self._request.source()


def _failure(
    error: _native.StatusError, session: _native.Session, call: Call, site: str
) -> DistError:
    """Return the exception for a message that could not be sent or received.

    ``site`` is the line that asked for it.
    """
    code, detail, ranks = error.args
    buffer, op = call.buffer, call.op.name
    places = session.places
    other = "any rank" if call.peer < 0 else names([call.peer], places)
    what = f"{op}({DTYPE_NAMES[buffer.dtype]}[{buffer.numel}], tag {call.tag})"
    way = "to" if op == "send" else "from"
    here = f"{what} {way} {other} on {whereabouts(session)}"
    if code == "invalid":
        return UsageError(f"{here}: {detail}")
    kind: type[DistBackendError] = DistBackendError
    message = f"{here}: {detail}"
    if code == "timeout":
        kind = CollectiveTimeout
        who = who_is_late(rank_states(session), ranks, places)
        message = f"{here} timed out after {call.timeout_s:g} s: {detail}. Waited for: {who}."
    elif code == "peer_lost":
        kind = PeerLostError
        message = (
            f"{here}: {names(ranks, places)} on {socket.gethostname()} is gone ({detail}). Look at "
            f"that rank's own output for the cause."
        )
    elif code == "mismatch":
        kind = MismatchError
        message = (
            f"{here}: {detail}. The message was dropped and nothing was written; both sides must "
            f"give tensors of the same dtype and size."
        )
    elif code == "aborted":
        kind = AbortedError
        message = f"{here} was ended by {names(ranks, places)}: {detail}"
    if site:
        verb = "waits" if kind is CollectiveTimeout else "asked for it"
        message += f"\n  rank {session.rank} {verb} at {site}"
    if kind in (CollectiveTimeout, MismatchError):
        message += stands_at(zip(ranks, session.ask(ranks, _TO_ANSWER_S), strict=True))
    return kind(
        message + legend(session),
        group=session.name,
        op=op,
        rank=session.rank,
        ranks=ranks,
        timeout_s=call.timeout_s,
    )
