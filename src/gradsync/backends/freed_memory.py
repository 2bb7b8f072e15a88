"""Training makes and frees the same memory in every step: the process had better keep it."""

from __future__ import annotations

import functools

from gradsync import _native
from gradsync.config import environment, read

__all__ = ["keep_freed_memory"]

_SETTINGS_OF_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Tell malloc so, once, unless the user has settled it; return whether that was done."""
    if read("GRADSYNC_KEEP_FREED_MEMORY") == "0":
        return False
    if any(name in environment() for name in _SETTINGS_OF_GLIBC):
        return False
    return _native.keep_freed_memory()
