"""Rules of the key-value stores that need no store: reading arguments, sums, what a timeout says.

Every store written in Python follows these, so that all of them agree to the letter.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence

from gradsync.errors import StoreTimeout, UsageError
from gradsync.stores.store import Key, key_text

__all__ = ["compared", "key_list", "summed", "timed_out"]

_DECIMAL = re.compile(rb"\s*[+-]?[0-9]+\s*")
_INT64 = range(-(2**63), 2**63)


def key_list(keys: Sequence[Key]) -> list[str]:
    """Return keys as texts.

    >>> key_list(["a", b"b"])
    ['a', 'b']
    """
    if isinstance(keys, (str, bytes)):
        # A string is a sequence of strings too; to wait for each letter is never meant.
        raise TypeError(f"expected a list of keys, got the single key {keys!r}; write [{keys!r}]")
    return [key_text(key) for key in keys]


def summed(key: str, current: bytes | None, amount: int) -> int:
    """Return the sum that ``add`` stores; an absent key counts as 0.

    >>> summed("n", b"41", 1)
    42
    """
    number = operator.index(amount)
    if current is not None and not _DECIMAL.fullmatch(current):
        raise UsageError(
            f"cannot add to key {key!r}: its value is not a decimal integer but {current[:40]!r}"
        )
    total = int(current if current is not None else b"0") + number
    if number not in _INT64 or total not in _INT64:
        raise UsageError(f"add to key {key!r}: {number} or the sum {total} exceeds 64 bits")
    return total


def compared(current: bytes | None, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
    """Return whether ``compare_set`` stores, and what it answers.

    >>> compared(None, b"", b"new"), compared(None, b"old", b"new"), compared(b"x", b"old", b"new")
    ((True, b'new'), (False, b'old'), (False, b'x'))
    """
    if current is None:
        # Programs written against torch rely on this answer for an absent key.
        return (False, expected) if expected else (True, desired)
    return (True, desired) if current == expected else (False, current)


def timed_out(
    where: str, missing: Iterable[str], timeout_s: float, advice: str = ""
) -> StoreTimeout:
    """Return the error of a wait that ended without all of its keys."""
    names = list(missing)
    shown = ", ".join(repr(name) for name in names[:10])
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    hint = f" {advice}" if advice else ""
    return StoreTimeout(
        f"{where}: waited {timeout_s:g} s for {shown}{more}, which nobody has set. The rank that "
        f"sets it may have failed or may use another key or prefix.{hint}"
    )
