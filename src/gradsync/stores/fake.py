"""``FakeStore``: a store that forgets everything and never waits, for ranks that do not exist."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from gradsync.base.deadline import Timeout
from gradsync.stores.rules import key_list
from gradsync.stores.store import Key, Store, Value, key_text, value_bytes

__all__ = ["FakeStore"]


class FakeStore(Store):
    """A store for groups without peers: writes vanish, reads answer at once with nothing.

    Every key seems to be there and to be empty, so that code which waits for other ranks goes on.
    Arguments are still checked.

    >>> store = FakeStore()
    >>> store.set("key", "value")
    >>> store.get("key"), store.num_keys()
    (b'', 0)
    """

    def set(self, key: Key, value: Value) -> None:
        """Forget ``value``."""
        key_text(key)
        value_bytes(value)

    def get(self, key: Key) -> bytes:
        """Return empty bytes."""
        key_text(key)
        return b""

    def add(self, key: Key, amount: int) -> int:
        """Return ``amount``, as if the key had been absent."""
        key_text(key)
        return operator.index(amount)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Return ``desired``, as if it had been stored."""
        self.set(key, expected)
        return value_bytes(desired)

    def append(self, key: Key, value: Value) -> None:
        """Forget ``value``."""
        self.set(key, value)

    def delete_key(self, key: Key) -> bool:
        """Return True."""
        key_text(key)
        return True

    def check(self, keys: Sequence[Key]) -> bool:
        """Return True."""
        key_list(keys)
        return True

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Return at once."""
        key_list(keys)
        self._limit_s(timeout)

    def num_keys(self) -> int:
        """Return 0."""
        return 0

    def list_keys(self) -> list[str]:
        """Return an empty list."""
        return []

    def queue_push(self, key: Key, value: Value) -> None:
        """Forget ``value``."""
        self.set(key, value)

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Return empty bytes, whether or not to block."""
        return self.get(key)

    def queue_len(self, key: Key) -> int:
        """Return 0."""
        key_text(key)
        return 0

    def clone(self) -> FakeStore:
        """Return another fake store."""
        return FakeStore()

    def has_extended_api(self) -> bool:
        """Return True: nothing is done in one operation."""
        return True
