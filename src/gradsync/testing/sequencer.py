"""Forcing an order across ranks: part 0 runs before part 1, wherever they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradsync.base.deadline import Timeout
from gradsync.stores.store import Store

__all__ = ["Sequencer"]


class Sequencer:
    """Runs numbered parts of a test in order, over all ranks that share ``store``.

    >>> from gradsync.stores.hash import HashStore
    >>> order = Sequencer(HashStore())
    >>> with order(0):
    ...     pass
    >>> with order(1):
    ...     pass
    """

    def __init__(
        self, store: Store, name: str = "sequence", timeout: Timeout | None = None
    ) -> None:
        self._store = store
        self._name = name
        self._timeout = timeout

    @contextlib.contextmanager
    def __call__(self, number: int) -> Iterator[None]:
        """Wait for part ``number - 1`` to end, run, and let part ``number + 1`` begin.

        A part that raises lets the next one begin all the same: the test fails anyway.
        """
        if number > 0:
            self._store.wait([f"{self._name}/{number - 1}"], self._timeout)
        try:
            yield
        finally:
            self._store.set(f"{self._name}/{number}", b"done")
