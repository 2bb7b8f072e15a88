"""Every environment variable that gradsync reads: name, default and meaning.

No other module reads ``os.environ`` (the launcher writes it for its children). An unknown
``GRADSYNC_*`` name is an error, so that a typo does not pass for a setting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gradsync import _native
from gradsync.errors import UsageError

__all__ = ["VARIABLES", "Variable", "environment", "read", "read_seconds", "reject_unknown"]


class Variable(NamedTuple):
    """One environment variable of gradsync's own."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "GRADSYNC_TOKEN",
        "",
        "Secret of the job. A store that listens beyond loopback needs one, and every "
        "connection proves that it knows it.",
    ),
    Variable(
        "GRADSYNC_STORE",
        "",
        "Address of the job's store as the launcher set it (`unix:NAME`); it comes before "
        "MASTER_ADDR and MASTER_PORT.",
    ),
    Variable(
        "GRADSYNC_LATE_AFTER",
        "10",
        "Seconds after which a call or a group that is being formed, if it still waits for a rank, "
        "says so in one line on the logger `gradsync` (stderr unless logging is set up); 0 for "
        "never.",
    ),
    Variable(
        "GRADSYNC_KEEP_FREED_MEMORY",
        "1",
        "Whether `DistributedDataParallel`, ours or torch's, in shared memory tells malloc to keep "
        "freed memory for the next step; 0 for no. What `MALLOC_*` or `GLIBC_TUNABLES` say comes "
        "before it.",
    ),
    Variable(
        "GRADSYNC_ADOPT",
        "1",
        "Whether large private tensors that are reduced again and again move into shared memory, "
        "page by page where they are; 0 for no.",
    ),
    Variable(
        "GRADSYNC_DEBUG",
        "",
        "How much is told: OFF, INFO (groups that come and go) or DETAIL (every call with its "
        "line); it comes before TORCH_DISTRIBUTED_DEBUG.",
    ),
)

_DEFAULTS = {variable.name: variable.default for variable in VARIABLES}


class _Environment(Mapping[str, str]):
    """What ``os.environ`` shows, read where that writes it: a look takes a third of the time."""

    get = staticmethod(_native.variable)  # type: ignore[assignment]  # no function around it

    def __getitem__(self, name: str) -> str:
        value = _native.variable(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)


_environment = _Environment()


def environment() -> Mapping[str, str]:
    """Return the process environment, the one door through which it is read."""
    return _environment


def read(name: str) -> str:
    """Return the value of one of gradsync's own variables, or its default.

    >>> read("GRADSYNC_STORE")
    ''
    """
    return _native.variable(name, _DEFAULTS[name])


def read_seconds(name: str) -> float:
    """Return one of gradsync's own variables as a number of seconds.

    >>> read_seconds("GRADSYNC_LATE_AFTER")
    10.0
    """
    text = read(name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} must be a number of seconds, got {text!r}")
    return value


def reject_unknown() -> None:
    """Raise ``UsageError`` when the environment has a ``GRADSYNC_*`` name that does not exist."""
    unknown = [name for name in _native.variables_of("GRADSYNC_") if name not in _DEFAULTS]
    if unknown:
        raise UsageError(
            f"unknown environment variable {', '.join(sorted(unknown))}; gradsync knows "
            f"{', '.join(sorted(_DEFAULTS))}. Correct the name or unset it."
        )
