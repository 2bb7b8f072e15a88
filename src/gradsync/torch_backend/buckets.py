"""Buckets of torch's reducer, moved to where all ranks can reach them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from gradsync.backends.freed_memory import keep_freed_memory
from gradsync.group.adopting import adopt_bucket
from gradsync.group.group import ProcessGroup

__all__ = ["Buckets"]


class Buckets:
    """Gives buckets pages that every rank has mapped, when they are reduced a second time.

    torch's DDP makes its buckets itself and asks nobody where. It copies gradients into them in
    every step; in shared memory they are then reduced where they are, in less than half the time.
    The pages are replaced where they are, so whoever has the address, numpy say, keeps the bucket.
    What is reduced once only, a hook's copy in half precision say, is not worth the move.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._times: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        """How often each was seen, as far as that matters."""

    def share(self, bucket: torch.Tensor) -> None:
        """Move a bucket into shared memory the second time, unless it is small or was touched."""
        if bucket.is_sparse:
            return
        storage = bucket.untyped_storage()
        times = self._times.get(storage, 0)
        if times == 0:
            keep_freed_memory()  # as our own DDP does
        elif times == 1:
            # The reducer has waited for its last call, and nobody writes to it any more.
            adopt_bucket(self._group.backend, bucket)
        if times < 2:
            self._times[storage] = times + 1
