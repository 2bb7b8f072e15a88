"""How many cores this process may use, and how many threads each of its ranks should get.

The machine's core count is not asked: a container with two cores of 64 must not start 64 threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

__all__ = ["cgroup_quota", "threads_per_rank", "usable_cores"]


def threads_per_rank(nprocs: int, cores: int) -> int:
    """Return an even share of the cores, at least one thread.

    >>> threads_per_rank(3, 8), threads_per_rank(4, 2)
    (2, 1)
    """
    return max(1, cores // nprocs)


def usable_cores() -> int:
    """Return the cores that the affinity mask and the cgroup's quota leave to this process.

    >>> usable_cores() >= 1
    True
    """
    quota = cgroup_quota()
    granted = len(os.sched_getaffinity(0))
    # Rounded down: with 1.5 CPUs' worth of time, two busy threads would starve each other.
    return granted if math.isinf(quota) else max(1, min(granted, int(quota)))


def cgroup_quota(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """Return the CPUs' worth of time that the cgroups grant, infinity when nothing limits it."""
    try:
        with open(own, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return math.inf
    quota = math.inf
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            quota = min(quota, _walk_up(root, path, _read_v2))
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                quota = min(quota, _walk_up(f"{root}/{mount}", path, _read_v1))
    return quota


def _walk_up(root: str, path: str, read: Callable[[str], float]) -> float:
    """Return the smallest limit on the way from a cgroup to the root: all of them hold."""
    quota = math.inf
    parts = [part for part in path.split("/") if part and part != ".."]
    while True:
        quota = min(quota, read("/".join([root, *parts])))
        if not parts:
            return quota
        parts.pop()


def _read_v2(folder: str) -> float:
    words = _words(f"{folder}/cpu.max")
    if len(words) != 2 or words[0] == "max":
        return math.inf
    return int(words[0]) / int(words[1])


def _read_v1(folder: str) -> float:
    quota, period = _words(f"{folder}/cpu.cfs_quota_us"), _words(f"{folder}/cpu.cfs_period_us")
    if not quota or not period or int(quota[0]) <= 0:
        return math.inf
    return int(quota[0]) / int(period[0])


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []
