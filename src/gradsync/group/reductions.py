"""Reductions as callers name them: gradsync's own, torch's, by number or by name, with a factor."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from gradsync.base.dtypes import PremulSum, ReduceOp
from gradsync.errors import UsageError
from gradsync.group.in_flight import settle

__all__ = ["Reduction", "find_reduction", "scaled", "supports_complex"]

Reduction: TypeAlias = ReduceOp | PremulSum
"""What collectives take as ``op``; names, numbers and torch's own values are understood too."""


def find_reduction(op: Any) -> tuple[ReduceOp, Any]:
    """Return the reduction that is meant, and the factor of a PREMUL_SUM (None otherwise).

    >>> find_reduction("max")
    (<ReduceOp.MAX: 4>, None)
    >>> find_reduction(ReduceOp.PREMUL_SUM(2))
    (<ReduceOp.PREMUL_SUM: 8>, 2)
    """
    if op.__class__ is ReduceOp and op is not ReduceOp.PREMUL_SUM:
        return op, None  # the usual case, first
    if isinstance(op, PremulSum):
        return ReduceOp.PREMUL_SUM, op.factor
    kind, factor = _named(op)
    if kind is ReduceOp.PREMUL_SUM and factor is None:
        raise UsageError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(0.5)")
    return kind, factor


def _named(op: Any) -> tuple[ReduceOp, Any]:
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()], None
    # bool is an int, but no reduction.
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(ReduceOp):
        return ReduceOp(op), None
    if type(op).__module__.startswith("torch."):  # torch.distributed.ReduceOp, or a value of it
        name = str(getattr(getattr(op, "op", op), "name", None))
        if name in ReduceOp.__members__:
            # Only theirs with a factor lets itself be asked for it.
            return ReduceOp[name], getattr(op, "factor", None) if name == "PREMUL_SUM" else None
    wrong = UsageError if isinstance(op, str | int) else TypeError
    raise wrong(f"op must be a ReduceOp ({', '.join(ReduceOp.__members__)}), got {op!r}")


def supports_complex(reduceOp: Any) -> bool:  # noqa: N803  (torch's name)
    """Return whether complex tensors can be reduced so.

    >>> supports_complex("sum"), supports_complex(ReduceOp.MAX)
    (True, False)
    """
    kind = ReduceOp.PREMUL_SUM if isinstance(reduceOp, PremulSum) else _named(reduceOp)[0]
    return kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def scaled(tensor: torch.Tensor, factor: Any, op_name: str) -> torch.Tensor:
    """Return a new tensor of the same type: ``tensor`` times ``factor``."""
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise UsageError(
                f"{op_name}: the factor of PREMUL_SUM is a number or a tensor with one element, "
                f"got one of shape {tuple(factor.shape)}"
            )
        factor = factor.item()
    if isinstance(factor, bool) or not isinstance(factor, int | float | complex):
        raise TypeError(f"{op_name}: the factor of PREMUL_SUM is a number, got {factor!r}")
    if tensor.dtype is torch.bool:
        raise UsageError(f"{op_name}: PREMUL_SUM is not defined for torch.bool")
    settle(tensor)
    with torch.no_grad():
        # Types without arithmetic of their own (8-bit floats) and halves are scaled in float32.
        wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
        result = wide * factor
    if not torch.can_cast(result.dtype, tensor.dtype):
        raise UsageError(
            f"{op_name}: {tensor.dtype} times {factor!r} is of {result.dtype}; give a factor that "
            f"the tensor's own type can hold"
        )
    return result.to(tensor.dtype)
