"""The collectives as functions on the default group, with torch's names and arguments.

Sugar: each one finds its group and calls the method of the same name.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from gradsync.backends.work import Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve

__all__ = ["all_reduce", "barrier", "broadcast"]


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine ``tensor`` over all ranks of the group, in place, with the same bits on every rank.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> x = torch.tensor([1.0, 2.0])
    >>> gradsync.all_reduce(x)
    >>> x
    tensor([1., 2.])
    >>> gradsync.destroy_process_group()
    """
    where = resolve(group)
    if async_op:
        return where.all_reduce_async(tensor, op)
    where.all_reduce(tensor, op)
    return None


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with that of rank ``src`` (or rank ``group_src`` of the group)."""
    if (src is None) == (group_src is None):
        raise UsageError(f"broadcast needs src or group_src, got src={src}, group_src={group_src}")
    root = src if src is not None else group_src
    assert root is not None
    where = resolve(group)
    if async_op:
        return where.broadcast_async(tensor, root)
    where.broadcast(tensor, root)
    return None


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here."""
    where = resolve(group)
    if async_op:
        return where.barrier_async()
    where.barrier(timeout)
    return None
