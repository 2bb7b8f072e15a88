"""What a test leaves behind in a rank: a picture before, a picture after, the difference."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "RESET", "Picture", "differences", "end_processes", "left_since", "take"]

KINDS = (
    "process",
    "thread",
    "shared memory",
    "socket",
    "environment",
    "torch threads",
    "default dtype",
    "seed",
)
"""The names under which leaks are reported, and which ``may_leave=`` takes."""

RESET = frozenset({"environment", "torch threads", "seed"})
"""What every test sets anew when it begins, so that a rank may be used again."""

# Variables that pytest itself changes as it goes.
_NOT_OURS = {"PYTEST_CURRENT_TEST"}
# Threads that a library starts once in a process and keeps: tqdm's comes with its first bar, which
# torch.compile has, too, where tqdm is installed.
_OF_LIBRARIES = {"tqdm_monitor"}


# How long a thread may take to end that was told to: those that feed the queues of DataLoader's
# workers are not waited for by anybody.
_MOMENT_S = 0.5


@dataclass(frozen=True)
class Picture:
    """The state of a process that a test must leave as it was."""

    processes: dict[int, str]
    threads: dict[int, str]
    shared_memory: frozenset[str]
    sockets: frozenset[str]
    environment: dict[str, str]
    torch_threads: int
    default_dtype: str
    seed: int


def take() -> Picture:
    """Take a picture of the calling process."""
    torch = sys.modules.get("torch")
    return Picture(
        processes=_children(),
        threads={
            t.ident or 0: t.name for t in threading.enumerate() if t.name not in _OF_LIBRARIES
        },
        shared_memory=_shared_memory(),
        sockets=_sockets(),
        environment={k: v for k, v in os.environ.items() if k not in _NOT_OURS},
        torch_threads=torch.get_num_threads() if torch else 0,
        default_dtype=str(torch.get_default_dtype()) if torch else "",
        seed=torch.initial_seed() if torch else 0,
    )


def left_since(before: Picture, pardoned: Container[str] = ()) -> dict[str, str]:
    """Return what is left behind now; threads that are about to end get a moment for it."""
    deadline = time.monotonic() + _MOMENT_S
    while True:
        found = differences(before, take())
        if "thread" not in found or "thread" in pardoned or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def end_processes(before: Picture) -> None:
    """Kill the children that are new, once they have been told of."""
    for pid in _children().keys() - before.processes.keys():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def differences(before: Picture, after: Picture) -> dict[str, str]:
    """Return what is left behind, by kind, in words.

    >>> picture = take()
    >>> differences(picture, picture)
    {}
    """
    found: dict[str, str] = {}

    def note(kind: str, text: str) -> None:
        if text:
            found[kind] = text

    children = after.processes.keys() - before.processes.keys()
    note("process", ", ".join(f"pid {pid} ({after.processes[pid]})" for pid in sorted(children)))
    threads = after.threads.keys() - before.threads.keys()
    note("thread", ", ".join(repr(after.threads[ident]) for ident in threads))
    note("shared memory", ", ".join(sorted(after.shared_memory - before.shared_memory)))
    note("socket", ", ".join(sorted(after.sockets - before.sockets)))
    note("environment", _changed(before.environment, after.environment))
    if before.torch_threads != after.torch_threads:
        note("torch threads", f"{before.torch_threads} became {after.torch_threads}")
    if before.default_dtype != after.default_dtype:
        note("default dtype", f"{before.default_dtype} became {after.default_dtype}")
    if before.seed != after.seed:
        note("seed", f"torch's seed {before.seed} became {after.seed}")
    return found


def _changed(before: dict[str, str], after: dict[str, str]) -> str:
    names = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    return ", ".join(f"{n}={after[n]!r}" if n in after else f"{n} removed" for n in sorted(names))


def _children() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue  # the thread ended meanwhile
        for pid in pids:
            try:
                found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
    return found


def _shared_memory() -> frozenset[str]:
    """Return the named shared memory that is surely this process's own.

    It has it mapped or open, or the name has its pid in it, as torch's and gradsync's do. Others
    make segments too, so one that was closed but not unlinked is not seen under another name.
    """
    used = {target for _, target in _descriptors()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        used.add(line.split(maxsplit=5)[-1])
    own_pid = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return frozenset()
    paths = ((name, f"/dev/shm/{name}") for name in names)
    return frozenset(path for name, path in paths if path in used or own_pid.search(name))


def _descriptors() -> list[tuple[str, str]]:
    """Return the open descriptors of this process and what each one is."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # the one that listed them
    return found


def _sockets() -> frozenset[str]:
    return frozenset(
        f"{target} (descriptor {name})"
        for name, target in _descriptors()
        if target.startswith("socket:")
    )
