"""What torch's callers ask about the backend that serves a device, answered for the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gradsync.torch_backend.register import NAME

if TYPE_CHECKING:
    from gradsync.torch_backend.caller import Caller

__all__ = ["CpuBackend"]


class CpuBackend:
    """The backend of a group for CPU tensors, as ``group._get_backend(device)`` returns it."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, owner: Caller) -> None:
        self._owner = owner

    def name(self) -> str:
        """Return "gradsync"."""
        return NAME

    def rank(self) -> int:
        """Return the caller's rank in the group."""
        return self._owner.group.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return self._owner.group.size()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether ``allocate_tensor`` can be used for a device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a tensor that collectives need not copy: every rank has its memory mapped."""
        return self._owner.group.shared_empty(size, dtype=dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of calls that have none of their own."""
        self._owner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def __getattr__(self, name: str) -> Any:
        # Programs that call a backend directly find every operation of the group.
        return getattr(self._owner, name)
