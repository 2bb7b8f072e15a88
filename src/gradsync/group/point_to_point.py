"""Messages from one rank of a group to another; only the two of them call anything."""

from __future__ import annotations

import torch

from gradsync.backends.call import Call
from gradsync.backends.ops import RECV, SEND
from gradsync.backends.transfers import LaneFailure, explain_failure
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.errors import DistError, UsageError
from gradsync.group.buffers import output_view, view
from gradsync.group.caller import Caller
from gradsync.group.work import Prepared, bring_home

__all__ = ["PointToPoint"]

_MOST_TAG = 2**63 - 1


class PointToPoint(Caller):
    """send and recv; ranks are ranks of the group.

    Messages of one sender with one tag arrive in the order in which they were sent; a receive takes
    the first that has its tag. Both sides give tensors of the same dtype and number of elements.
    """

    def send(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, timeout: Timeout | None = None
    ) -> None:
        """Send ``tensor`` to rank ``dst``; afterwards it may be changed.

        A small tensor is on its way when this returns; of a large one most has arrived.
        """
        if timeout is None:
            try:
                if self._lane.send(tensor, dst, tag):
                    return
            except LaneFailure as error:
                raise self._send_failure(error, tensor, dst, tag) from None
        self._check_not_self("send", dst)
        self.submit(self._prepare_send(tensor, dst, tag, timeout).call)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        timeout: Timeout | None = None,
    ) -> int:
        """Fill ``tensor`` with a message of rank ``src``, or of any, and return its sender."""
        if timeout is None:
            try:
                if (source := self._lane.recv(tensor, src, tag)) >= 0:
                    return source
            except LaneFailure as error:
                raise self._recv_failure(error, tensor, src, tag) from None
        if src is not None:
            self._check_not_self("recv", src)
        prepared = self._prepare_recv(tensor, src, tag, timeout)
        work = self.submit(prepared.call)
        bring_home(prepared.copies)
        return work.source_rank()

    def send_async(
        self, tensor: torch.Tensor, dst: int, tag: int = 0, timeout: Timeout | None = None
    ) -> Work:
        """Start ``send`` and return its handle; ``tensor`` must not change until it is over."""
        return self._start(self._prepare_send(tensor, dst, tag, timeout))

    def recv_async(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        timeout: Timeout | None = None,
    ) -> Work:
        """Start ``recv`` and return its handle, whose ``source_rank()`` is the sender."""
        return self._start(self._prepare_recv(tensor, src, tag, timeout))

    def _prepare_send(
        self, tensor: torch.Tensor, dst: int, tag: int, timeout: Timeout | None = None
    ) -> Prepared:
        self._check_peer("send", dst, tag)
        buffer = view(tensor, "send")
        return Prepared(Call(SEND, buffer, self._limit(timeout), peer=dst, tag=tag), [tensor])

    def _prepare_recv(
        self, tensor: torch.Tensor, src: int | None, tag: int, timeout: Timeout | None = None
    ) -> Prepared:
        self._check_peer("recv", 0 if src is None else src, tag)
        buffer = output_view(tensor, "recv")
        peer = -1 if src is None else src
        call = Call(RECV, buffer, self._limit(timeout), peer=peer, tag=tag)
        return Prepared(call, [tensor], ((tensor, buffer),))

    def _send_failure(
        self, error: LaneFailure, tensor: torch.Tensor, dst: int, tag: int
    ) -> DistError:
        return explain_failure(error, self.backend, self._prepare_send(tensor, dst, tag).call)

    def _recv_failure(
        self, error: LaneFailure, tensor: torch.Tensor, src: int | None, tag: int
    ) -> DistError:
        return explain_failure(error, self.backend, self._prepare_recv(tensor, src, tag).call)

    def _check_peer(self, op_name: str, peer: int, tag: int) -> None:
        self._check_root(op_name, peer)
        if not isinstance(tag, int):
            raise TypeError(f"{op_name}: a tag is an int, got {type(tag).__name__}: {tag!r}")
        if not 0 <= tag <= _MOST_TAG:
            raise UsageError(f"{op_name}: a tag is at least 0 and below 2**63, got {tag}")

    def _check_not_self(self, op_name: str, peer: int) -> None:
        if peer == self._rank:
            raise UsageError(
                f"{op_name}: rank {peer} of the group is this rank; with itself it can exchange "
                f"messages by isend and irecv only"
            )
