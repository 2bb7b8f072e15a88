"""Living with torch.compile: what it may trace, and what it is told.

The wrapped module is compiled; what happens around it is not. While it runs, torch's compiler is
told whose it is, so that it cuts the graph where buckets end and gradients arrive as they would
without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from gradsync.group.compiling import skip_in_compiler

__all__ = ["ActiveInCompiler", "outside_of_compiler"]

P = ParamSpec("P")
R = TypeVar("R")

_frames: Any = torch._C._dynamo.eval_frame

# The compiler wants its first bucket, of this size, to be its smallest.
_SMALLEST_CAP_BYTES = 1 << 20


@dataclass(frozen=True)
class _Known:
    """What the compiler asks of the data-parallel module whose graph it cuts."""

    bucket_bytes_cap: int


class ActiveInCompiler:
    """A context: frames that are compiled in it belong to a data-parallel module."""

    def __init__(self, bucket_bytes: int) -> None:
        self._known = _Known(max(bucket_bytes, _SMALLEST_CAP_BYTES))
        self._before: list[Any] = []
        self._told: Any = torch.nn.parallel.DistributedDataParallel

    def __enter__(self) -> None:
        self._before.append(self._told._active_ddp_module)
        self._told._active_ddp_module = self._known

    def __exit__(self, *_: object) -> None:
        self._told._active_ddp_module = self._before.pop()


def outside_of_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the compiler out of ``function`` and of all that it calls."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    skip_in_compiler(plain)
    return plain
