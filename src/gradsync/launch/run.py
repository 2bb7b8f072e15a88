"""``gradsync run``: start the ranks of a command, relay their output, end all when one fails.

One thread and one event loop: output, ends of ranks and signals all arrive through a selector.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from gradsync.config import environment
from gradsync.launch.guardian import kill_group
from gradsync.launch.job import Job
from gradsync.launch.output import Relay, Sink, open_channel
from gradsync.launch.verdict import (
    Failure,
    describe_end,
    first_failure,
    last_traceback,
    says_it_follows,
)

__all__ = ["GRACE_S", "SETTLE_S", "exit_status", "run"]

GRACE_S = 10.0
"""How long ranks may take to end by themselves before they are killed."""

SETTLE_S = 1.0
"""How long to look for the cause when a rank only reports that another one is gone."""

_MOST_READS = 1000
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Batch systems announce the end of a time slice with these; ranks may want to save their work.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def exit_status(pid: int) -> int | None:
    """Return how a child ended (negative for a signal), None while it runs.

    The child stays a zombie, so that its number, and its process group's, cannot pass to others.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def run(
    command: Sequence[str],
    nprocs: int,
    *,
    threads: int | None = None,
    grace_s: float = GRACE_S,
    linger_s: float = 0.0,
    signal_children: bool = False,
) -> int:
    """Run ``command`` as ``nprocs`` ranks and return the exit status for the shell.

    0 when all ranks succeeded, 1 when one failed (after a report on stderr), 128 + n when signal n
    ended the launcher. When a rank fails, the others have ``linger_s`` to end by themselves before
    they are told to, and ``grace_s`` after that. ``signal_children`` passes signals to the children
    of ranks too, which a shell script as a rank needs and a data loader's workers do not want.
    """
    env = environment()
    job = Job(nprocs, env, threads=threads)
    if nprocs > 1 and threads is None and not env.get("OMP_NUM_THREADS") and os.isatty(2):
        note = f"gradsync run: {nprocs} ranks, {job.threads} threads each (see --threads)\n"
        sys.stderr.write(note)
    try:
        supervisor = _Supervisor(job, command, grace_s, linger_s, signal_children)
        return supervisor.run()
    finally:
        job.close()


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    streams: dict[int, int] = field(default_factory=dict)
    """Where its output is read, by the descriptor that it writes to; gone once it is closed."""
    relays: dict[int, Relay] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def stderr(self) -> Relay:
        return self.relays[2]


class _Supervisor:
    def __init__(
        self,
        job: Job,
        command: Sequence[str],
        grace_s: float,
        linger_s: float,
        signal_children: bool,
    ) -> None:
        self._job = job
        self._command = list(command)
        self._grace_s = grace_s
        self._linger_s = linger_s
        self._signal_children = signal_children
        self._ranks: list[_Rank] = []
        self._failures: list[Failure] = []
        self._started_at = time.monotonic()
        self._signal = 0
        self._settle_at = self._kill_at = float("inf")
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._sinks = {1: Sink(1), 2: Sink(2)}

    def run(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        restore = self._catch_signals()
        try:
            self._start()
            while any(rank.exit_code is None for rank in self._ranks):
                self._step()
        except BaseException:
            self._kill()
            for rank in self._ranks:
                rank.process.wait()
            self._job.end_strays()
            raise
        finally:
            if self._failures or self._signal:
                self._job.end_strays()
            for rank in self._ranks:
                self._drain(rank, final=True)
            restore()
            self._selector.close()
        if self._signal:
            return 128 + self._signal
        if self._failures:
            self._report()
        lost = self._tell_of_lost_output()
        return 1 if self._failures or lost else 0

    # -- start ------------------------------------------------------------------------------------

    def _start(self) -> None:
        for number in range(self._job.nprocs):
            # On a terminal rank 0 writes as if it were alone, so that progress bars work.
            raw = {fd: self._job.nprocs == 1 or (number == 0 and os.isatty(fd)) for fd in (1, 2)}
            channels = {fd: open_channel(fd if raw[fd] else None) for fd in (1, 2)}
            process = subprocess.Popen(
                self._command,
                env=self._job.environment(number),
                # One reader for the launcher's input: rank 0, so that a debugger works there.
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=channels[1][1],
                stderr=channels[2][1],
                # A session per rank: killing its group takes its children too, and the terminal's
                # Ctrl-C reaches ranks once, through us.
                start_new_session=True,
            )
            self._job.started(process.pid)
            rank = _Rank(number, process)
            self._ranks.append(rank)
            for fd, (reader, writer) in channels.items():
                os.close(writer)
                rank.streams[fd] = reader
                rank.relays[fd] = Relay(self._sinks[fd], f"[{number}] ".encode(), raw=raw[fd])
                os.set_blocking(reader, False)
                self._selector.register(reader, selectors.EVENT_READ, (rank, fd))

    def _catch_signals(self) -> Callable[[], None]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

        def ignore(number: int, frame: FrameType | None) -> None:
            """Do nothing: the wakeup descriptor below carries the number to the loop."""

        before = {
            number: signal.signal(number, ignore)
            for number in (*_ENDING, *_PASSED_ON, signal.SIGCHLD)
        }
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, None)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

        return restore

    # -- the loop ---------------------------------------------------------------------------------

    def _step(self) -> None:
        now = time.monotonic()
        wake_at = min(self._settle_at, self._kill_at)
        limit = None if wake_at == float("inf") else max(0.0, wake_at - now)
        for key, _ in self._selector.select(limit):
            if key.data is None:
                self._on_signals(os.read(key.fd, 512))
            else:
                rank, fd = key.data
                self._read(rank, fd)
        now = time.monotonic()
        if now >= self._settle_at:
            self._end()
        if now >= self._kill_at:
            self._kill()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _PASSED_ON:
                self._send(number)
            elif number in _ENDING:
                if self._signal:  # asked twice: no more patience
                    self._kill()
                self._signal = self._signal or number
                self._send(number)
                self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        for rank in self._ranks:
            if rank.exit_code is None:
                self._reap(rank)

    def _reap(self, rank: _Rank) -> None:
        status = exit_status(rank.process.pid)
        if status is None:
            return
        if status != 0 or self._ending or self._signal:
            kill_group(rank.process.pid, signal.SIGKILL)
        self._job.ended(rank.process.pid)
        rank.process.wait()
        rank.exit_code = status
        self._drain(rank)
        if status == 0 or self._ending or self._signal:
            return
        lines = rank.stderr.last_lines
        follows = says_it_follows(lines)
        self._failures.append(
            Failure(
                rank.number,
                rank.process.pid,
                status,
                "\n".join(last_traceback(lines)),
                follows,
                time.monotonic(),
            )
        )
        patience_s = max(SETTLE_S, self._linger_s) if follows else self._linger_s
        if patience_s:
            self._settle_at = min(self._settle_at, time.monotonic() + patience_s)
        else:
            self._end()

    # -- ending -----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Ask the remaining ranks to end."""
        self._settle_at = float("inf")
        if self._ending:
            return
        # Ends that are already there count as failures of their own, not as our doing.
        for rank in self._ranks:
            if rank.exit_code is None:
                self._reap(rank)
        if self._ending:
            return
        self._ending = True
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            if rank.exit_code is None:
                if self._signal_children:
                    kill_group(rank.process.pid, number)
                else:
                    os.kill(rank.process.pid, number)  # not reaped: the number is still its own

    def _kill(self) -> None:
        self._kill_at = float("inf")
        self._ending = True
        for rank in self._ranks:
            if rank.exit_code is None:
                kill_group(rank.process.pid, signal.SIGKILL)

    # -- output -----------------------------------------------------------------------------------

    def _read(self, rank: _Rank, fd: int) -> bool:
        """Take what there is; return whether there may be more."""
        stream = rank.streams.get(fd)
        if stream is None:
            return False
        try:
            data = os.read(stream, 65536)
        except BlockingIOError:
            return False
        except OSError:  # what a terminal says when its last writer has gone
            data = b""
        if data:
            rank.relays[fd].feed(data)
            return True
        self._close(rank, fd)
        return False

    def _close(self, rank: _Rank, fd: int) -> None:
        stream = rank.streams.pop(fd, None)
        if stream is not None:
            self._selector.unregister(stream)
            os.close(stream)

    def _drain(self, rank: _Rank, *, final: bool = False) -> None:
        for fd, relay in rank.relays.items():
            # Bounded: a child of the rank may go on writing faster than we read.
            for _ in range(_MOST_READS):
                if not self._read(rank, fd):
                    break
            if final:
                relay.finish()
                self._close(rank, fd)

    def _tell_of_lost_output(self) -> bool:
        for fd, sink in self._sinks.items():
            if sink.failure is not None:
                name = {1: "standard output", 2: "standard error"}[fd]
                text = f"gradsync run: {name} was lost: {sink.failure.strerror}\n"
                self._sinks[2].write_line(text.encode())
        return any(sink.failure is not None for sink in self._sinks.values())

    def _report(self) -> None:
        first = first_failure(self._failures)
        others = [f for f in self._failures if f is not first]
        text = (
            f"gradsync run: rank {first.rank} of {self._job.nprocs} failed first: "
            f"{describe_end(first.exit_code)} (pid {first.pid}, "
            f"{first.at - self._started_at:.1f} s after the start)\n"
        )
        if first.text:
            text += "  its last lines on stderr:\n"
            text += "".join(f"    {line}\n" for line in first.text.split("\n"))
        else:
            text += "  it wrote nothing on stderr\n"
        for other in others:
            text += f"  then rank {other.rank}: {describe_end(other.exit_code)}\n"
        ended = [r.number for r in self._ranks if r.number not in {f.rank for f in self._failures}]
        if ended and any(self._ranks[number].exit_code for number in ended):
            text += "  the other ranks were ended\n"
        self._sinks[2].write_line(text.encode("utf-8", "replace"))
