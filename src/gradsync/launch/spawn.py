"""``spawn``: call a function in fresh processes that already know how to meet.

The parent serves the store, so no port is opened and the store outlives every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, resource_tracker
from typing import Any

from gradsync.base.deadline import Deadline
from gradsync.config import environment
from gradsync.errors import RankFailedError, UsageError
from gradsync.launch.guardian import kill_group
from gradsync.launch.job import Job
from gradsync.launch.run import GRACE_S, SETTLE_S, exit_status
from gradsync.launch.verdict import Failure, describe_end, first_failure, follows_from_another

__all__ = ["SpawnContext", "spawn"]

_GRACE_S = 5.0
# Less than a pipe holds (64 KiB), so that a failing rank never blocks on a parent that is busy.
_LONGEST_TRACEBACK = 48 * 1024
_PR_SET_PDEATHSIG = 1

_environment_lock = threading.Lock()
_living: set[SpawnContext] = set()
"""Contexts whose ranks may live: dropping the last reference must not take the store away."""


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Call ``fn(rank, *args)`` in ``nprocs`` fresh processes that form one job.

    Inside, ``init_process_group()`` needs no arguments. With ``join`` this returns None when all
    ranks have succeeded; otherwise it returns at once, with a context to join later. Ranks get an
    even share of the cores as ``OMP_NUM_THREADS`` unless it is set.

    Raises:
        RankFailedError: a rank failed; it holds the first cause with its traceback. The other ranks
            have been ended.

    >>> spawn(print, ("says hello",), nprocs=2)  # doctest: +SKIP
    0 says hello
    1 says hello
    """
    if start_method != "spawn":
        raise UsageError(
            f"start_method must be 'spawn', got {start_method!r}: a forked rank would inherit "
            "threads and locks in a broken state"
        )
    if not callable(fn):
        raise UsageError(f"fn must be callable, got {fn!r}")
    context = SpawnContext(fn, tuple(args), nprocs, daemon)
    if not join:
        return context
    context.join()
    return None


class SpawnContext:
    """The ranks that one ``spawn`` started."""

    def __init__(
        self, fn: Callable[..., object], args: tuple[Any, ...], nprocs: int, daemon: bool
    ) -> None:
        env = environment()
        master = (env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""))
        self._job = Job(nprocs, env, master=master if all(master) else None)
        self.processes: list[multiprocessing.process.BaseProcess] = []
        """The ranks as ``multiprocessing`` processes, in rank order."""
        self._channels: list[connection.Connection] = []
        self._handles: list[int] = []
        self._exit_codes: list[int | None] = []
        self._failures: dict[int, Failure] = {}
        self._closed = False
        _living.add(self)
        try:
            for rank in range(nprocs):
                self._start(fn, args, rank, daemon)
        except BaseException:
            self._kill()
            raise

    def pids(self) -> list[int]:
        """Return the process ids in rank order."""
        return [process.pid or 0 for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait for the ranks; return True when all have succeeded, False after ``timeout`` seconds.

        When one fails, the others get ``grace_period`` seconds (none by default) to end by
        themselves before they are ended.

        Raises:
            RankFailedError: the first failure, with its traceback.
        """
        deadline = Deadline(timeout)
        try:
            while not self._closed:
                if self._running() == [] and not self._failures:
                    self._close()
                elif self._failures:
                    self._end(grace_period or 0.0)
                elif deadline.expired():
                    return False
                else:
                    self._wait(deadline.remaining())
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except BaseException:
            self._kill()
            raise
        if self._failures:
            raise self._error()
        return True

    # -- start ------------------------------------------------------------------------------------

    def _start(
        self, fn: Callable[..., object], args: tuple[Any, ...], rank: int, daemon: bool
    ) -> None:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        # The kernel ends a rank with the *thread* that started it, so only the main thread's ranks
        # may ask for that. The guardian covers the others.
        tied = threading.current_thread() is threading.main_thread()
        process = context.Process(
            target=_rank_main,
            args=(fn, rank, args, sender, os.getpid() if tied else 0),
            name=f"rank {rank}",
            daemon=daemon,
        )
        with _child_environment(self._job.environment(rank)):
            process.start()
        sender.close()
        assert process.pid is not None
        self.processes.append(process)
        self._exit_codes.append(None)
        self._channels.append(receiver)
        self._job.started(process.pid)
        self._handles.append(_watchable(process))

    # -- watching ---------------------------------------------------------------------------------

    def _running(self) -> list[int]:
        return [rank for rank, code in enumerate(self._exit_codes) if code is None]

    def _wait(self, limit_s: float) -> None:
        """Wait until something happens to a rank, and note it."""
        running = self._running()
        watched: list[Any] = [self._handles[rank] for rank in running]
        watched += [self._channels[r] for r in running if not self._channels[r].closed]
        connection.wait(watched, None if limit_s == float("inf") else limit_s)
        for rank in running:
            self._note(rank)

    def _note(self, rank: int) -> None:
        process, channel = self.processes[rank], self._channels[rank]
        assert process.pid is not None
        try:
            status = exit_status(process.pid)
        except ChildProcessError:
            status = process.exitcode  # multiprocessing took it when it started another process
        if not channel.closed and channel.poll():
            # A rank may hang after its exception, in a thread that does not end: its word counts.
            failure = _read_failure(channel, rank, process.pid)
            channel.close()
            if failure:
                self._failures.setdefault(rank, failure)
        if status is None:
            return
        if status != 0:
            kill_group(process.pid, signal.SIGKILL)
            failure = Failure(rank, process.pid, status, "", False, time.monotonic())
            self._failures.setdefault(rank, failure)
        self._job.ended(process.pid)
        process.join()
        self._exit_codes[rank] = status

    # -- ending -----------------------------------------------------------------------------------

    def _end(self, grace_s: float) -> None:
        settle = Deadline(SETTLE_S)
        while self._running() and not settle.expired():
            if not first_failure(self._failures.values()).follows:
                break
            self._wait(settle.remaining())
        self._wait_for_all(grace_s)
        for rank in self._running():
            self._note(rank)
        causes = dict(self._failures)
        self._kill()
        self._failures = causes  # what came later is our own doing

    def _interrupt(self) -> None:
        """Pass Ctrl-C on, which the terminal sends to this process alone; a second one kills."""
        try:
            for rank in self._running():
                pid = self.processes[rank].pid
                assert pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            self._wait_for_all(GRACE_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        """End the ranks that run and everything they started, then close."""
        if self._closed:
            return
        for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
            for rank in self._running():
                pid = self.processes[rank].pid
                assert pid is not None
                if not kill_group(pid, number):  # it has not got a group of its own yet
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            self._wait_for_all(patience)
        self._job.end_strays()
        self._close()

    def _wait_for_all(self, patience_s: float | None) -> None:
        deadline = Deadline(patience_s)
        while self._running() and not deadline.expired():
            self._wait(deadline.remaining())

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _living.discard(self)
        for channel in self._channels:
            channel.close()
        for handle in self._handles:
            os.close(handle)
        self._job.close()

    def _error(self) -> RankFailedError:
        first = first_failure(self._failures.values())
        message = (
            f"rank {first.rank} of {self._job.nprocs} failed first: "
            f"{describe_end(first.exit_code)} (pid {first.pid})"
        )
        others = sorted(rank for rank in self._failures if rank != first.rank)
        if others:
            message += f"; then failed: {', '.join(map(str, others))}"
        message += f"\n\n{first.text}" if first.text else ", without a traceback"
        return RankFailedError(
            message, rank=first.rank, exit_code=first.exit_code, traceback_text=first.text
        )


def _watchable(process: multiprocessing.process.BaseProcess) -> int:
    """Return a descriptor that becomes readable when the process has ended."""
    assert process.pid is not None
    try:
        # Not multiprocessing's sentinel: that one stays open as long as any child of the rank does.
        return os.pidfd_open(process.pid)
    except OSError:
        return os.dup(process.sentinel)  # a sandbox that does not know pidfds


def _read_failure(channel: connection.Connection, rank: int, pid: int) -> Failure | None:
    try:
        fields = json.loads(channel.recv_bytes())
    except (EOFError, OSError):
        return None  # closed without a word: the exit status will tell
    return Failure(rank, pid, 1, fields["traceback"], fields["follows"], fields["at"])


@contextlib.contextmanager
def _child_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Let the processes started inside inherit ``values``, and SIGINT blocked.

    They must have them from the first instruction: a module that the child imports before our code
    runs there may read them, as torch does with OMP_NUM_THREADS.
    """
    # It lives as long as this process, so it must not carry the mark of one job.
    resource_tracker.ensure_running()
    with _environment_lock:
        before = dict(os.environ)
        # A terminal sends Ctrl-C to children too, until they have a session of their own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# -- in the rank ----------------------------------------------------------------------------------


def _rank_main(
    fn: Callable[..., object],
    rank: int,
    args: tuple[Any, ...],
    channel: connection.Connection,
    parent: int,
) -> None:
    if parent:
        _die_with(parent)
    os.setsid()
    # The parent shows the traceback. What the function adds to the hook (a group tells its peers)
    # still runs.
    sys.excepthook = lambda *_: None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fn(rank, *args)
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        _report(channel, error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def _report(channel: connection.Connection, error: BaseException) -> None:
    text = traceback.format_exc()
    if len(text.encode("utf-8", "replace")) > _LONGEST_TRACEBACK:
        text = f"… (shortened)\n{text[-_LONGEST_TRACEBACK // 4 :]}"
    message = {
        "traceback": text,
        "follows": follows_from_another(error),
        "at": time.monotonic(),
    }
    with contextlib.suppress(OSError):
        channel.send_bytes(json.dumps(message).encode("utf-8", "replace"))
