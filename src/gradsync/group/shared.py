"""Shared tensors of the default group, as functions."""

from __future__ import annotations

import torch

from gradsync.group.group import ProcessGroup
from gradsync.group.sharing import Size
from gradsync.group.world import resolve

__all__ = ["shared_empty", "shared_like", "shared_zeros"]


def shared_empty(
    *size: Size, dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return a tensor in memory that all ranks of the group's world have mapped.

    It is a tensor like any other, of this rank alone, and making it takes no communication. When
    every rank calls a collective with such a tensor, the ranks work on each other's memory instead
    of copying. On a backend without shared memory it is an ordinary tensor.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> gradsync.shared_empty(2, 3, dtype=torch.float64).shape
    torch.Size([2, 3])
    >>> gradsync.destroy_process_group()
    """
    return resolve(group).shared_empty(*size, dtype=dtype)


def shared_zeros(
    *size: Size, dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Return a tensor of zeros in memory that all ranks of the group's world have mapped."""
    return resolve(group).shared_zeros(*size, dtype=dtype)


def shared_like(tensor: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return a copy of ``tensor`` in memory that all ranks of the group's world have mapped."""
    return resolve(group).shared_like(tensor)
