"""``Later``: a tuple that is made when somebody looks into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

__all__ = ["Later"]

T = TypeVar("T")


class Later(Sequence[T]):
    """A tuple whose length is known at once, and what is in it when it is first needed.

    >>> squares = Later(3, lambda: (0, 1, 4))
    >>> len(squares), squares[2], list(squares)
    (3, 4, [0, 1, 4])
    """

    __slots__ = ("_made", "_make", "_size")

    def __init__(self, size: int, make: Callable[[], tuple[T, ...]]) -> None:
        self._size = size
        self._make = make
        self._made: tuple[T, ...] | None = None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made[index]
