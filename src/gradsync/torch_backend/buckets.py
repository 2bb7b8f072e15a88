"""Buckets of torch's reducer, moved to where all ranks can reach them."""

from __future__ import annotations

from weakref import WeakSet

import torch

from gradsync.backends.freed_memory import keep_freed_memory
from gradsync.errors import DistError
from gradsync.group.group import ProcessGroup

__all__ = ["Buckets"]

_LEAST_BYTES = 16 * 1024
"""Smaller tensors are copied anyway."""


class Buckets:
    """Gives buckets memory that every rank has mapped, when they are reduced a second time.

    torch's DDP makes its buckets itself and asks nobody where. It copies gradients into them in
    every step; in shared memory they are then reduced where they are, in less than half the time.
    A bucket keeps its storage, and the storage gets other memory: views of it, gradients say, go
    along. What is reduced once only, a hook's copy in half precision say, is not worth the move.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()
        # Older torch cannot.
        self._is_possible = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

    def share(self, bucket: torch.Tensor) -> None:
        """Move a bucket into shared memory, unless it is there, or small, or there is no room."""
        if not self._is_possible or bucket.is_sparse or bucket.nbytes < _LEAST_BYTES:
            return
        if self._group.is_shared(bucket):
            return
        storage = bucket.untyped_storage()
        if storage.nbytes() != bucket.nbytes:
            return  # part of something that is not a bucket
        if storage not in self._seen:
            self._seen.add(storage)
            keep_freed_memory()  # as our own DDP does
            return
        try:
            room = self._group.shared_like(bucket)
        except DistError:
            self._is_possible = False  # it goes on without
            return
        storage._swap_data_ptr_(room.untyped_storage())  # type: ignore[attr-defined]
