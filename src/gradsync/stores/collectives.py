"""``StoreCollectives``: small collectives of bytes and integers over any store."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.base.deadline import Timeout, seconds
from gradsync.errors import StoreTimeout, UsageError
from gradsync.stores.store import DEFAULT_TIMEOUT, Key, Store, Value, key_text

__all__ = ["StoreCollectives"]


class StoreCollectives:
    """Broadcast, gather, scatter, sum and barrier for ranks that share a store.

    Each key names one collective and may be used once per object. A timeout names the ranks that
    did not come.

    >>> from gradsync.stores import HashStore
    >>> alone = StoreCollectives(HashStore(), rank=0, world_size=1)
    >>> alone.all_gather("names", "ada"), alone.all_sum("total", 3)
    ([b'ada'], 3)
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not in a world of {world_size}")
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._used: set[str] = set()

    def broadcast_send(self, key: Key, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give ``data`` to every rank that calls ``broadcast_recv``."""
        self._store.set(self._claim(key), data)

    def broadcast_recv(self, key: Key, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Return what one rank gave to ``broadcast_send``."""
        return self._collect("broadcast", [self._claim(key)], timeout)[0]

    def gather_send(self, key: Key, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give ``data`` to the rank that calls ``gather_recv``."""
        self._store.set(f"{self._claim(key)}/{self._rank}", data)

    def gather_recv(self, key: Key, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return the data of every rank by rank, ``data`` being this rank's own."""
        return self._gather("gather", key, data, timeout)

    def scatter_send(
        self, key: Key, data: Sequence[Value], timeout: Timeout = DEFAULT_TIMEOUT
    ) -> bytes:
        """Give each rank its entry of ``data``; return this rank's own."""
        if len(data) != self._world_size:
            raise UsageError(
                f"scatter_send needs one value for each of {self._world_size} ranks, "
                f"got {len(data)}"
            )
        names = self._by_rank(self._claim(key))
        self._store.multi_set(names, data)
        return self._store.get(names[self._rank])

    def scatter_recv(self, key: Key, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Return this rank's entry of what one rank gave to ``scatter_send``."""
        return self._collect("scatter", [f"{self._claim(key)}/{self._rank}"], timeout)[0]

    def all_gather(self, key: Key, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Return the data of every rank by rank, on every rank."""
        return self._gather("all_gather", key, data, timeout)

    def all_sum(self, key: Key, data: int, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
        """Return the sum of every rank's integer, on every rank."""
        name = self._claim(key)
        self._store.add(name, data)
        self._arrive("all_sum", f"{name}/barrier", timeout, block=True)
        return int(self._store.get(name))

    def barrier(self, key: Key, timeout: Timeout = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Announce this rank, and unless ``block`` is false wait for all the others."""
        self._arrive("barrier", self._claim(key), timeout, block)

    # -- inside -----------------------------------------------------------------------------------

    def _claim(self, key: Key) -> str:
        name = key_text(key)
        if name in self._used:
            raise UsageError(
                f"key {name!r} was already used by this StoreCollectives; its values are still in "
                "the store and would be mixed up. Use a new key for each call."
            )
        self._used.add(name)
        return name

    def _by_rank(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._world_size)]

    def _gather(self, operation: str, key: Key, data: Value, timeout: Timeout) -> list[bytes]:
        names = self._by_rank(self._claim(key))
        self._store.set(names[self._rank], data)
        return self._collect(operation, names, timeout)

    def _collect(self, operation: str, names: list[str], timeout: Timeout) -> list[bytes]:
        # The timeout goes with the wait: the store's own may be shared with other threads.
        self._wait(operation, names, names, timeout)
        return self._store.multi_get(names)

    def _arrive(self, operation: str, name: str, timeout: Timeout, block: bool) -> None:
        ranks, last = self._by_rank(name), f"{name}/last_members"
        self._store.set(ranks[self._rank], "joined")
        if self._store.add(f"{name}/num_members", 1) == self._world_size:
            self._store.set(last, "1")
        if block:
            self._wait(operation, [last], ranks, timeout)

    def _wait(
        self, operation: str, awaited: list[str], by_rank: list[str], timeout: Timeout
    ) -> None:
        try:
            self._store.wait(awaited, timeout)
        except StoreTimeout as error:
            absent = [str(r) for r, key in enumerate(by_rank) if not self._store.check([key])]
            # One key alone was to come from a sender whose rank the receiver does not know.
            who = f"rank {', '.join(absent)}" if len(by_rank) > 1 else "the sender"
            raise StoreTimeout(
                f"{operation} {awaited[0]!r} on rank {self._rank} of {self._world_size} timed out "
                f"after {seconds(timeout):g} s: missing {who}."
            ) from error
