"""Which tensors calls in flight are about to fill.

A call that takes a copy of what it reads (a tensor with gaps, one to be scaled, several that travel
together) takes it when it is made. What a call before it is still to write there must be in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from functools import partial

import torch

from gradsync.backends.work import Work
from gradsync.errors import DistError

__all__ = ["note_in_flight", "settle"]

# By the address of their storage; threads that carry calls out take them away.
_writing: dict[int, list[Work]] = {}
_lock = threading.Lock()


def note_in_flight(work: Work, tensors: Iterable[torch.Tensor]) -> None:
    """Remember, until it is over, that a call writes to tensors."""
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        with _lock:
            _writing.setdefault(place, []).append(work)
        work.on_done(partial(_forget, place, work))


def _forget(place: int, work: Work) -> None:
    with _lock:
        left = [other for other in _writing.pop(place, ()) if other is not work]
        if left:
            _writing[place] = left


def settle(tensor: torch.Tensor) -> None:
    """Wait for the calls in flight that write to the memory of a tensor that is to be copied."""
    if not _writing:
        return
    with _lock:
        works = tuple(_writing.get(tensor.untyped_storage().data_ptr(), ()))
    for work in works:
        with contextlib.suppress(DistError):  # its own handle tells of that
            work.wait()
