"""Which test each rank will run next, so that it keeps the fixtures which that one uses too."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gradsync.testing.marker import ranks_of, unavailable

__all__ = ["next_on_rank"]


@dataclass(frozen=True)
class _Plan:
    position: dict[pytest.Item, int]
    sizes: list[int]
    """How many processes each item runs on."""


_PLAN = pytest.StashKey[_Plan]()


def next_on_rank(rank: int, nextitem: pytest.Item | None) -> pytest.Item | None:
    """Return the first item from ``nextitem`` on that the process of ``rank`` takes part in."""
    if nextitem is None:
        return None
    session = nextitem.session
    plan = session.stash.get(_PLAN, None)
    if plan is None:
        positions = {item: at for at, item in enumerate(session.items)}
        plan = session.stash[_PLAN] = _Plan(positions, [_processes(i) for i in session.items])
    start = plan.position.get(nextitem, len(plan.sizes))
    for at in range(start, len(plan.sizes)):
        if plan.sizes[at] > rank:
            return session.items[at]
    return None


def _processes(item: pytest.Item) -> int:
    ranks = ranks_of(item)
    if ranks is None or ranks.on_threads(item) or unavailable(ranks.backend(item)) is not None:
        return 0
    return ranks.size(item)
