"""Pure: the ends of ranks so far, and which of them is the cause that a user wants to read."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradsync.errors import AbortedError, PeerLostError

__all__ = [
    "Failure",
    "describe_end",
    "first_failure",
    "follows_from_another",
    "last_traceback",
    "says_it_follows",
]

_CONSEQUENCES = (PeerLostError, AbortedError)
_CONSEQUENCE_LINE = re.compile(r"^(?:gradsync\.errors\.)?(PeerLostError|AbortedError)\b", re.M)


@dataclass(frozen=True)
class Failure:
    """A rank that ended badly.

    ``exit_code`` is negative for a signal. ``follows`` marks the failure that only reports that
    another rank is gone; ``at`` is a point on the monotonic clock, which all processes of a host
    share.
    """

    rank: int
    pid: int
    exit_code: int
    text: str
    follows: bool
    at: float


def first_failure(failures: Iterable[Failure]) -> Failure:
    """Return the cause: the first rank that failed by itself, else the first that failed at all.

    >>> lost = Failure(0, 100, 1, "", follows=True, at=1.0)
    >>> killed = Failure(1, 101, -9, "", follows=False, at=2.0)
    >>> first_failure([lost, killed]).rank
    1
    """
    return min(failures, key=lambda failure: (failure.follows, failure.at))


def follows_from_another(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, says that a peer was lost."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _CONSEQUENCES):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def says_it_follows(lines: Sequence[str]) -> bool:
    """Return whether the last words of a rank name a lost peer as the reason."""
    # A rank's excepthook may put "[rank 1] " or "[rank1]: " before each line.
    text = "\n".join(re.sub(r"^\[rank ?\d+\]:? ?", "", line) for line in lines)
    return _CONSEQUENCE_LINE.search(text) is not None


def last_traceback(lines: Sequence[str], usual: int = 20, most: int = 60) -> list[str]:
    """Return the last lines, reaching back to where the last traceback began.

    >>> last_traceback(["noise", "Traceback (most recent call last):", "  a", "E: x"], usual=2)
    ['Traceback (most recent call last):', '  a', 'E: x']
    """
    start = max(0, len(lines) - usual)
    for index in range(len(lines) - 1, max(-1, len(lines) - most - 1), -1):
        if "Traceback (most recent call last)" in lines[index]:
            start = min(start, index)
            break
    return list(lines[start:])


def describe_end(exit_code: int) -> str:
    """Return an exit code in words.

    >>> describe_end(3), describe_end(-11)
    ('exit code 3', 'killed by SIGSEGV')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", perhaps out of memory: see dmesg" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
