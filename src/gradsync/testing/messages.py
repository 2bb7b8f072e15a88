"""What the controller and its rank processes say to each other; plain data that pickles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradsync.testing.faults import Fault

__all__ = ["CallTask", "Died", "Finished", "ItemTask", "Outcome", "RankContext", "Stuck"]


@dataclass(frozen=True)
class RankContext:
    """Who a rank is in one test."""

    rank: int
    world_size: int
    backend: str
    store_name: str
    store_token: str
    prefix: str
    """Keys of this test begin with it, so that no test sees another's."""
    timeout_s: float
    env: dict[str, str]
    cwd: str
    faults: tuple[Fault, ...] = ()
    with_group: bool = True
    may_leave: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemTask:
    """Run one collected pytest item."""

    context: RankContext
    rootdir: str
    inifile: str
    args: list[str]
    """Options that pytest must know from the start, as on its command line."""
    basetemp: str
    """Where the person who started pytest wants temporary files, if they said so."""
    options: dict[str, Any]
    path: str
    nodeid: str
    next_path: str
    next_nodeid: str
    """The item that this rank will run after it; fixtures that both use stay."""
    coverage: dict[str, Any] | None = None
    """Settings of coverage.py when the controller measures it."""
    debug: str = ""
    """Open a debugger when this rank fails: "always", or if it is the "first" to, by itself."""


@dataclass(frozen=True)
class CallTask:
    """Call ``function(*args)``."""

    context: RankContext
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The rank did its task: serialised pytest reports, or a result or traceback of a call."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[tuple[str, str, str, str, int]] = field(default_factory=list)
    """Text, the module and name of the category, file and line of each."""
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    follows: bool = False
    """Whether the failure is only a consequence of another rank's."""
    dirty: bool = False
    """Whether the test left something behind, so that the process must not be used again."""


@dataclass(frozen=True)
class Died:
    """The rank's process ended: its exit code, negative for a signal."""

    exit_code: int
    pid: int
    planned: bool = False
    """A fault of the test's own plan ended it."""


@dataclass(frozen=True)
class Stuck:
    """The rank had not finished at the deadline: where it stood."""

    pid: int
    dump: str


Outcome = Finished | Died | Stuck
