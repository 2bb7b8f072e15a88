"""The guardian: a tiny process that ends a job's processes when the launcher dies, even by SIGKILL.

It runs this file alone (standard library only, no site), asleep until the launcher says "q" or is
gone. It finds a job's processes by what the launcher told it and by the job's mark in their
environment, never by name, so that a rank's own children are found wherever they moved to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

__all__ = ["end_everything", "find_carriers", "kill_group", "main"]

_PATIENCE_S = 10.0
"""How long to go on sweeping for processes that cannot die (stuck in the kernel)."""


def find_carriers(mark: bytes) -> list[int]:
    """Return the living processes whose environment holds ``mark``, a whole ``NAME=value``."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                carries = mark in file.read().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or another user's
        if carries:
            found.append(int(name))
    return found


def kill_group(leader: int, number: int) -> bool:
    """Send a signal to a process group and return whether it had members."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_everything(leaders: set[int], mark: bytes) -> None:
    """Kill the given process groups and every process that carries ``mark``."""
    for leader in leaders:
        kill_group(leader, signal.SIGKILL)
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        carriers = find_carriers(mark)
        for pid in carriers:
            _kill_carrier(pid, mark)
        if not carriers:
            return
        # Killed processes stay readable for a moment, and one may have forked meanwhile.
        time.sleep(0.002)


def _kill_carrier(pid: int, mark: bytes) -> None:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            # Read again with the handle open: the number now cannot pass to another process
            # between the look and the signal.
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main(arguments: list[str]) -> int:
    """Watch the launcher: ``+pid`` and ``-pid`` on stdin keep the list of ranks, ``q`` ends."""
    launcher, mark = int(arguments[0]), os.fsencode(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders: set[int] = set()
    watch = select.poll()
    watch.register(0, select.POLLIN | select.POLLHUP)
    try:
        # End of file alone is not sure: a process that the launcher forked holds the pipe open too.
        watch.register(os.pidfd_open(launcher), select.POLLIN)
    except ProcessLookupError:
        end_everything(leaders, mark)
        return 1
    except OSError:
        pass  # a sandbox that does not know pidfds; end of file is what there is
    rest = b""
    while True:
        ready = {fd for fd, _ in watch.poll()}
        if 0 in ready:
            data = os.read(0, 65536)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"q":
                    return 0
                leader = int(line[1:])
                leaders.add(leader) if line[:1] == b"+" else leaders.discard(leader)
            if data:
                continue
        # Only now: what the launcher wrote before it died has been read.
        end_everything(leaders, mark)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
