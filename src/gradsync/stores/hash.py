"""``HashStore``: a store inside one process, shared by its threads."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from gradsync.base.deadline import Deadline, Timeout
from gradsync.errors import QueueEmptyError
from gradsync.stores.rules import compared, key_list, summed, timed_out
from gradsync.stores.store import Key, Store, Value, key_text, value_bytes

__all__ = ["HashStore"]


class _Table:
    """What all handles of one store share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}


class HashStore(Store):
    """A store in this process's memory; every operation is atomic and safe between threads.

    >>> store = HashStore()
    >>> store.set("greeting", "hello")
    >>> store.clone().get("greeting")
    b'hello'
    >>> store.add("joined", 2)
    2
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = _Table()

    # -- single keys ------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``, whatever was there, and wake who waits for it."""
        name, data = key_text(key), value_bytes(value)
        with self._table.changed:
            self._put(name, data)

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        return self.multi_get([key])[0]

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        name = key_text(key)
        with self._table.changed:
            total = summed(name, self._table.values.get(name), amount)
            self._put(name, b"%d" % total)
            return total

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then."""
        name, old, new = key_text(key), value_bytes(expected), value_bytes(desired)
        with self._table.changed:
            stored, answer = compared(self._table.values.get(name), old, new)
            if stored:
                self._put(name, new)
            return answer

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        name, data = key_text(key), value_bytes(value)
        with self._table.changed:
            self._put(name, self._table.values.get(name, b"") + data)

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there."""
        name = key_text(key)
        with self._table.changed:
            return self._table.values.pop(name, None) is not None

    # -- many keys --------------------------------------------------------------------------------

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there; a filled queue counts."""
        names = key_list(keys)
        with self._table.changed:
            return all(self._present(name) for name in names)

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        names, deadline = key_list(keys), Deadline(self._limit_s(timeout))
        with self._table.changed:
            self._await(names, self._present, deadline)

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values, all of the same moment, in order."""
        names, deadline = key_list(keys), Deadline(self._limit_s(None))
        values = self._table.values
        with self._table.changed:
            self._await(names, values.__contains__, deadline)
            return [values[name] for name in names]

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place, all at once."""
        names = key_list(keys)
        self._check_lengths(names, values)
        pairs = dict(zip(names, map(value_bytes, values), strict=True))
        with self._table.changed:
            self._table.values.update(pairs)
            self._table.changed.notify_all()

    def num_keys(self) -> int:
        """Return the number of stored keys; queues are not counted."""
        with self._table.changed:
            return len(self._table.values)

    def list_keys(self) -> list[str]:
        """Return the stored keys, in no particular order; queues are not listed."""
        with self._table.changed:
            return list(self._table.values)

    # -- queues -----------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        name, data = key_text(key), value_bytes(value)
        with self._table.changed:
            self._table.queues.setdefault(name, deque()).append(data)
            self._table.changed.notify_all()

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; without ``block``, ``QueueEmptyError``."""
        name, deadline = key_text(key), Deadline(self._limit_s(None))
        queues = self._table.queues
        with self._table.changed:
            if block:
                self._await([name], queues.__contains__, deadline)
            elif name not in queues:
                raise QueueEmptyError(f"HashStore: queue {name!r} is empty")
            value = queues[name].popleft()
            if not queues[name]:
                # A drained queue is no queue: `check` says so, and names do not pile up.
                del queues[name]
            return value

    def queue_len(self, key: Key) -> int:
        """Return the length of the queue ``key``, 0 if it was never used."""
        name = key_text(key)
        with self._table.changed:
            return len(self._table.queues.get(name, ()))

    # -- whole store ------------------------------------------------------------------------------

    def clone(self) -> HashStore:
        """Return another handle on the same data, with a timeout of its own."""
        twin = HashStore()
        twin._table = self._table
        twin._timeout_s = self._timeout_s
        return twin

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are single operations here."""
        return True

    # -- inside the lock --------------------------------------------------------------------------

    def _put(self, name: str, data: bytes) -> None:
        self._table.values[name] = data
        self._table.changed.notify_all()

    def _present(self, name: str) -> bool:
        return name in self._table.values or name in self._table.queues

    def _await(self, names: list[str], present: Callable[[str], bool], deadline: Deadline) -> None:
        while missing := [name for name in names if not present(name)]:
            if deadline.expired():
                raise timed_out("HashStore", missing, deadline.timeout_s)
            left = deadline.remaining()
            # Condition.wait refuses limits beyond what the clock can count.
            limit = None if math.isinf(left) else min(left, threading.TIMEOUT_MAX)
            self._table.changed.wait(limit)
