"""Collectives of many tensors as functions on the default group, and blocks of calls made together.

Sugar over the methods of ``ProcessGroup`` whose names end in ``_coalesced``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradsync.backends.work import Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.capture import Capture
from gradsync.group.coalescing import Tensors
from gradsync.group.collectives import Group, member_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup
from gradsync.group.reductions import Reduction

__all__ = [
    "CoalescingManager",
    "_broadcast_coalesced",
    "_coalescing_manager",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "coalescing_manager",
    "reduce_scatter_coalesced",
]

Future = torch.futures.Future[list[torch.Tensor]]


def all_reduce_coalesced(
    tensors: Tensors | torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Combine each of ``tensors`` over all ranks, in place; small ones travel side by side.

    They may differ in dtype, and one need not be in a list. With ``async_op`` a future of the
    tensors is returned.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> gradsync.all_reduce_coalesced([torch.ones(2), torch.ones(3)], async_op=True).wait()
    [tensor([1., 1.]), tensor([1., 1., 1.])]
    >>> gradsync.destroy_process_group()
    """
    where = member_group("all_reduce_coalesced", group)
    if where is None:
        return None
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if async_op:
        return where.all_reduce_coalesced_async(tensors, op).get_future()
    where.all_reduce_coalesced(tensors, op)
    return None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Tensors],
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Fill ``output_tensor_lists[r][i]`` with tensor ``i`` of rank ``r``; small ones go together.

    With ``async_op`` a future of all the outputs is returned, those of rank 0 first.
    """
    where = member_group("all_gather_coalesced", group)
    if where is None:
        return None
    outputs, inputs = output_tensor_lists, input_tensor_list
    if async_op:
        return where.all_gather_coalesced_async(outputs, inputs).get_future()
    where.all_gather_coalesced(outputs, inputs)
    return None


def reduce_scatter_coalesced(
    outputs: Tensors,
    inputs: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Future | None:
    """Like ``reduce_scatter_single`` for each output and input; small ones travel side by side."""
    where = member_group("reduce_scatter_coalesced", group)
    if where is None:
        return None
    if async_op:
        return where.reduce_scatter_coalesced_async(outputs, inputs, op).get_future()
    where.reduce_scatter_coalesced(outputs, inputs, op)
    return None


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Tensors, buffer_size: int, src: int = 0
) -> None:
    """Overwrite ``tensors`` with those of a rank of the group, in buffers of that many bytes."""
    process_group.broadcast_coalesced(tensors, src, buffer_size)


class CoalescingManager:
    """What ``coalescing_manager`` yields: ``wait`` for the calls that were made of the block."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Wait for this one too."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait until the results of the block are there."""
        for work in self.works:
            work.wait()


@contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Put off the block's calls of one kind, and make them together at its end.

    Calls of ``all_reduce``, ``all_gather_single`` and ``reduce_scatter_single`` are put off; one
    block takes one kind of them, and one reduction. Other collectives run at once. Results are
    there after the block, or after ``wait()`` of what it yields with ``async_ops``. A block that
    raises sends nothing.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> tensors = [torch.ones(2), torch.ones(3)]
    >>> with gradsync.coalescing_manager():
    ...     for tensor in tensors:
    ...         gradsync.all_reduce(tensor)
    >>> gradsync.destroy_process_group()
    """
    where = member_group("coalescing_manager", group)
    manager = CoalescingManager()
    if where is None:
        yield manager
        return
    if device is not None and torch.device(device).type != "cpu":
        raise UsageError(f"coalescing_manager works on CPU tensors, got device={device!r}")
    if where.capture is not None:
        raise UsageError(f"a coalescing_manager of the group {where.group_name!r} is open already")
    capture = where.capture = Capture()
    try:
        yield manager
    finally:
        where.capture = None
    if capture.calls:
        manager.append(_make_calls(where, capture, async_ops))


_coalescing_manager = coalescing_manager


_TOGETHER = {
    "all_gather_single": "all_gather_single_coalesced",
    "all_reduce": "all_reduce_coalesced",
    "reduce_scatter_single": "reduce_scatter_coalesced",
}
"""The method that makes several calls of a kind."""


def _make_calls(group: ProcessGroup, capture: Capture, async_ops: bool) -> Work | None:
    """Make the calls that were put off, or start them."""
    method = getattr(group, _TOGETHER[capture.name] + ("_async" if async_ops else ""))
    lists = [list(each) for each in zip(*capture.calls, strict=True)]
    reduction = () if capture.op is None else (capture.op,)
    work: Work | None = method(*lists, *reduction)
    return work


keep_compiler_out(globals())
