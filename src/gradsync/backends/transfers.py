"""From sends and receives to the native session's arguments."""

from __future__ import annotations

from functools import cache

from gradsync import _native
from gradsync.backends.call import Call
from gradsync.backends.ops import SEND
from gradsync.backends.pending import PendingWork
from gradsync.backends.translate import transfer_error
from gradsync.backends.work import DoneWork, Work
from gradsync.errors import DistError, UsageError

__all__ = ["run_transfer"]

_SENT = DoneWork([])


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
        raise transfer_error(error, session, call) from None


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
        def failure(error: _native.StatusError, call: Call) -> DistError:
            return transfer_error(error, session, call)

        super().__init__(request, call, failure)
        self._request = request

    def source_rank(self) -> int:
        """Return which rank of the group the message came from, once it has come."""
        if self._call.op is SEND:
            return super().source_rank()
        if not self.is_success():
            raise UsageError("a receive that has not ended well has no source rank")
        return self._request.source()
