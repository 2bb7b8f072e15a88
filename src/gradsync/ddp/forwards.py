"""``Forwards``: those whose backward is still to come.

A backward of two of them, with re-entrant checkpoints inside, accumulates some gradients twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["Forwards"]


class _Forward:
    """What autograd calls when backward reaches an output; it lives as long as the graph does."""

    def __init__(self, waiting: weakref.WeakSet[_Forward], opened: Callable[[], None]) -> None:
        self._waiting = waiting
        self._opened = opened
        waiting.add(self)

    def __call__(self, _: object) -> None:
        self._waiting.discard(self)
        self._opened()


class Forwards:
    """The forwards of one replica."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakSet[_Forward] = weakref.WeakSet()

    def begin(self, opened: Callable[[], None]) -> Callable[[object], None]:
        """Return a hook for the outputs of a forward: it calls ``opened`` in backward."""
        return _Forward(self._waiting, opened)

    def __len__(self) -> int:
        return len(self._waiting)
