"""Collectives as linear maps of all ranks' tensors, each with its adjoint: all that autograd needs.

The gradient of a loss that is the sum of the ranks' losses goes back through a linear map by its
adjoint, which is again a collective: that of a broadcast is a reduce, of an all_gather a
reduce_scatter, of a gather a scatter. The adjoints are made of differentiable collectives, so
gradients have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.group.group import ProcessGroup

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

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Map: TypeAlias = Callable[..., Tensors]


class _LinearMap(torch.autograd.Function):
    """Runs ``forth(*inputs)``; its gradient is ``back(*gradients of the outputs)``."""

    @staticmethod
    def forward(ctx: Any, forth: Map, back: Map, anchor: torch.Tensor, *inputs: Any) -> Tensors:
        ctx.back = back
        return forth(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, None, None, *ctx.back(*grads))


def _apply(group: ProcessGroup, forth: Map, back: Map, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Run the map; the outputs need a gradient on every rank as soon as an input does on one.

    Otherwise a rank whose own input needs none would not take part in the way back, and the others
    would wait for it. It takes one more call, of a byte.
    """
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"a torch.Tensor is needed, got {type(x).__name__}: {x!r}")
    needed = torch.tensor([any(x.requires_grad for x in inputs)], dtype=torch.uint8)
    group.all_reduce(needed, ReduceOp.MAX)
    if not needed:
        return forth(*inputs)
    anchor = torch.zeros((), requires_grad=True)
    found: Tensors = _LinearMap.apply(  # type: ignore[no-untyped-call]
        forth, back, anchor, *inputs
    )
    return found


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _scale(group: ProcessGroup, op: ReduceOp) -> float:
    return 1.0 / group.size() if op == ReduceOp.AVG else 1.0


def _times(tensors: Sequence[torch.Tensor], factor: float) -> Tensors:
    return tuple(tensors) if factor == 1.0 else tuple(tensor * factor for tensor in tensors)


# In all of these ``op`` is SUM or AVG, and roots are ranks of the group.


def all_reduce(group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Adjoint: itself."""

    def forth(x: torch.Tensor) -> Tensors:
        result = x.detach().clone()
        group.all_reduce(result, op)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        return (all_reduce(group, grad, op),)

    return _apply(group, forth, back, (tensor,))[0]


def broadcast(group: ProcessGroup, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Adjoint: reduce."""

    def forth(x: torch.Tensor) -> Tensors:
        result = x.detach().clone()
        group.broadcast(result, root)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        return (reduce(group, grad, root, ReduceOp.SUM),)

    return _apply(group, forth, back, (tensor,))[0]


def reduce(group: ProcessGroup, tensor: torch.Tensor, root: int, op: ReduceOp) -> torch.Tensor:
    """Return zeros on ranks other than the root; adjoint: broadcast."""

    def forth(x: torch.Tensor) -> Tensors:
        result = x.detach().clone()
        group.reduce(result, root, op)
        return (result if group.rank() == root else result.zero_(),)

    def back(grad: torch.Tensor) -> Tensors:
        return _times((broadcast(group, grad, root),), _scale(group, op))

    return _apply(group, forth, back, (tensor,))[0]


def all_gather(
    group: ProcessGroup, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]
) -> Tensors:
    """Gather tensors of the ranks' ``shapes``; adjoint: reduce_scatter."""

    def forth(x: torch.Tensor) -> Tensors:
        results = tuple(_empty(x, shape) for shape in shapes)
        group.all_gather(results, x.detach())
        return results

    def back(*grads: torch.Tensor) -> Tensors:
        own = _empty(grads[0], shapes[group.rank()])
        return (reduce_scatter(group, own, grads, ReduceOp.SUM),)

    return _apply(group, forth, back, (tensor,))


def reduce_scatter(
    group: ProcessGroup, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp
) -> torch.Tensor:
    """Return the result in the memory of ``output``; adjoint: all_gather."""
    shapes = [x.shape for x in inputs]

    def forth(*tensors: torch.Tensor) -> Tensors:
        result = output.detach()
        group.reduce_scatter(result, [x.detach() for x in tensors], op)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        return _times(all_gather(group, grad, shapes), _scale(group, op))

    return _apply(group, forth, back, inputs)[0]


def all_gather_single(group: ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Adjoint: reduce_scatter_single."""
    shape = tensor.shape

    def forth(x: torch.Tensor) -> Tensors:
        rows = x.shape[0] if x.dim() else 1
        result = _empty(x, (group.size() * rows, *x.shape[1:]))
        group.all_gather_single(result, x.detach())
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        return (reduce_scatter_single(group, _empty(grad, shape), grad, ReduceOp.SUM),)

    return _apply(group, forth, back, (tensor,))[0]


def reduce_scatter_single(
    group: ProcessGroup, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp
) -> torch.Tensor:
    """Return the result in the memory of ``output``; adjoint: all_gather_single."""
    shape = tensor.shape

    def forth(x: torch.Tensor) -> Tensors:
        result = output.detach()
        group.reduce_scatter_single(result, x.detach(), op)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        whole = all_gather_single(group, grad).reshape(shape)
        return _times((whole,), _scale(group, op))

    return _apply(group, forth, back, (tensor,))[0]


def all_to_all(
    group: ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Tensors:
    """Return the results in the memory of ``outputs``; adjoint: itself, the other way round."""
    shapes = [x.shape for x in inputs]

    def forth(*tensors: torch.Tensor) -> Tensors:
        results = tuple(output.detach() for output in outputs)
        group.all_to_all(results, [x.detach() for x in tensors])
        return results

    def back(*grads: torch.Tensor) -> Tensors:
        return all_to_all(group, [_empty(grads[0], shape) for shape in shapes], grads)

    return _apply(group, forth, back, inputs)


def all_to_all_single(
    group: ProcessGroup,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> torch.Tensor:
    """Return the result in the memory of ``output``; adjoint: itself, the other way round."""
    shape = tensor.shape

    def forth(x: torch.Tensor) -> Tensors:
        result = output.detach()
        group.all_to_all_single(result, x.detach(), output_splits, input_splits)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        into = _empty(grad, shape)
        return (all_to_all_single(group, into, grad, input_splits, output_splits),)

    return _apply(group, forth, back, (tensor,))[0]


def gather(group: ProcessGroup, tensor: torch.Tensor, root: int) -> Tensors:
    """Return zeros on ranks other than the root; adjoint: scatter."""

    def forth(x: torch.Tensor) -> Tensors:
        results = tuple(torch.zeros_like(x) for _ in range(group.size()))
        group.gather(x.detach(), results if group.rank() == root else None, root)
        return results

    def back(*grads: torch.Tensor) -> Tensors:
        return (scatter(group, grads, root),)

    return _apply(group, forth, back, (tensor,))


def scatter(group: ProcessGroup, inputs: Sequence[torch.Tensor], root: int) -> torch.Tensor:
    """Only the shapes of what ranks other than the root give matter; adjoint: gather."""

    def forth(*tensors: torch.Tensor) -> Tensors:
        result = torch.empty_like(tensors[group.rank()], memory_format=torch.contiguous_format)
        given = [x.detach() for x in tensors] if group.rank() == root else None
        group.scatter(result, given, root)
        return (result,)

    def back(grad: torch.Tensor) -> Tensors:
        return gather(group, grad, root)

    return _apply(group, forth, back, inputs)[0]
