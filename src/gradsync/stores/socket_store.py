"""``SocketStore``: all operations of a store behind a native client, whatever it connects through.

The one place where failures of the native core become the exceptions of ``gradsync.errors``.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync import config
from gradsync._native import StatusError, StoreClient
from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import (
    DistError,
    DistStoreError,
    QueueEmptyError,
    StoreConnectionError,
    StoreTimeout,
    UsageError,
)
from gradsync.stores.store import Key, Store, Value

__all__ = ["WORKERS_KEY", "SocketStore", "read_token", "translated"]

WORKERS_KEY = "\0gradsync/workers"
"""Counts the participants of a store that knows its world size; hidden from ``list_keys``."""

_CLASSES: dict[str, type[DistError]] = {
    "timeout": StoreTimeout,
    "connection": StoreConnectionError,
    "unauthenticated": StoreConnectionError,
    "interrupted": StoreConnectionError,
    "invalid": UsageError,
    "not_numeric": UsageError,
    "queue_empty": QueueEmptyError,
}


def translated(error: StatusError) -> DistError:
    """Return the exception that users see for a failure inside the native core."""
    code, message, _ = error.args
    return _CLASSES.get(code, DistStoreError)(message)


def read_token(token: str | None) -> str:
    """Return the token that was given, or the job's own from ``GRADSYNC_TOKEN``."""
    return config.read("GRADSYNC_TOKEN") if token is None else token


class SocketStore(Store):
    """A store whose data live in a server that is reached through a socket.

    One object may be used by several threads; a thread that waits does not keep the others waiting.
    A connection that breaks is opened again without a trace, and nothing is done twice.
    """

    _client: StoreClient

    # -- single keys ------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``; returns when it is on its way, not when it has arrived."""
        try:
            self._client.set(key, value, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        try:
            return self._client.get(key, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        try:
            return self._client.add(key, amount, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then."""
        try:
            return self._client.compare_set(key, expected, desired, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        try:
            self._client.append(key, value, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there."""
        try:
            return self._client.delete_key(key, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    # -- many keys --------------------------------------------------------------------------------

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there."""
        try:
            return self._client.check(keys, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        limit_s = self._timeout_s if timeout is None else seconds(timeout)
        try:
            self._client.wait(keys, limit_s)
        except StatusError as error:
            raise translated(error) from None

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values in order."""
        return self.get_within(keys, self._timeout_s)

    def get_within(self, keys: Sequence[Key], timeout: Timeout) -> list[bytes]:
        """Do what ``multi_get`` does, with a limit of its own."""
        try:
            return self._client.multi_get(keys, seconds(timeout))
        except StatusError as error:
            raise translated(error) from None

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place, all at the same moment."""
        self._check_lengths(keys, values)
        try:
            self._client.multi_set(keys, values, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def num_keys(self) -> int:
        """Return the number of stored keys, with the internal one that counts the workers."""
        try:
            return self._client.num_keys(self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def list_keys(self) -> list[str]:
        """Return the stored keys, in no particular order."""
        try:
            keys = self._client.list_keys(self._timeout_s)
        except StatusError as error:
            raise translated(error) from None
        texts = [key.decode("utf-8", "surrogateescape") for key in keys]
        return [text for text in texts if text != WORKERS_KEY]

    # -- queues -----------------------------------------------------------------------------------

    def queue_push(self, key: Key, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        try:
            self._client.queue_push(key, value, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; without ``block``, ``QueueEmptyError``."""
        try:
            return self._client.queue_pop(key, block, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    def queue_len(self, key: Key) -> int:
        """Return the length of the queue ``key``, 0 if it was never used."""
        try:
            return self._client.queue_len(key, self._timeout_s)
        except StatusError as error:
            raise translated(error) from None

    # -- whole store ------------------------------------------------------------------------------

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` participants wait at ``key``, which can then be used again."""
        if world_size < 1:
            raise UsageError(f"barrier needs a world_size of at least 1, got {world_size}")
        limit_s = self._timeout_s if timeout is None else seconds(timeout)
        try:
            self._client.barrier(key, world_size, limit_s)
        except StatusError as error:
            raise translated(error) from None

    def cut_connection(self) -> None:
        """Break the connection, as a network would; the next operation mends it. For tests."""
        self._client.cut()

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are single operations here."""
        return True
