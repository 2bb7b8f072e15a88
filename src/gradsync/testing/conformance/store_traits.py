"""The list of checks that a store must pass, what a store may lack, and the tools of checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from gradsync.errors import StoreTimeout
from gradsync.stores import Store

__all__ = [
    "CHECKS",
    "Check",
    "Factory",
    "StoreTraits",
    "applicable",
    "later",
    "needs",
    "raises_after",
]

Factory = Callable[[], Store]
Check = Callable[[Factory], None]


@dataclass(frozen=True)
class StoreTraits:
    """What a store may lack; gradsync's own lack nothing but, on files, the queues."""

    queues: bool = True
    extended: bool = True
    exact_timeouts: bool = True
    truthful_delete: bool = True
    counts_only_keys: bool = True
    add_checks_value: bool = True
    own_timeout_per_clone: bool = True
    wakes_on_every_write: bool = True
    clone_keeps_timeout: bool = True
    clone_outlives: bool = True
    one_pop_per_push: bool = True


CHECKS: list[tuple[Check, str]] = []


def needs(trait: str = "") -> Callable[[Check], Check]:
    """Enter a check into the list; it runs on stores that have the trait, or on all."""

    def register(check: Check) -> Check:
        CHECKS.append((check, trait))
        return check

    return register


def applicable(traits: StoreTraits) -> Iterator[Check]:
    """Yield the checks for stores of these traits."""
    for check, trait in CHECKS:
        if not trait or getattr(traits, trait):
            yield check


@contextmanager
def raises_after(seconds: float, error: type[Exception] = StoreTimeout) -> Iterator[None]:
    """Expect a timeout, neither early nor late."""
    start = time.monotonic()
    with pytest.raises(error):
        yield
    elapsed = time.monotonic() - start
    # torch counts whole milliseconds, hence the small mercy below.
    assert seconds - 0.002 <= elapsed < seconds + 1.0, f"timed out after {elapsed:.3f} s"


@contextmanager
def later(delay: float, action: Callable[[], object]) -> Iterator[None]:
    """Do something a little later, while the body runs."""
    timer = threading.Timer(delay, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()
