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
        faults = tuple(marker.kwargs.get("faults", ()))
        for fault in faults:
            if not isinstance(fault, Fault):
                raise UsageError(f"faults takes what gradsync.testing.faults makes, got {fault!r}")
        may_leave = tuple(marker.kwargs.get("may_leave", ()))
        for kind in may_leave:
            if kind not in KINDS:
                raise UsageError(f"a test cannot leave {kind!r}, only {', '.join(KINDS)}")
        return cls(
            tuple(sizes),
            backends,
            marker.kwargs.get("timeout"),
            faults,
            marker.kwargs.get("group", True),
            may_leave,
        )

    def size(self, item: Any) -> int:
        """Return how many ranks an item runs on."""
        chosen: int = _parameter(item, "world_size", self.sizes[0])
        return chosen

    def backend(self, item: Any) -> str:
        """Return the backend that an item runs on."""
        chosen: str = _parameter(item, "backend", self.backends[0])
        return chosen

    def on_threads(self, item: Any) -> bool:
        """Return whether an item's ranks are threads."""
        return self.backend(item) == "threads"


def _parameter(item: Any, name: str, otherwise: Any) -> Any:
    callspec = getattr(item, "callspec", None)
    return otherwise if callspec is None else callspec.params.get(name, otherwise)


def ranks_of(item: Any) -> Ranks | None:
    """Return what an item's marker says, None when it has none."""
    marker = item.get_closest_marker("ranks")
    return None if marker is None else Ranks.parse(marker)


def backends_of(item: Any) -> str:
    """Return the backend of an item, of the default one without a marker."""
    ranks = ranks_of(item)
    return "shm" if ranks is None else ranks.backend(item)


def unavailable(backend: str, names: Sequence[str] = ("shm", "threads")) -> str | None:
    """Return why a backend cannot be used here, None when it can."""
    if backend in names:
        return None
    if backend in _ENGINES:
        return f"gradsync has no engine for {backend!r} here"
    return f"there is no backend {backend!r}; known are {', '.join((*names, *_ENGINES))}"
