"""Tensors as buffer views: contiguous CPU memory with an address, a count and a type number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.backends.call import Buffer
from gradsync.base.dtypes import DTYPE_NAMES
from gradsync.errors import UsageError
from gradsync.group.in_flight import settle

__all__ = [
    "check_dtypes",
    "check_list",
    "check_shapes",
    "check_writable",
    "copy_back",
    "output_view",
    "parts",
    "view",
]

_STRIDED = torch.strided
_LISTS = (list, tuple)
_NUMBERS = {  # older versions of torch lack some
    getattr(torch, name): number for number, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)
}


def view(tensor: torch.Tensor, op_name: str) -> Buffer:
    """Return the memory of ``tensor``, or of a contiguous copy when it has gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op_name} needs a torch.Tensor, got {type(tensor).__name__}: {tensor!r}")
    if tensor.layout is not _STRIDED or not tensor.is_cpu:
        raise UsageError(
            f"{op_name} works on dense CPU tensors, got a tensor of layout {tensor.layout} on "
            f"{tensor.device}; move it with .to_dense() or .cpu()"
        )
    number = _NUMBERS.get(tensor.dtype)
    if number is None:
        raise UsageError(f"{op_name} does not know {tensor.dtype}; {_instead(tensor)}")
    owner = tensor
    # A conjugated or negated view is contiguous too, but its memory holds something else.
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        settle(tensor)
        owner = tensor.detach().resolve_conj().resolve_neg().contiguous()
    address, count = owner.data_ptr(), owner.numel()
    if not address and count:
        raise UsageError(
            f"{op_name} got a {type(tensor).__name__} without memory of its own; pass the plain "
            f"tensor that it stands for (a DTensor's is .to_local())"
        )
    return Buffer(address, count, number, owner)


def _instead(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        return "pass its .int_repr(), and its scale and zero point apart from that"
    return "its bytes, .view(torch.uint8), can be sent and gathered"


def copy_back(tensor: torch.Tensor, buffer: Buffer) -> None:
    """Bring the result home when the call worked on a contiguous copy."""
    if buffer.owner is not tensor:
        tensor.data.copy_(buffer.owner)  # like a collective in place: autograd sees no change


def output_view(tensor: torch.Tensor, op_name: str) -> Buffer:
    """Like ``view``, for a tensor that is only written to: each element must have its own place."""
    buffer = view(tensor, op_name)
    if buffer.owner is not tensor:
        check_writable(tensor, op_name)
    return buffer


def check_writable(tensor: torch.Tensor, op_name: str) -> None:
    """Raise when elements of ``tensor`` share memory, which has then no room for a result."""
    if any(
        stride == 0 and length > 1
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{op_name} cannot write to an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), whose elements share memory; use .clone() of it"
        )


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
    if not isinstance(tensors, _LISTS):
        raise TypeError(
            f"{op_name} needs a list of tensors as {what}, got {type(tensors).__name__}"
        )
    if len(tensors) != size:
        raise UsageError(
            f"{op_name} needs one tensor for each of the {size} ranks as {what}, got {len(tensors)}"
        )


def check_dtypes(tensors: Sequence[torch.Tensor], dtype: torch.dtype, op_name: str) -> None:
    """Raise unless all of ``tensors`` are tensors of ``dtype``."""
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op_name} needs tensors in its lists, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise UsageError(
                f"{op_name}: tensor {number} of a list is of {tensor.dtype}, another of {dtype}"
            )


def check_shapes(tensors: Sequence[torch.Tensor], shape: torch.Size, op_name: str) -> None:
    """Raise unless all of ``tensors`` have the same shape."""
    for number, tensor in enumerate(tensors):
        if tensor.shape != shape:
            raise UsageError(
                f"{op_name}: tensor {number} of the list has the shape {tuple(tensor.shape)}, "
                f"where {tuple(shape)} is needed"
            )
