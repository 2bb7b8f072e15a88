"""Tensors as buffer views: contiguous CPU memory with an address, a count and a type number."""

from __future__ import annotations

import torch

from gradsync.backends.call import Buffer
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import UsageError

__all__ = ["copy_back", "view"]

_NUMBERS = {getattr(torch, name): number for number, name in enumerate(DTYPE_NAMES)}


def view(tensor: torch.Tensor, op_name: str) -> Buffer:
    """Return the memory of ``tensor``, or of a contiguous copy when it has gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op_name} needs a torch.Tensor, got {type(tensor).__name__}: {tensor!r}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise UsageError(
            f"{op_name} works on dense CPU tensors, got a tensor of layout {tensor.layout} on "
            f"{tensor.device}; move it with .to_dense() or .cpu()"
        )
    number = _NUMBERS.get(tensor.dtype)
    if number is None:
        raise UsageError(f"{op_name} does not know {tensor.dtype}")
    owner = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    return Buffer(owner.data_ptr(), owner.numel(), number, owner)


def copy_back(tensor: torch.Tensor, buffer: Buffer) -> None:
    """Bring the result home when the call worked on a contiguous copy."""
    if buffer.owner is not tensor:
        with torch.no_grad():
            tensor.copy_(buffer.owner)
