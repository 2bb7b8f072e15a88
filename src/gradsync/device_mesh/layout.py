"""``Layout``: which rank is where in a grid, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from gradsync.errors import UsageError

__all__ = ["Dims", "Layout"]

Dims = tuple[int, ...]
"""Dimensions of a grid that are taken as one."""


@dataclass(frozen=True)
class Layout:
    """A grid of ranks.

    >>> grid = Layout((2, 3), tuple(range(6)))
    >>> grid.coordinate(4)
    (1, 1)
    >>> grid.lines((0,))
    [[0, 3], [1, 4], [2, 5]]
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row by row, the last dimension moving first."""

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or not self.ranks:
            raise UsageError(f"a mesh of shape {self.shape} cannot have {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise UsageError(f"a rank can be in a mesh only once, got {list(self.ranks)}")

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return where a rank is, None when it is not in the grid."""
        if rank not in self.ranks:
            return None
        left, found = self.ranks.index(rank), []
        for length in reversed(self.shape):
            left, at = divmod(left, length)
            found.append(at)
        return tuple(reversed(found))

    def rank_at(self, coordinate: Iterable[int]) -> int:
        """Return the rank that is there."""
        place = 0
        for length, at in zip(self.shape, coordinate, strict=True):
            place = place * length + at
        return self.ranks[place]

    def length(self, dims: Dims) -> int:
        """Return how many ranks a line along ``dims`` has."""
        return prod(self.shape[dim] for dim in dims)

    def lines(self, dims: Dims) -> list[list[int]]:
        """Return the ranks of every line along ``dims``, all the others being fixed."""
        fixed = tuple(dim for dim in range(len(self.shape)) if dim not in dims)
        return [
            [self.rank_at(along) for along in self._walk(dims, start)]
            for start in self._walk(fixed, [0] * len(self.shape))
        ]

    def around(self, coordinate: Sequence[int], groups: Sequence[Dims]) -> Layout:
        """Return the part of the grid through a place, with one dimension for each of ``groups``.

        >>> Layout((2, 3), tuple(range(6))).around((1, 1), [(1,)])
        Layout(shape=(3,), ranks=(3, 4, 5))
        """
        every = tuple(dim for dims in groups for dim in dims)
        return Layout(
            tuple(self.length(dims) for dims in groups),
            tuple(self.rank_at(place) for place in self._walk(every, coordinate)),
        )

    def _walk(self, dims: Dims, start: Sequence[int]) -> Iterator[list[int]]:
        """Yield every place that differs from ``start`` in ``dims`` only, the last moving first."""
        for steps in product(*(range(self.shape[dim]) for dim in dims)):
            place = list(start)
            for dim, at in zip(dims, steps, strict=True):
                place[dim] = at
            yield place
