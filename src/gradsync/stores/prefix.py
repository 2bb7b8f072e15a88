"""``PrefixStore``: a view of another store in which every key starts with a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from gradsync.base.deadline import Timeout
from gradsync.stores.rules import key_list
from gradsync.stores.store import Key, Store, Value, key_text

__all__ = ["PrefixStore"]


class PrefixStore(Store):
    """A store whose key ``k`` is the key ``prefix/k`` of the store it wraps.

    Its timeout is the wrapped store's own, so setting it touches everyone who shares that store.

    >>> from gradsync.stores import HashStore
    >>> inner = HashStore()
    >>> PrefixStore("a", PrefixStore("b", inner)).set("k", "v")
    >>> inner.list_keys()
    ['b/a/k']
    """

    def __init__(self, prefix: Key, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(
                f"PrefixStore wraps a gradsync store, got {type(store).__name__}; "
                "for a store of torch use gradsync.stores.from_torch first"
            )
        self._prefix = key_text(prefix) + "/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that this one wraps directly."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store._store
        return store

    # -- timeouts ---------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """The wrapped store's limit of every blocking call."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the wrapped store's limit of every blocking call; zero waits for ever."""
        self._store.set_timeout(timeout)

    # -- single keys ------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``, whatever was there, and wake who waits for it."""
        self._store.set(self._full(key), value)

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        return self._store.get(self._full(key))

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        return self._store.add(self._full(key), amount)

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then."""
        return self._store.compare_set(self._full(key), expected, desired)

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        self._store.append(self._full(key), value)

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there."""
        return self._store.delete_key(self._full(key))

    # -- many keys --------------------------------------------------------------------------------

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there."""
        return self._store.check(self._all(keys))

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        self._store.wait(self._all(keys), timeout)

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values in order."""
        return self._store.multi_get(self._all(keys))

    def get_within(self, keys: Sequence[Key], timeout: Timeout) -> list[bytes]:
        """Do what ``multi_get`` does, with a limit of its own."""
        return self._store.get_within(self._all(keys), timeout)

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place."""
        self._store.multi_set(self._all(keys), values)

    def num_keys(self) -> int:
        """Return the number of keys of the wrapped store, whatever their prefix."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys under this prefix, without it."""
        skip = len(self._prefix)
        return [key[skip:] for key in self._store.list_keys() if key.startswith(self._prefix)]

    # -- queues -----------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._store.queue_push(self._full(key), value)

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; without ``block``, ``QueueEmptyError``."""
        return self._store.queue_pop(self._full(key), block)

    def queue_len(self, key: Key) -> int:
        """Return the length of the queue ``key``, 0 if it was never used."""
        return self._store.queue_len(self._full(key))

    # -- whole store ------------------------------------------------------------------------------

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` participants have called this with the same ``key``."""
        self._store.barrier(self._full(key), world_size, timeout)

    def clone(self) -> PrefixStore:
        """Return the same view of a clone of the wrapped store."""
        return PrefixStore(self._prefix[:-1], self._store.clone())

    def has_extended_api(self) -> bool:
        """Return what the wrapped store says."""
        return self._store.has_extended_api()

    def _full(self, key: Key) -> str:
        return self._prefix + key_text(key)

    def _all(self, keys: Sequence[Key]) -> list[str]:
        return [self._prefix + key for key in key_list(keys)]
