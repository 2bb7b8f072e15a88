"""Which ranks may share memory: evidence about a process, and the grouping drawn from it.

Host names are shown to people and never compared: containers share them, and one host has many.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from gradsync.errors import UsageError

__all__ = ["HostEvidence", "host_evidence", "is_dead", "islands", "start_time"]


class HostEvidence(NamedTuple):
    """What a process can say about where it runs; empty or 0 where the system does not tell.

    Two processes run on one kernel exactly if their ``boot_id`` is the same and not empty.
    ``started`` (clock ticks after boot) tells a process from a later one with the same pid.
    """

    boot_id: str
    host: str
    pid: int
    started: int
    uid: int
    net_namespace: int
    pid_namespace: int

    @property
    def where(self) -> str:
        """Which process on which host, for people."""
        return f"pid {self.pid} on {self.host}"


def host_evidence(*, anew: bool = False) -> HostEvidence:
    """Return the evidence of the calling process, as it was when last looked for ``anew``.

    >>> host_evidence().pid == os.getpid()
    True
    """
    if anew:
        _evidence_of_own.cache_clear()
    return _evidence_of_own(os.getpid())


# To look takes longer than anything else that ranks do to meet at a door, and whoever comes to one
# has shown that it can. Elsewhere a process may have changed its user or its network since.
@lru_cache(maxsize=1)
def _evidence_of_own(pid: int) -> HostEvidence:
    return HostEvidence(
        _boot_id(),
        " ".join(socket.gethostname().split()),  # records have tabs between fields
        pid,
        start_time(pid),
        os.getuid(),
        _inode("/proc/self/ns/net"),
        _inode("/proc/self/ns/pid"),
    )


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks after boot; 0 when there is no such process."""
    try:
        # Not open(): all ranks look at all others when they meet, and this takes a third.
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(file, 4096)
        finally:
            os.close(file)
    except OSError:
        return 0
    # The second field is the name in parentheses and may itself hold spaces and ")".
    fields = text.rpartition(b")")[2].split()
    # A zombie has ended: only its exit status is left.
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_dead(evidence: HostEvidence, observer: HostEvidence) -> bool:
    """Return whether ``observer`` can see that the other process has ended.

    False whenever it cannot tell, as for a process of another host or of another container.
    """
    if not evidence.boot_id or evidence.boot_id != observer.boot_id:
        return False
    if not evidence.pid_namespace or evidence.pid_namespace != observer.pid_namespace:
        return False
    return start_time(evidence.pid) != evidence.started


def islands(evidence: Sequence[HostEvidence], reachable: Mapping[int, int]) -> list[list[int]]:
    """Group ranks into islands that share memory.

    ``reachable`` maps a rank to the lowest rank whose memory it could map (itself when none). A
    rank belongs to an island when it has mapped memory of it *and* runs on the same kernel; a rank
    that is not in ``reachable`` is an island of its own. Islands are sorted by their lowest rank.

    >>> a, b = HostEvidence("A", "n", 1, 1, 0, 1, 1), HostEvidence("B", "n", 1, 1, 0, 1, 1)
    >>> islands([a, a, b, b], {0: 0, 1: 0, 2: 2, 3: 2})
    [[0, 1], [2, 3]]
    """
    size = len(evidence)
    leader = list(range(size))
    # Ascending order: the leader of a lower rank is final when a higher rank asks for it.
    for rank in range(size):
        target = reachable.get(rank, rank)
        if not 0 <= target < size:
            raise UsageError(f"rank {rank} claims to reach rank {target} of {size}")
        same_kernel = evidence[rank].boot_id and evidence[rank].boot_id == evidence[target].boot_id
        if target < rank and same_kernel:
            leader[rank] = leader[target]
    return [[rank for rank in range(size) if leader[rank] == head] for head in sorted(set(leader))]


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
