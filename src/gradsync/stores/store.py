"""``Store``: the interface of every key-value store, and what all of them have in common.

Implementations live beside this file and never import each other. A Python class of a user's own
may subclass ``Store`` too; the operations that it leaves out raise ``NotImplementedError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import UsageError

__all__ = ["DEFAULT_TIMEOUT", "Key", "Store", "Value", "key_text", "value_bytes"]

DEFAULT_TIMEOUT = timedelta(seconds=300)

Key = str | bytes
Value = str | bytes


def key_text(key: Key) -> str:
    """Return a key as text; bytes are taken as UTF-8."""
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.decode("utf-8", "surrogateescape")
    raise TypeError(f"a key must be str or bytes, got {type(key).__name__}: {key!r}")


def value_bytes(value: Value) -> bytes:
    """Return a value as the bytes that are stored; text is stored as UTF-8."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    raise TypeError(f"a value must be str or bytes, got {type(value).__name__}: {value!r}")


class Store:
    """A small key-value store through which the ranks of a job find each other.

    Keys are text, values are bytes (text is stored as UTF-8), reads always return bytes. A blocking
    call waits up to ``timeout`` (300 s unless changed); a timeout of zero waits for ever.
    """

    _timeout_s = DEFAULT_TIMEOUT.total_seconds()

    # -- timeouts ---------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """The default limit of every blocking call."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default limit of every blocking call; zero waits for ever."""
        self._timeout_s = seconds(timeout)

    # -- single keys ------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``, whatever was there, and wake who waits for it."""
        self._missing("set")

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        self._missing("get")

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        self._missing("add")

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then.

        An absent key takes ``desired`` when ``expected`` is empty; otherwise it stays absent and
        ``expected`` itself is returned.
        """
        self._missing("compare_set")

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        self._missing("append")

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there."""
        self._missing("delete_key")

    # -- many keys --------------------------------------------------------------------------------

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there."""
        self._missing("check")

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        self._missing("wait")

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values in order."""
        return [self.get(key) for key in keys]

    def get_within(self, keys: Sequence[Key], timeout: Timeout) -> list[bytes]:
        """Do what ``multi_get`` does, with a limit of its own."""
        self.wait(keys, timeout)
        return self.multi_get(keys)

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place."""
        self._check_lengths(keys, values)
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """Return the number of stored keys."""
        self._missing("num_keys")

    def list_keys(self) -> list[str]:
        """Return the stored keys, in no particular order."""
        self._missing("list_keys")

    # -- queues -----------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._missing("queue_push")

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; without ``block``, ``QueueEmptyError``."""
        self._missing("queue_pop")

    def queue_len(self, key: Key) -> int:
        """Return the length of the queue ``key``, 0 if it was never used."""
        self._missing("queue_len")

    # -- whole store ------------------------------------------------------------------------------

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` participants have called this with the same ``key``."""
        if world_size < 1:
            raise UsageError(f"barrier needs a world_size of at least 1, got {world_size}")
        name = key_text(key)
        last_member = f"{name}/last_member"
        if self.add(f"{name}/num_members", 1) == world_size:
            self.set(last_member, "1")
        self.wait([last_member], timeout)

    def clone(self) -> Store:
        """Return another handle on the same data, for another thread."""
        self._missing("clone")

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set are single operations here."""
        return False

    # -- for implementations ----------------------------------------------------------------------

    def _limit_s(self, timeout: Timeout | None) -> float | None:
        """Return the seconds a call may wait, None for ever."""
        limit = self._timeout_s if timeout is None else seconds(timeout)
        return limit or None

    @staticmethod
    def _check_lengths(keys: Sequence[Key], values: Sequence[Value]) -> None:
        if len(keys) != len(values):
            raise UsageError(
                f"multi_set needs as many values as keys, got {len(keys)} keys and "
                f"{len(values)} values"
            )

    def _missing(self, operation: str) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} does not support {operation}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied; "
            "pass its address and connect again, or use clone()"
        )
