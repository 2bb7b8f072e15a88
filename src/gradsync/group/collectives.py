"""The collectives as functions on the default group, with torch's names and arguments.

Sugar: each one finds its group, turns a rank of the world into a rank of the group, and calls the
method of the same name. A rank that is not in the group gets a warning and None.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch

from gradsync.backends.work import Work
from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group import world
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup
from gradsync.group.reductions import Reduction
from gradsync.group.world import default_group, is_non_member, resolve

__all__ = [
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "member_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "root_in_group",
    "scatter",
]

Group = ProcessGroup | int | None


def member_group(name: str, group: Group) -> ProcessGroup | None:
    """Return the group to work on, or None, with a warning, when the caller is not in it."""
    if group is None:
        return default_group() or resolve(None)
    if not is_non_member(group):
        return resolve(group)
    warnings.warn(
        f"{name} was called on a group that this rank does not belong to; nothing was done",
        stacklevel=3,
    )
    return None


def root_in_group(
    name: str,
    group: ProcessGroup,
    world_rank: int | None,
    group_rank: int | None,
    otherwise: int | None = None,
) -> int:
    """Return the root as a rank of the group; exactly one of the two ways to say it is given."""
    if group_rank is None and world_rank is not None:
        return group.members.group_rank(world_rank)
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


def all_reduce(
    tensor: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
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
    lane = world.shortcut._lane
    if group is None and not async_op and lane.all_reduce(tensor, op):
        return None
    where = member_group("all_reduce", group)
    if where is None:
        return None
    if where.capture is not None and where.capture.is_mine():
        return where.capture.add("all_reduce", (tensor,), op, async_op)
    if async_op:
        return where.all_reduce_async(tensor, op)
    where.all_reduce(tensor, op)
    return None


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with that of rank ``src`` (or rank ``group_src`` of the group)."""
    lane = world.shortcut._lane
    if group is None and group_src is None and not async_op and lane.broadcast(tensor, src):
        return None
    where = member_group("broadcast", group)
    if where is None:
        return None
    root = root_in_group("broadcast", where, src, group_src)
    if async_op:
        return where.broadcast_async(tensor, root)
    where.broadcast(tensor, root)
    return None


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine ``tensor`` over all ranks; rank ``dst`` gets the result, the others keep theirs."""
    lane = world.shortcut._lane
    if group is None and group_dst is None and not async_op and lane.reduce(tensor, dst, op):
        return None
    where = member_group("reduce", group)
    if where is None:
        return None
    root = root_in_group("reduce", where, dst, group_dst)
    if async_op:
        return where.reduce_async(tensor, root, op)
    where.reduce(tensor, root, op)
    return None


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill ``tensor_list[r]`` with the ``tensor`` of rank ``r``."""
    lane = world.shortcut._lane
    if group is None and not async_op and lane.all_gather(tensor_list, tensor):
        return None
    where = member_group("all_gather", group)
    if where is None:
        return None
    if async_op:
        return where.all_gather_async(tensor_list, tensor)
    where.all_gather(tensor_list, tensor)
    return None


def all_gather_single(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill the output with the ranks' inputs one after the other along dimension 0."""
    lane = world.shortcut._lane
    if group is None and not async_op and lane.all_gather_single(output_tensor, input_tensor):
        return None
    where = member_group("all_gather_single", group)
    if where is None:
        return None
    if where.capture is not None and where.capture.is_mine():
        return where.capture.add("all_gather_single", (output_tensor, input_tensor), None, async_op)
    if async_op:
        return where.all_gather_single_async(output_tensor, input_tensor)
    where.all_gather_single(output_tensor, input_tensor)
    return None


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Fill ``gather_list[r]`` of rank ``dst`` (0 unless given) with the tensor of rank ``r``."""
    lane = world.shortcut._lane
    if (
        group is None
        and group_dst is None
        and not async_op
        and lane.gather(tensor, gather_list, 0 if dst is None else dst)
    ):
        return None
    where = member_group("gather", group)
    if where is None:
        return None
    root = root_in_group("gather", where, dst, group_dst, otherwise=0)
    if async_op:
        return where.gather_async(tensor, gather_list, root)
    where.gather(tensor, gather_list, root)
    return None


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Overwrite ``tensor`` with this rank's entry of the ``scatter_list`` of rank ``src`` (0)."""
    lane = world.shortcut._lane
    if (
        group is None
        and group_src is None
        and not async_op
        and lane.scatter(tensor, scatter_list, 0 if src is None else src)
    ):
        return None
    where = member_group("scatter", group)
    if where is None:
        return None
    root = root_in_group("scatter", where, src, group_src, otherwise=0)
    if async_op:
        return where.scatter_async(tensor, scatter_list, root)
    where.scatter(tensor, scatter_list, root)
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' lists entry by entry; rank ``r`` gets the result of entry ``r``."""
    lane = world.shortcut._lane
    if group is None and not async_op and lane.reduce_scatter(output, input_list, op):
        return None
    where = member_group("reduce_scatter", group)
    if where is None:
        return None
    if async_op:
        return where.reduce_scatter_async(output, input_list, op)
    where.reduce_scatter(output, input_list, op)
    return None


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' ``input``; each rank gets its part of the result along dimension 0."""
    lane = world.shortcut._lane
    if group is None and not async_op and lane.reduce_scatter_single(output, input, op):
        return None
    where = member_group("reduce_scatter_single", group)
    if where is None:
        return None
    if where.capture is not None and where.capture.is_mine():
        return where.capture.add("reduce_scatter_single", (output, input), op, async_op)
    if async_op:
        return where.reduce_scatter_single_async(output, input, op)
    where.reduce_scatter_single(output, input, op)
    return None


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send entry ``r`` of the inputs to rank ``r``, and fill entry ``r`` of the outputs from it."""
    lane = world.shortcut._lane
    if group is None and not async_op and lane.all_to_all(output_tensor_list, input_tensor_list):
        return None
    where = member_group("all_to_all", group)
    if where is None:
        return None
    outputs, inputs = output_tensor_list, input_tensor_list
    if async_op:
        return where.all_to_all_async(outputs, inputs)
    where.all_to_all(outputs, inputs)
    return None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send the r-th part of ``input`` along dimension 0 to rank ``r``; gather what comes."""
    lane = world.shortcut._lane
    if (
        group is None
        and output_split_sizes is input_split_sizes is None
        and not async_op
        and lane.all_to_all_single(output, input)
    ):
        return None
    where = member_group("all_to_all_single", group)
    if where is None:
        return None
    splits = output_split_sizes, input_split_sizes
    if async_op:
        return where.all_to_all_single_async(output, input, *splits)
    where.all_to_all_single(output, input, *splits)
    return None


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has come here; ``device_ids`` is of no use on CPUs."""
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError(f"barrier: device_ids is a list of numbers, got {device_ids!r}")
    default = world.shortcut
    if (
        group is None
        and timeout is None
        and not async_op
        and not default._to_fill
        and default._lane.barrier()
    ):
        return None
    where = member_group("barrier", group)
    if where is None:
        return None
    if async_op:
        return where.barrier_async(timeout)
    where.barrier(timeout)
    return None


all_gather_into_tensor = _all_gather_base = all_gather_single
reduce_scatter_tensor = _reduce_scatter_base = reduce_scatter_single

keep_compiler_out(globals())
