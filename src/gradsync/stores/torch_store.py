"""Adapters between gradsync's stores and torch's, both ways.

Torch is imported on first use only, so that programs without tensors start without it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from gradsync.base.deadline import Deadline, Timeout, seconds
from gradsync.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    StoreConnectionError,
    StoreTimeout,
    UsageError,
)
from gradsync.stores.rules import key_list, timed_out
from gradsync.stores.store import Key, Store, Value, key_text, value_bytes

__all__ = ["from_torch", "to_torch"]

# torch's TCPStore takes 0 as "fail at once" where its other stores, like gradsync's, take it as
# "for ever". This is the longest that still fits the 32-bit milliseconds of poll(2).
_FOR_EVER = timedelta(days=24)

_LONGEST_PAUSE_S = 0.03


def to_torch(store: Store) -> Any:
    """Return a ``torch.distributed.Store`` that keeps its data in ``store``.

    Torch's process groups accept it. The same store gives the same adapter every time, and an
    adapter lives until the process ends: torch holds only the C++ half of a Python store, and would
    call into nothing once Python dropped the other half.
    """
    if isinstance(store, TorchStore):
        return store.torch_store
    if not isinstance(store, Store):
        raise TypeError(f"to_torch takes a store of gradsync, got {type(store).__name__}")
    adapters = _adapter_class().adapters
    if id(store) not in adapters:
        # The adapter keeps the store alive, so the number is not given to another one.
        adapters[id(store)] = _adapter_class()(store)
    return adapters[id(store)]


def from_torch(torch_store: Any) -> Store:
    """Return a gradsync store that keeps its data in ``torch_store``.

    >>> import torch.distributed as dist
    >>> store = from_torch(dist.HashStore())
    >>> store.set("greeting", "hello")
    >>> store.get("greeting")
    b'hello'
    """
    dist = _torch_distributed()
    if not isinstance(torch_store, dist.Store):
        raise TypeError(f"from_torch takes a store of torch, got {type(torch_store).__name__}")
    if isinstance(torch_store, _adapter_class()):
        inner: Store = torch_store.store
        return inner
    return TorchStore(torch_store)


class TorchStore(Store):
    """A store of torch behind gradsync's interface; made by ``from_torch``."""

    def __init__(self, torch_store: Any) -> None:
        super().__init__()
        self.torch_store = torch_store
        """The store of torch that holds the data."""

    @property
    def timeout(self) -> timedelta:
        """The limit of every blocking call of the torch store."""
        limit: timedelta = self.torch_store.timeout
        return timedelta(0) if limit == _FOR_EVER else limit

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the limit of every blocking call of the torch store; zero waits for ever."""
        self.torch_store.set_timeout(_torch_limit(timeout))

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``, whatever was there, and wake who waits for it."""
        self._call("set", key_text(key), value_bytes(value))

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        name = key_text(key)
        return bytes(self._call("get", name, awaited=[name]))

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        return int(self._call("add", key_text(key), amount))

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then."""
        old, new = value_bytes(expected), value_bytes(desired)
        return bytes(self._call("compare_set", key_text(key), old, new))

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        self._call("append", key_text(key), value_bytes(value))

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there, as far as the torch store knows."""
        return bool(self._call("delete_key", key_text(key)))

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there."""
        return bool(self._call("check", key_list(keys)))

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        names = key_list(keys)
        if timeout is None:
            self._call("wait", names, awaited=names)
        elif seconds(timeout) and self._is_loud():
            self._watch(names, Deadline(timeout))
        else:
            self._call("wait", names, _torch_limit(timeout), awaited=names)

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values in order."""
        names = key_list(keys)
        return [bytes(value) for value in self._call("multi_get", names, awaited=names)]

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place."""
        self._check_lengths(keys, values)
        self._call("multi_set", key_list(keys), [value_bytes(value) for value in values])

    def num_keys(self) -> int:
        """Return the number of keys that the torch store counts."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        """Return the keys that the torch store lists."""
        return list(self._call("list_keys"))

    def queue_push(self, key: Key, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._call("queue_push", key_text(key), value_bytes(value))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of the queue ``key``; without ``block``, ``QueueEmptyError``."""
        name = key_text(key)
        return bytes(self._call("queue_pop", name, block, awaited=[name]))

    def queue_len(self, key: Key) -> int:
        """Return the length of the queue ``key``, 0 if it was never used."""
        return int(self._call("queue_len", key_text(key)))

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` participants have called this with the same ``key``."""
        if world_size < 1 or not hasattr(self.torch_store, "barrier"):
            super().barrier(key, world_size, timeout)
            return
        name = key_text(key)
        limit = None if timeout is None else _torch_limit(timeout)
        self._call("barrier", name, world_size, limit, awaited=[name])

    def clone(self) -> TorchStore:
        """Return a clone of the torch store behind the same interface."""
        return TorchStore(self._call("clone"))

    def has_extended_api(self) -> bool:
        """Return what the torch store says."""
        return bool(self._call("has_extended_api"))

    def _is_loud(self) -> bool:
        """Return whether the torch store takes a wait that runs out for a broken connection."""
        below = getattr(self.torch_store, "_underlying_non_prefix_store", self.torch_store)
        return isinstance(below, _torch_distributed().TCPStore)

    def _watch(self, names: list[str], deadline: Deadline) -> None:
        """Wait by looking again and again, about which the torch store writes nothing to stderr."""
        pause_s = 0.001
        while not self.check(names):
            if deadline.expired():
                missing = [name for name in names if not self.check([name])]
                raise timed_out("torch's TCPStore", missing or names, deadline.timeout_s)
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _call(self, operation: str, *args: Any, awaited: Sequence[str] = ()) -> Any:
        method = getattr(self.torch_store, operation, None)
        if method is None:  # an older torch
            self._missing(operation)
        with _from_torch_errors(awaited):
            return method(*args)


def _torch_limit(timeout: Timeout) -> timedelta:
    # torch counts milliseconds and would round the rest of one down to 0.
    limit = seconds(timeout)
    return min(timedelta(seconds=max(limit, 0.001)), _FOR_EVER) if limit else _FOR_EVER


@contextmanager
def _from_torch_errors(awaited: Sequence[str]) -> Iterator[None]:
    """Raise torch's errors as gradsync's."""
    dist = _torch_distributed()
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\nException raised from")[0]
        if isinstance(error, NotImplementedError):
            raise
        if isinstance(error, getattr(dist, "QueueEmptyError", ())):
            raise QueueEmptyError(text) from error
        if isinstance(error, dist.DistNetworkError):
            raise StoreConnectionError(text) from error
        # FileStore raises a bare RuntimeError: only the words tell.
        if awaited and ("timeout" in text.lower() or "timed out" in text):
            raise StoreTimeout(f"{text} (waited for {', '.join(map(repr, awaited))})") from error
        raise DistStoreError(text) from error


@contextmanager
def _to_torch_errors() -> Iterator[None]:
    """Raise gradsync's errors as torch's."""
    dist = _torch_distributed()
    try:
        yield
    except UsageError as error:
        raise ValueError(str(error)) from error
    except QueueEmptyError as error:
        raise getattr(dist, "QueueEmptyError", dist.DistStoreError)(str(error)) from error
    except DistNetworkError as error:
        raise dist.DistNetworkError(str(error)) from error
    except DistStoreError as error:
        raise dist.DistStoreError(str(error)) from error
    except DistError as error:
        raise dist.DistError(str(error)) from error


def _forward(operation: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _to_torch_errors():
            self._share_timeout()
            return getattr(self.store, operation)(*args, **kwargs)

    method.__name__ = operation
    return method


# What torch's bindings, and its C++ code through them, call on a store. The two spellings in camel
# case are the ones that its C++ side looks up.
_FORWARDED = {
    name: name
    for name in (
        *("set", "get", "add", "compare_set", "append", "delete_key", "check", "wait"),
        *("multi_get", "multi_set", "num_keys", "list_keys", "queue_push", "queue_pop"),
        *("queue_len", "barrier", "has_extended_api"),
    )
} | {"deleteKey": "delete_key", "getNumKeys": "num_keys"}


def _torch_distributed() -> Any:
    import torch.distributed

    return torch.distributed


@functools.cache
def _adapter_class() -> Any:
    """Return the subclass of torch's Store, which cannot be written before torch is imported."""
    base = _torch_distributed().Store
    base_timeout = base.timeout.fget

    class GradsyncStore(base):  # type: ignore[misc, valid-type]
        """A gradsync store behind torch's interface."""

        adapters: dict[int, Any] = {}  # noqa: RUF012  (see to_torch: why they are kept)

        def __init__(self, store: Store) -> None:
            super().__init__()
            self.store = store
            super().set_timeout(store.timeout)
            self._shared = base_timeout(self)

        @property
        def timeout(self) -> timedelta:
            self._share_timeout()
            return self.store.timeout

        def set_timeout(self, timeout: timedelta) -> None:
            with _to_torch_errors():
                self.store.set_timeout(timeout)
            self._share_timeout()

        def clone(self) -> Any:
            with _to_torch_errors():
                return to_torch(self.store.clone())

        def _share_timeout(self) -> None:
            # C++ code sets the timeout of its own half without telling; Python code sets the
            # store's. The side that no longer holds the last common value is the one that changed.
            theirs = base_timeout(self)
            if theirs != self._shared:
                self.store.set_timeout(theirs)
            elif self.store.timeout != self._shared:
                super().set_timeout(self.store.timeout)
            self._shared = base_timeout(self)

    for name, operation in _FORWARDED.items():
        setattr(GradsyncStore, name, _forward(operation))
    return GradsyncStore
