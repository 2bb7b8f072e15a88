"""Private tensors that are reduced again and again, moved to where all ranks can reach them.

Their pages are replaced where they are, so addresses, views and arrays of other libraries over the
same memory stay as they were.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from gradsync.backends.backend import Backend
from gradsync.config import read

__all__ = ["adopt", "adopt_bucket", "leave_private"]


def adopt(backend: Backend, tensor: torch.Tensor, only_whole: bool) -> bool:
    """Let the ranks reach a tensor where it is; return False when it is to be tried again.

    With ``only_whole`` nothing is done unless the tensor fills its storage: one that does not may
    be a buffer for tensors of several sizes.
    From then on its storage owns the adoption, which ends with it, and that owns what the storage
    owned before. Like any storage in shared memory it cannot be resized.
    """
    is_busy = getattr(backend, "has_calls_in_flight", None)
    if is_busy is None or (only_whole and not _fills_storage(tensor)):
        return True
    if not _may_be_adopted(tensor):
        return True
    if is_busy():
        return False  # with this very tensor, perhaps
    _move(backend, tensor, copied_at_fork=True)
    return True


def adopt_bucket(backend: Backend, bucket: torch.Tensor) -> None:
    """Let the ranks reach a tensor of which the caller knows that no call in flight works on it.

    A forked child, which seldom has a use for gradients, copies none of it.
    """
    if _fills_storage(bucket) and _may_be_adopted(bucket):
        _move(backend, bucket, copied_at_fork=False)


def _move(backend: Backend, tensor: torch.Tensor, *, copied_at_fork: bool) -> None:
    make = getattr(backend, "adopt", None)
    if make is None:
        return
    storage = tensor.untyped_storage()
    whole = storage.data_ptr(), storage.nbytes()
    adoption = make(tensor.data_ptr(), tensor.nbytes, *whole, copied_at_fork)
    if adoption is not None:
        adoption.move_into(storage, from_dlpack(adoption.memory).untyped_storage())


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def leave_private(_tensor: torch.Tensor, _only_whole: bool) -> bool:
    """Do nothing, in the place of ``adopt``."""
    return True


def _may_be_adopted(tensor: torch.Tensor) -> bool:
    """Return whether torch made the memory of this tensor's storage, and nobody else knows of it.

    Memory of others may outlive the storage, and be written to in the moment when it ends.
    """
    storage = tensor.untyped_storage()
    return (
        read("GRADSYNC_ADOPT") != "0"
        and hasattr(storage, "_swap_data_ptr_")  # older torch cannot
        and storage.resizable()
        and not storage.is_shared()
        and not (_has_devices() and tensor.is_pinned())
    )


def _has_devices() -> bool:
    """Return whether there may be memory that a device has registered."""
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())  # type: ignore[no-untyped-call]
