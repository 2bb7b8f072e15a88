"""The ``ranks`` marker: what it may say, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gradsync.errors import UsageError
from gradsync.testing.faults import Fault
from gradsync.testing.leaks import KINDS

__all__ = ["Ranks", "backends_of", "ranks_of", "unavailable"]

_KNOWN = {"threads", "backend", "timeout", "faults", "group", "may_leave"}
_BUILT_IN = ("shm", "threads")
_ENGINES = ("gloo", "mpi", "nccl", "xccl")


@dataclass(frozen=True)
class Ranks:
    """A parsed ``@pytest.mark.ranks(...)``."""

    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    timeout: float | None
    faults: tuple[Fault, ...]
    group: bool
    may_leave: tuple[str, ...]

    @classmethod
    def parse(cls, marker: pytest.Mark) -> Ranks:
        """Check a marker and return what it says."""
        unknown = set(marker.kwargs) - _KNOWN
        if unknown:
            raise UsageError(
                f"ranks(...) does not know {', '.join(sorted(unknown))}; "
                f"it knows {', '.join(sorted(_KNOWN))}"
            )
        sizes = marker.args or (2,)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UsageError(f"ranks(...) takes numbers of ranks, got {marker.args!r}")
        backend = marker.kwargs.get("backend", "shm")
        backends = (backend,) if isinstance(backend, str) else tuple(backend)
        if marker.kwargs.get("threads"):
            backends = ("threads",)
        for name in backends:
            if name not in (*_BUILT_IN, *_ENGINES):
                raise UsageError(str(unavailable(name)))
        group = marker.kwargs.get("group", True)
        if not group and "threads" in backends:
            raise UsageError("group=False needs ranks that are processes, not threads")
        faults = tuple(marker.kwargs.get("faults", ()))
        _check_faults(faults, min(sizes), group)
        may_leave = tuple(marker.kwargs.get("may_leave", ()))
        for kind in may_leave:
            if kind not in KINDS:
                raise UsageError(f"a test cannot leave {kind!r}, only {', '.join(KINDS)}")
        return cls(
            tuple(sizes),
            backends,
            marker.kwargs.get("timeout"),
            faults,
            group,
            may_leave,
        )

    def size(self, item: Any) -> int:
        """Return how many ranks an item runs on."""
        chosen: int = _parameter(item, "world_size", self.sizes)
        return chosen

    def backend(self, item: Any) -> str:
        """Return the backend that an item runs on."""
        chosen: str = _parameter(item, "backend", self.backends)
        return chosen

    def on_threads(self, item: Any) -> bool:
        """Return whether an item's ranks are threads."""
        return self.backend(item) == "threads"


def _parameter(item: Any, name: str, values: Sequence[Any]) -> Any:
    """Return which of the marker's values an item is for; a test's own parameter has no say."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or len(values) == 1:
        return values[0]
    return callspec.params.get(name, values[0])


def _check_faults(faults: Sequence[Any], size: int, group: bool) -> None:
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"faults takes what gradsync.testing.faults makes, got {fault!r}")
        from gradsync.backends.ops import OPS, TRANSFERS  # here, because it takes torch

        names = [op.name for op in (*OPS, *TRANSFERS)]
        if fault.op not in (*names, "*"):
            raise UsageError(
                f"a fault is planned at {fault.op!r}, which is no operation; there are "
                f"{', '.join(names)} and '*'"
            )
        if fault.rank >= size:
            raise UsageError(f"a fault is planned on rank {fault.rank}, but there are {size} ranks")
    if faults and not group:
        raise UsageError("faults strike in the kit's group, and group=False makes none")


def ranks_of(item: Any) -> Ranks | None:
    """Return what an item's marker says, None when it has none."""
    marker = item.get_closest_marker("ranks")
    return None if marker is None else Ranks.parse(marker)


def backends_of(item: Any) -> str:
    """Return the backend of an item, of the default one without a marker."""
    ranks = ranks_of(item)
    return "shm" if ranks is None else ranks.backend(item)


def unavailable(backend: str, names: Sequence[str] = _BUILT_IN) -> str | None:
    """Return why a backend cannot be used here, None when it can."""
    if backend in names:
        return None
    if backend in _ENGINES:
        return f"gradsync has no engine for {backend!r} here"
    return f"there is no backend {backend!r}; known are {', '.join((*names, *_ENGINES))}"
