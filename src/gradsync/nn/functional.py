"""Collectives with gradients: torch's ``torch.distributed.nn.functional``, mathematically right.

Gradients are those of the sum of all ranks' losses, and have gradients themselves. Every rank that
runs a function runs its way back too, in the opposite order of the functions: a rank whose loss
does not depend on a result must add ``0 * result.sum()`` to it, or the others wait for it (and are
told so at the timeout).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.group.buffers import check_list
from gradsync.group.collectives import Group, root_in_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.reductions import Reduction, find_reduction
from gradsync.group.world import resolve
from gradsync.nn import linear

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]

_COMBINE: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
}
"""Reductions that are not linear: the tensors are gathered and combined by torch, which knows the
gradient. Ranks that share the smallest or largest value share its gradient."""


def all_reduce(
    tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Return the reduction of the ranks' tensors.

    >>> import torch, gradsync
    >>> from gradsync.nn import functional
    >>> gradsync.init_process_group()
    >>> x = torch.ones(2, requires_grad=True)
    >>> functional.all_reduce(3 * x).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    >>> gradsync.destroy_process_group()
    """
    where = resolve(group)
    kind, (tensor,) = _prepared(op, (tensor,))
    if _is_combined(kind, tensor):
        return _COMBINE[kind](torch.stack(all_gather(tensor, where)))
    return linear.all_reduce(where, tensor, kind)


def reduce(
    tensor: torch.Tensor, dst: int, op: Reduction = ReduceOp.SUM, group: Group = None
) -> torch.Tensor:
    """Return the reduction of the ranks' tensors on rank ``dst``, zeros on the others."""
    where = resolve(group)
    root = root_in_group("reduce", where, dst, None)
    kind, (tensor,) = _prepared(op, (tensor,))
    if _is_combined(kind, tensor):
        return _COMBINE[kind](torch.stack(linear.gather(where, tensor, root)))
    return linear.reduce(where, tensor, root, kind)


def broadcast(tensor: torch.Tensor, src: int, group: Group = None) -> torch.Tensor:
    """Return the tensor of rank ``src``; only the shape of the others' matters."""
    where = resolve(group)
    return linear.broadcast(where, tensor, root_in_group("broadcast", where, src, None))


def all_gather(tensor: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Return the ranks' tensors, all of one shape."""
    where = resolve(group)
    return linear.all_gather(where, tensor, [tensor.shape] * where.size())


def all_gather_single(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the ranks' tensors one after the other along dimension 0."""
    return linear.all_gather_single(resolve(group), tensor)


def gather(tensor: torch.Tensor, dst: int = 0, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Return the ranks' tensors on rank ``dst``, zeros on the others."""
    where = resolve(group)
    return linear.gather(where, tensor, root_in_group("gather", where, dst, None))


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: Group = None) -> torch.Tensor:
    """Return this rank's entry of the tensors of rank ``src``.

    Every rank gives a list; only the shapes of the others' matter.
    """
    where = resolve(group)
    check_list(tensors, where.size(), "scatter", "tensors")
    return linear.scatter(where, tensors, root_in_group("scatter", where, src, None))


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
) -> torch.Tensor:
    """Combine the ranks' lists entry by entry; return the result of this rank's entry.

    ``output`` is filled with it too; the gradient goes through what is returned.
    """
    where = resolve(group)
    check_list(input_list, where.size(), "reduce_scatter", "input_list")
    kind, inputs = _prepared(op, input_list)
    if _is_combined(kind, output):
        return _combined_scatter(where.size(), kind, output, inputs, group)
    return linear.reduce_scatter(where, output, inputs, kind)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    op: Reduction = ReduceOp.SUM,
    group: Group = None,
) -> torch.Tensor:
    """Combine the ranks' ``input``; return this rank's part of the result along dimension 0.

    ``output`` is filled with it too; the gradient goes through what is returned.
    """
    where = resolve(group)
    kind, (tensor,) = _prepared(op, (input,))
    if _is_combined(kind, tensor):
        pieces = tensor.reshape(where.size(), *output.shape).unbind(0)
        return _combined_scatter(where.size(), kind, output, pieces, group)
    return linear.reduce_scatter_single(where, output, tensor, kind)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
) -> tuple[torch.Tensor, ...]:
    """Send entry ``r`` of the inputs to rank ``r``; return what came from each rank.

    The outputs are filled with it too; the gradient goes through what is returned.
    """
    where = resolve(group)
    check_list(output_tensor_list, where.size(), "all_to_all", "output_tensor_list")
    check_list(input_tensor_list, where.size(), "all_to_all", "input_tensor_list")
    return linear.all_to_all(where, output_tensor_list, input_tensor_list)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name)
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Send the r-th part of ``input`` along dimension 0 to rank ``r``; return what came.

    ``output`` is filled with it too; the gradient goes through what is returned.
    """
    where = resolve(group)
    splits = output_split_sizes or None, input_split_sizes or None
    return linear.all_to_all_single(where, output, input, *splits)


def _prepared(
    op: Reduction, tensors: Sequence[torch.Tensor]
) -> tuple[ReduceOp, Sequence[torch.Tensor]]:
    """Return a reduction without a factor, and the tensors that it is for."""
    kind, factor = find_reduction(op)
    if kind is ReduceOp.PREMUL_SUM:
        return ReduceOp.SUM, [tensor * factor for tensor in tensors]
    return kind, tensors


def _is_combined(kind: ReduceOp, tensor: torch.Tensor) -> bool:
    return kind in _COMBINE and tensor.is_floating_point()


def _combined_scatter(
    size: int,
    kind: ReduceOp,
    output: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    group: Group,
) -> torch.Tensor:
    """Bring every rank's pieces for a rank to it, and combine them there."""
    came = all_to_all([torch.empty_like(output) for _ in range(size)], pieces, group)
    result = _COMBINE[kind](torch.stack(came))
    with torch.no_grad():
        output.copy_(result)
    return result


keep_compiler_out(globals())
