"""Names for what a profiler shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["record_comm"]


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Show the block under ``name`` in torch's profiler."""
    with torch.profiler.record_function(name):
        yield
