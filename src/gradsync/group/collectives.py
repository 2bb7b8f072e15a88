"""The collectives as functions on the default group, with torch's names and arguments.

Sugar: each one finds its group, turns a rank of the world into a rank of the group, and calls the
method of the same name. A rank that is not in the group gets a warning and None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from gradsync.backends.work import DoneWork, Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import is_non_member, resolve

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "root_in_group",
    "scatter",
    "skip_non_member",
]

Group = ProcessGroup | int | None


def skip_non_member(name: str, group: Group) -> bool:
    """Return whether there is nothing to do because the caller is not in the group; warns then."""
    if not is_non_member(group):
        return False
    warnings.warn(
        f"{name} was called on a group that this rank does not belong to; nothing was done",
        stacklevel=4,
    )
    return True


def root_in_group(
    name: str,
    group: ProcessGroup,
    world_rank: int | None,
    group_rank: int | None,
    otherwise: int | None = None,
) -> int:
    """Return the root as a rank of the group; exactly one of the two ways to say it is given."""
    if world_rank is None and group_rank is None:
        world_rank = otherwise
    if (world_rank is None) == (group_rank is None):
        raise UsageError(
            f"{name} needs a rank of the world (src, dst) or of the group (group_src, group_dst), "
            f"got {world_rank} and {group_rank}"
        )
    if group_rank is not None:
        return group_rank
    assert world_rank is not None
    return group.members.group_rank(world_rank)


def _run(async_op: bool, call: Callable[[], None], *outputs: Any) -> Work | None:
    call()
    return DoneWork(list(outputs)) if async_op else None


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
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
    if skip_non_member("all_reduce", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.all_reduce(tensor, op), tensor)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with that of rank ``src`` (or rank ``group_src`` of the group)."""
    if skip_non_member("broadcast", group):
        return None
    where = resolve(group)
    root = root_in_group("broadcast", where, src, group_src)
    return _run(async_op, lambda: where.broadcast(tensor, root), tensor)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine ``tensor`` over all ranks; rank ``dst`` gets the result, the others keep theirs."""
    if skip_non_member("reduce", group):
        return None
    where = resolve(group)
    root = root_in_group("reduce", where, dst, group_dst)
    return _run(async_op, lambda: where.reduce(tensor, root, op), tensor)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill ``tensor_list[r]`` with the ``tensor`` of rank ``r``."""
    if skip_non_member("all_gather", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.all_gather(tensor_list, tensor), *tensor_list)


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill ``output`` with the ranks' ``input`` one after the other along dimension 0."""
    if skip_non_member("all_gather_single", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.all_gather_single(output, input), output)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Fill ``gather_list[r]`` of rank ``dst`` (0 unless given) with the tensor of rank ``r``."""
    if skip_non_member("gather", group):
        return None
    where = resolve(group)
    root = root_in_group("gather", where, dst, group_dst, otherwise=0)
    return _run(async_op, lambda: where.gather(tensor, gather_list, root), *(gather_list or ()))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with this rank's entry of the ``scatter_list`` of rank ``src`` (0)."""
    if skip_non_member("scatter", group):
        return None
    where = resolve(group)
    root = root_in_group("scatter", where, src, group_src, otherwise=0)
    return _run(async_op, lambda: where.scatter(tensor, scatter_list, root), tensor)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' lists entry by entry; rank ``r`` gets the result of entry ``r``."""
    if skip_non_member("reduce_scatter", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.reduce_scatter(output, input_list, op), output)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' ``input``; each rank gets its part of the result along dimension 0."""
    if skip_non_member("reduce_scatter_single", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.reduce_scatter_single(output, input, op), output)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send entry ``r`` of the inputs to rank ``r``, and fill entry ``r`` of the outputs from it."""
    if skip_non_member("all_to_all", group):
        return None
    where = resolve(group)
    outputs, inputs = output_tensor_list, input_tensor_list
    return _run(async_op, lambda: where.all_to_all(outputs, inputs), *outputs)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send the r-th part of ``input`` along dimension 0 to rank ``r``; gather what comes."""
    if skip_non_member("all_to_all_single", group):
        return None
    where = resolve(group)
    return _run(
        async_op,
        lambda: where.all_to_all_single(
            output, input, output_split_sizes or None, input_split_sizes or None
        ),
        output,
    )


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here; ``device_ids`` is of no use on CPUs."""
    if skip_non_member("barrier", group):
        return None
    where = resolve(group)
    return _run(async_op, lambda: where.barrier(timeout))


all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single
