"""Messages as functions on the default group, with torch's names and arguments.

Sugar over ``ProcessGroup.send``, ``recv`` and their ``_async`` forms; ``src``, ``dst`` and ``peer``
are ranks of the world, ``group_src``, ``group_dst`` and ``group_peer`` ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradsync.backends.transfers import LaneFailure
from gradsync.backends.work import Work
from gradsync.errors import UsageError
from gradsync.group.collectives import Group, member_group, root_in_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup
from gradsync.group.work import Prepared
from gradsync.group.world import default_group, resolve

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to rank ``dst``; once this returns it may be changed."""
    # The default group and ranks of the world without detours, which would take as long as a small
    # message itself.
    where = (default_group() if group is None else None) or member_group("send", group)
    if where is None:
        return
    if dst in (ranks := where.members.ranks) and group_dst is None:
        place = ranks.index(dst)
        try:
            if where._lane.send(tensor, place, tag):
                return
        except LaneFailure as error:
            raise where._send_failure(error, tensor, place, tag) from None
    else:
        place = root_in_group("send", where, dst, group_dst)
    where.send(tensor, place, tag)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Fill ``tensor`` with the next message of rank ``src``, or of any rank when none is given.

    Returns the sender's rank in the world, -1 when the caller is not in the group.
    """
    where = (default_group() if group is None else None) or member_group("recv", group)
    if where is None:
        return -1
    if src in (ranks := where.members.ranks) and group_src is None:
        place = ranks.index(src)
        try:
            if where._lane.recv(tensor, place, tag) >= 0:
                return src
        except LaneFailure as error:
            raise where._recv_failure(error, tensor, place, tag) from None
    return ranks[where.recv(tensor, _source(where, src, group_src), tag)]


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start sending ``tensor`` to rank ``dst``; it must not change until the work is over.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> work = gradsync.isend(torch.arange(3), dst=0)
    >>> got = torch.empty(3, dtype=torch.int64)
    >>> gradsync.irecv(got, src=0).wait(), work.wait(), got
    (True, True, tensor([0, 1, 2]))
    >>> gradsync.destroy_process_group()
    """
    where = member_group("isend", group)
    if where is None:
        return None
    return where.send_async(tensor, root_in_group("isend", where, dst, group_dst), tag)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start receiving into ``tensor`` from rank ``src``, or from any rank when none is given."""
    where = member_group("irecv", group)
    if where is None:
        return None
    return where.recv_async(tensor, _source(where, src, group_src), tag)


class P2POp:
    """One send or receive of a batch: ``op`` is ``isend`` or ``irecv``."""

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise UsageError(f"a P2POp is made of gradsync.isend or gradsync.irecv, got {op!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a P2POp needs a torch.Tensor, got {type(tensor).__name__}")
        self.op = op
        self.tensor = tensor
        self.group = resolve(group)
        self.group_peer = root_in_group("P2POp", self.group, peer, group_peer)
        self.peer = self.group.members.world_rank(self.group_peer)
        self.tag = tag

    def __repr__(self) -> str:
        way = "to" if self.op is isend else "from"
        return (
            f"P2POp({self.op.__name__} {way} rank {self.group_peer} of "
            f"{self.group.group_name!r}, {tuple(self.tensor.shape)}, {self.tensor.dtype}, "
            f"tag={self.tag})"
        )

    def _prepare(self) -> Prepared:
        if self.op is isend:
            return self.group._prepare_send(self.tensor, self.group_peer, self.tag)
        return self.group._prepare_recv(self.tensor, self.group_peer, self.tag)


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start all sends and receives of a list; return one handle for each.

    Sends may stand before receives or after them; those between the same two ranks keep their
    order. All arguments are checked before anything is sent.
    """
    given: Any = p2p_op_list
    if not isinstance(given, list) or not all(isinstance(op, P2POp) for op in given):
        raise UsageError(f"batch_isend_irecv needs a list of P2POp, got {given!r}")
    if not given:
        raise IndexError("batch_isend_irecv needs at least one P2POp")
    where = given[0].group
    if any(op.group is not where for op in given):
        raise UsageError("batch_isend_irecv: all operations of a batch must be on the same group")
    prepared = [op._prepare() for op in given]
    return [where._start(one) for one in prepared]


def _source(where: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    if src is None and group_src is None:
        return None
    return root_in_group("recv", where, src, group_src)


keep_compiler_out(globals())
