"""Tensors in memory that every local rank has mapped: collectives on them copy nothing."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch.utils.dlpack import from_dlpack

from gradsync.errors import UsageError
from gradsync.group.caller import Caller

__all__ = ["Sharing", "Size"]

Size: TypeAlias = int | tuple[int, ...]


class Sharing(Caller):
    """Allocation of shared tensors; on a backend without shared memory they are ordinary ones."""

    def shared_empty(self, *size: Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor in memory that all ranks of the world have mapped; local and cheap."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise UsageError(f"a shape is made of numbers that are not negative, got {size}")
        kind = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"dtype is a torch.dtype, got {dtype!r}")
        nbytes = math.prod(shape) * kind.itemsize
        make = getattr(self.backend, "shared_bytes", None)
        if make is None or nbytes == 0:
            return torch.empty(shape, dtype=kind)  # type: ignore[arg-type]
        return from_dlpack(make(nbytes)).view(kind).view(shape)  # type: ignore[arg-type]

    def shared_zeros(self, *size: Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros in memory that all ranks of the world have mapped."""
        tensor = self.shared_empty(*size, dtype=dtype)
        # Shared memory comes zeroed, but torch's does not.
        return tensor if self.is_shared(tensor) else tensor.zero_()

    def shared_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` in memory that all ranks of the world have mapped."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"shared_like needs a tensor, got {type(tensor).__name__}: {tensor!r}")
        copy = self.shared_empty(tuple(tensor.shape), dtype=tensor.dtype)
        copy.copy_(tensor.detach())
        return copy.requires_grad_(tensor.requires_grad)

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in memory that the group's ranks have mapped."""
        ask = getattr(self.backend, "is_shared", None)
        return ask is not None and bool(ask(tensor.data_ptr(), tensor.nbytes))
