"""``FileStore``: a store in one file that all ranks can open, for jobs without a network port."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

from gradsync.base.deadline import Deadline, Timeout
from gradsync.errors import UsageError
from gradsync.stores.file_log import FileLog
from gradsync.stores.rules import compared, key_list, summed, timed_out
from gradsync.stores.store import Key, Store, Value, key_text, value_bytes

__all__ = ["FileStore"]

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.010


class FileStore(Store):
    """A store in the file ``file_name``, which may lie on a network file system with locks.

    The data lives as long as some process has the store open: who comes when nobody is left starts
    afresh, whatever an earlier job wrote or however it died. With a ``world_size``, the last of at
    least that many handles removes the file, and a process beyond that many is refused; -1, the
    default, means neither. There are no queues.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FileStore(folder + "/store", world_size=1)
    ...     store.set("greeting", "hello")
    ...     other = store.clone()
    ...     print(other.get("greeting"), other.delete_key("unknown"))
    ...     del store, other
    ...     print(os.listdir(folder))
    b'hello' False
    []
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int = -1) -> None:
        super().__init__()
        name = os.fspath(file_name)
        if not name:
            raise UsageError("FileStore needs the name of a file, got an empty one")
        self._path = name
        self._world_size = world_size
        self._adopt(FileLog(name, world_size))
        self._log.join(self._deadline())

    @property
    def path(self) -> str:
        """The name of the file, as it was given."""
        return self._path

    # -- single keys ------------------------------------------------------------------------------

    def set(self, key: Key, value: Value) -> None:
        """Store ``value`` under ``key``, whatever was there; waiters see it within milliseconds."""
        name, data = key_text(key), value_bytes(value)
        with self._log.writing(self._deadline()):
            self._log.write({name: data})

    def get(self, key: Key) -> bytes:
        """Return the value of ``key``, waiting for it to appear."""
        return self.multi_get([key])[0]

    def add(self, key: Key, amount: int) -> int:
        """Add to the decimal integer under ``key`` (absent counts as 0) and return the sum."""
        name = key_text(key)
        with self._log.writing(self._deadline()) as values:
            total = summed(name, values.get(name), amount)
            self._log.write({name: b"%d" % total})
            return total

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Store ``desired`` if the value equals ``expected``; return what the key holds then."""
        name, old, new = key_text(key), value_bytes(expected), value_bytes(desired)
        with self._log.writing(self._deadline()) as values:
            stored, answer = compared(values.get(name), old, new)
            if stored:
                self._log.write({name: new})
            return answer

    def append(self, key: Key, value: Value) -> None:
        """Append to the bytes under ``key``; an absent key counts as empty."""
        name, data = key_text(key), value_bytes(value)
        with self._log.writing(self._deadline()) as values:
            self._log.write({name: values.get(name, b"") + data})

    def delete_key(self, key: Key) -> bool:
        """Remove ``key`` and return whether it was there (torch's FileStore always says True)."""
        name = key_text(key)
        with self._log.writing(self._deadline()) as values:
            present = name in values
            if present:
                self._log.write({name: None})
            return present

    # -- many keys --------------------------------------------------------------------------------

    def check(self, keys: Sequence[Key]) -> bool:
        """Return at once whether all of ``keys`` are there."""
        names = key_list(keys)
        with self._log.reading(self._deadline()) as values:
            return all(name in values for name in names)

    def wait(self, keys: Sequence[Key], timeout: Timeout | None = None) -> None:
        """Wait until all of ``keys`` are there; ``timeout`` overrides the store's own once."""
        self._fetch(key_list(keys), Deadline(self._limit_s(timeout)))

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Wait for all of ``keys`` and return their values, all of the same moment, in order."""
        return self._fetch(key_list(keys), self._deadline())

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place, all at once even if we are killed."""
        names = key_list(keys)
        self._check_lengths(names, values)
        changes = dict(zip(names, map(value_bytes, values), strict=True))
        if changes:
            with self._log.writing(self._deadline()):
                self._log.write(changes)

    def num_keys(self) -> int:
        """Return the number of stored keys (torch's FileStore counts its own counters too)."""
        with self._log.reading(self._deadline()) as values:
            return len(values)

    def list_keys(self) -> list[str]:
        """Return the stored keys, in no particular order."""
        with self._log.reading(self._deadline()) as values:
            return list(values)

    # -- whole store ------------------------------------------------------------------------------

    def clone(self) -> FileStore:
        """Return another handle on the same file, with a timeout of its own."""
        twin = FileStore.__new__(FileStore)
        Store.__init__(twin)
        twin._path = self._path
        twin._world_size = self._world_size
        twin._timeout_s = self._timeout_s
        twin._adopt(self._log.duplicate(self._deadline()))
        return twin

    # -- inside -----------------------------------------------------------------------------------

    def _adopt(self, log: FileLog) -> None:
        self._log = log
        weakref.finalize(self, log.leave)

    def _deadline(self) -> Deadline:
        return Deadline(self._limit_s(None))

    def _fetch(self, names: list[str], deadline: Deadline) -> list[bytes]:
        pause = _FIRST_PAUSE_S
        while True:
            with self._log.reading(deadline) as values:
                missing = [name for name in names if name not in values]
                if not missing:
                    return [values[name] for name in names]
            while True:
                if deadline.expired():
                    raise timed_out(f"FileStore {self._path}", missing, deadline.timeout_s)
                time.sleep(min(pause, deadline.remaining()))
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)
                if self._log.changed():
                    break
