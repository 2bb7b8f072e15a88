"""The log file under ``FileStore``: records, locks, and who is a member.

A record is length, checksum and changes, so that one torn by a kill is recognised and dropped. All
locks are byte ranges bound to an open file: the kernel, or the server of a network file system,
drops them with the process, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gradsync.base.deadline import Deadline
from gradsync.errors import DistError, DistStoreError, StoreTimeout, UsageError
from gradsync.stores.file_records import (
    HEADER_BYTES,
    Member,
    changes_in,
    is_header,
    is_ours,
    new_header,
    record,
    records_in,
    this_job,
    this_process,
)

__all__ = ["FileLog"]

_FLOCK = struct.Struct("hhqqi")  # the kernel's struct flock
_MUTEX_BYTE = 0
# A member holds one byte for as long as it lives, far behind any data: this plus the offset of its
# record. Locking it writes nothing.
_MEMBER_BYTES = 1 << 40

_LEAVE_LIMIT_S = 2.0
_TAKEOVER_GRACE_S = 5.0
_UNLOCKED_LOOKS_S = 0.05


class FileLog:
    """One handle on the log: ``values`` is what the file says, as of the last locked look."""

    def __init__(self, path: str, world_size: int) -> None:
        self.values: dict[str, bytes] = {}
        self._path = os.path.abspath(path)
        self._world_size = world_size
        self._mutex = threading.Lock()
        self._fd = -1
        self._header = b""
        self._offset = 0
        self._torn = False
        self._seen_bytes = -1
        self._looked_at = 0.0
        self._members: dict[int, Member] = {}
        self._slot: int | None = None
        _open_logs.add(self)

    # -- joining and leaving ----------------------------------------------------------------------

    def join(self, deadline: Deadline) -> None:
        """Become a member of the job in the file, or start a new one where none is alive."""
        grace = Deadline(_TAKEOVER_GRACE_S)
        while True:
            self._fd = self._open()
            try:
                with self._locked(fcntl.F_WRLCK, deadline):
                    conflict = self._enter() if self._is_current() else None
                if self._slot is not None:
                    return
            finally:
                if self._slot is None:
                    os.close(self._fd)
                    self._fd = -1
            if conflict and grace.expired():
                raise DistStoreError(
                    f"{self._path} is in use by another job: {conflict}. Give every job a path of "
                    "its own, or end the other job first."
                )
            # The other job may be about to end, as when one run follows another.
            time.sleep(0.02 if conflict else 0)

    def duplicate(self, deadline: Deadline) -> FileLog:
        """Return another member of the same job, even if the path names another file by now."""
        twin = FileLog(self._path, self._world_size)
        twin._header, twin._offset = self._header, HEADER_BYTES
        twin._fd = _reopen(self._fd)
        try:
            with twin._locked(fcntl.F_WRLCK, deadline):
                twin._replay()
                twin._sign(twin._world_size)
        except DistError:
            twin.leave()
            raise
        return twin

    def leave(self) -> None:
        """Give up membership; the last member of a complete job removes the file."""
        if self._fd < 0:
            return
        entered = self._mutex.acquire(timeout=_LEAVE_LIMIT_S)
        try:
            if self._slot is not None:
                # First out, then look: of two that leave together, one at least sees nobody.
                self._set_lock(fcntl.F_UNLCK, _MEMBER_BYTES + self._slot)
                self._slot = None
                self._replay()
                if not self._living():
                    with self._locked(fcntl.F_WRLCK, Deadline(_LEAVE_LIMIT_S)):
                        self._replay()
                        self._unlink_if_done()
        except (OSError, DistError):
            pass  # Best effort: whoever comes next sees that nobody is left.
        finally:
            os.close(self._fd)
            self._fd = -1
            if entered:
                self._mutex.release()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's open file, whose locks it would keep alive."""
        self._mutex = threading.Lock()
        self._slot = None
        if self._fd >= 0:
            inherited = self._fd
            try:
                self._fd = _reopen(inherited)
            except OSError:
                self._fd = -1
            os.close(inherited)

    # -- access -----------------------------------------------------------------------------------

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[Mapping[str, bytes]]:
        """Hold the shared lock over an up-to-date view of the values."""
        with self._entered(fcntl.F_RDLCK, deadline):
            yield self.values

    @contextmanager
    def writing(self, deadline: Deadline) -> Iterator[Mapping[str, bytes]]:
        """Hold the exclusive lock; only inside may ``write`` be called."""
        with self._entered(fcntl.F_WRLCK, deadline):
            yield self.values

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Append one record that sets keys, or removes those with None: all of it or nothing."""
        self._append(changes)

    def changed(self) -> bool:
        """Return, without a lock, whether it is worth to look again."""
        # A network file system may show an old size until a lock is taken, hence the second part.
        return (
            os.fstat(self._fd).st_size != self._seen_bytes
            or time.monotonic() - self._looked_at > _UNLOCKED_LOOKS_S
        )

    # -- locks ------------------------------------------------------------------------------------

    @contextmanager
    def _entered(self, kind: int, deadline: Deadline) -> Iterator[None]:
        if not self._mutex.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            raise self._lock_timeout(deadline)
        try:
            if self._fd < 0:
                raise DistStoreError(f"this handle on {self._path} was closed at exit or by a fork")
            if self._slot is None:
                # A forked child that uses its parent's handle: alive, but no rank of its own.
                with self._locked(fcntl.F_WRLCK, deadline):
                    self._replay()
                    self._sign(world_size=-1)
            with self._locked(kind, deadline):
                self._replay()
                yield
        finally:
            self._mutex.release()

    @contextmanager
    def _locked(self, kind: int, deadline: Deadline) -> Iterator[None]:
        pause = 20e-6
        # Not the waiting form of the call: it has no limit, and a stopped holder would hang us.
        while not self._set_lock(kind, _MUTEX_BYTE):
            if deadline.expired():
                if self._header:
                    self._replay()  # without the lock, which is good enough for a message
                raise self._lock_timeout(deadline)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, 0.002)
        try:
            yield
        finally:
            # Said aloud, because closing leaves the lock to a process forked meanwhile.
            self._set_lock(fcntl.F_UNLCK, _MUTEX_BYTE)

    def _set_lock(self, kind: int, byte: int) -> bool:
        request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise DistStoreError(
                f"cannot lock {self._path} ({error.strerror}): its file system has no working "
                "locks. Use a local path, or a TCPStore."
            ) from error
        return True

    def _is_locked(self, byte: int) -> bool:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _lock_timeout(self, deadline: Deadline) -> StoreTimeout:
        members = ", ".join(m.where for m in self._living()) or "nobody known"
        return StoreTimeout(
            f"could not lock {self._path} within {deadline.timeout_s:g} s: a process holds "
            f"the lock and does not move on, perhaps a stopped one. Members: {members}."
        )

    # -- membership, under the exclusive lock -----------------------------------------------------

    def _enter(self) -> str | None:
        """Sign on and return None, or return why the file belongs to a living other job."""
        self._header = self._read_header()
        self._offset = HEADER_BYTES
        self.values.clear()
        self._members.clear()
        if self._header:
            self._replay()
        living = self._living()
        if living and (conflict := self._conflict(living)):
            return conflict
        if not living:
            self._start_generation()
        self._sign(self._world_size)
        return None

    def _conflict(self, living: list[Member]) -> str | None:
        job, size = this_job(), self._world_size
        people = ", ".join(sorted({m.where for m in living}))
        if any(m.job != job for m in living):
            return f"{people} runs with another GRADSYNC_TOKEN"
        counted = [m for m in self._members.values() if m.world_size >= 0]
        if size < 0 or not counted:
            return None
        if counted[0].world_size != size:
            return f"{people} has world_size {counted[0].world_size}, this handle has {size}"
        processes = {m.process for m in counted}
        if 0 < size <= len(processes) and this_process()[0] not in processes:
            return (
                f"all {size} of its processes had joined before this one, and {people} still runs"
            )
        return None

    def _start_generation(self) -> None:
        header = new_header()
        # In place, so that a kill half-way leaves nothing but an empty file, which is a fresh one.
        os.ftruncate(self._fd, 0)
        self._pwrite(header, 0)
        self._header, self._offset, self._torn = header, HEADER_BYTES, False
        self.values.clear()
        self._members.clear()

    def _sign(self, world_size: int) -> None:
        process, where = this_process()
        slot = self._offset
        self._append({str(slot): Member(process, where, this_job(), world_size)})
        self._set_lock(fcntl.F_WRLCK, _MEMBER_BYTES + slot)
        self._slot = slot

    def _living(self) -> list[Member]:
        return [m for slot, m in self._members.items() if self._is_locked(_MEMBER_BYTES + slot)]

    def _unlink_if_done(self) -> None:
        counted = [m for m in self._members.values() if m.world_size >= 0]
        done = counted and len(counted) >= counted[0].world_size
        if done and not self._living() and self._is_current():
            os.unlink(self._path)

    # -- the file ---------------------------------------------------------------------------------

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            parent = os.path.dirname(self._path)
            cause = error.strerror if os.path.isdir(parent) else f"there is no directory {parent}"
            raise DistStoreError(f"cannot open the store file {self._path}: {cause}") from error

    def _is_current(self) -> bool:
        """Return whether the path still names the file that we have open."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _read_header(self) -> bytes:
        head = os.pread(self._fd, HEADER_BYTES, 0)
        if not is_ours(head):
            raise UsageError(
                f"{self._path} exists and is no store file of gradsync; it was left untouched. "
                "Choose another path, or remove the file."
            )
        return head if is_header(head) else b""

    def _replay(self) -> None:
        """Apply what was appended since the last look; a torn end stays unread."""
        if os.pread(self._fd, HEADER_BYTES, 0) != self._header:
            raise DistStoreError(
                f"{self._path} was taken over by a new job, which found no live member of this "
                "one. Give every job its own path; if both run on different hosts, the file "
                "system does not pass locks between them."
            )
        start, size = self._offset, os.fstat(self._fd).st_size
        data = _read_all(self._fd, start, size - start)
        for body, end in records_in(data):
            self._apply(body)
            self._offset = start + end
        self._torn = self._offset < start + len(data)
        self._seen_bytes = -1 if self._torn else size
        self._looked_at = time.monotonic()

    def _append(self, changes: Mapping[str, bytes | Member | None]) -> None:
        if self._torn:
            os.ftruncate(self._fd, self._offset)
            self._torn = False
        data = record(changes)
        self._pwrite(data, self._offset)
        for body, _ in records_in(data):
            self._apply(body)
        self._offset += len(data)
        self._seen_bytes = self._offset

    def _pwrite(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            self._torn = True
            raise DistStoreError(f"cannot write {self._path}: {error.strerror}") from error

    def _apply(self, body: bytes) -> None:
        # Applying twice is harmless, so an interrupt between here and the new offset is too.
        for key, value in changes_in(body):
            if value is None:
                self.values.pop(key, None)
            elif isinstance(value, bytes):
                self.values[key] = value
            else:
                self._members[int(key)] = value


def _read_all(fd: int, at: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(fd, length, at)):
        parts.append(part)
        at, length = at + len(part), length - len(part)
    return b"".join(parts)


def _reopen(fd: int) -> int:
    """Open the same file anew: a second descriptor that shares no locks with the first."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _after_fork_in_child() -> None:
    for log in list(_open_logs):
        log.after_fork()


# The one list in this package that a module keeps: a fork copies every open log, and only a hook
# that knows them all can cut the child's copies off before they are used.
_open_logs: weakref.WeakSet[FileLog] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork_in_child)
