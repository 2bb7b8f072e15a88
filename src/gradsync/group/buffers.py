"""Tensors as buffer views: contiguous CPU memory with an address, a count and a type number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.backends.call import Buffer
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import UsageError

__all__ = ["check_like", "check_list", "copy_back", "output_view", "parts", "view"]

_NUMBERS = {getattr(torch, name): number for number, name in enumerate(DTYPE_NAMES)}


def view(tensor: torch.Tensor, op_name: str) -> Buffer:
    """Return the memory of ``tensor``, or of a contiguous copy when it has gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op_name} needs a torch.Tensor, got {type(tensor).__name__}: {tensor!r}")
    if not tensor.is_cpu or tensor.layout is not torch.strided:
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


def output_view(tensor: torch.Tensor, op_name: str) -> Buffer:
    """Like ``view``, for a tensor that is only written to: each element must have its own place."""
    buffer = view(tensor, op_name)
    if buffer.owner is not tensor and any(
        stride == 0 and length > 1
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{op_name} cannot write to an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), whose elements share memory; use .clone() of it"
        )
    return buffer


def parts(buffer: Buffer, counts: Sequence[int], element_bytes: int) -> tuple[Buffer, ...]:
    """Cut a buffer into consecutive pieces of ``counts`` elements."""
    found = []
    address, _, dtype, owner = buffer
    for count in counts:
        found.append(Buffer(address, count, dtype, owner))
        address += count * element_bytes
    return tuple(found)


def check_list(tensors: Sequence[torch.Tensor], size: int, op_name: str, what: str) -> None:
    """Raise unless ``tensors`` is a list with one tensor for each rank."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(
            f"{op_name} needs a list of tensors as {what}, got {type(tensors).__name__}"
        )
    if len(tensors) != size:
        raise UsageError(
            f"{op_name} needs one tensor for each of the {size} ranks as {what}, got {len(tensors)}"
        )


def check_like(
    tensor: torch.Tensor,
    model: torch.Tensor,
    op_name: str,
    what: str,
    *,
    any_shape: bool = False,
) -> None:
    """Raise unless ``tensor`` has the dtype, and the shape, of ``model``."""
    for given in (tensor, model):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{op_name} needs a torch.Tensor, got {type(given).__name__}")
    if tensor.dtype != model.dtype:
        raise UsageError(f"{op_name}: {what} is of {tensor.dtype}, the other of {model.dtype}")
    if not any_shape and tensor.shape != model.shape:
        raise UsageError(
            f"{op_name}: {what} has the shape {tuple(tensor.shape)}, the other {tuple(model.shape)}"
        )
