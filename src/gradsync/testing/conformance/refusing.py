"""A check that a call is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

from gradsync.group.group import ProcessGroup

__all__ = ["refuses"]


def refuses(
    group: ProcessGroup,
    kind: type[Exception],
    calls: dict[str, Callable[[], None]],
) -> None:
    """Raise unless every call raises ``kind`` on every rank and leaves the group usable."""
    for what, call in calls.items():
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"{what} was accepted")
    group.barrier()
