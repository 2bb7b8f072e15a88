"""What every store and every backend must do, as suites that anyone can run on their own.

``check_store(make)`` and ``check_backend(make)`` raise an ``AssertionError`` that names the check.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradsync.testing.conformance import store_values, store_waiting  # noqa: F401  (fill the list)
from gradsync.testing.conformance.backend import check_backend, check_group
from gradsync.testing.conformance.store_traits import Check, Factory, StoreTraits, applicable

__all__ = ["StoreTraits", "check_backend", "check_group", "check_store", "store_checks"]


def store_checks(traits: StoreTraits = StoreTraits()) -> Iterator[Check]:  # noqa: B008  (frozen)
    """Yield every check that a store of these traits must pass, to run one by one."""
    return applicable(traits)


def check_store(make: Factory, traits: StoreTraits = StoreTraits()) -> None:  # noqa: B008
    """Run every check on fresh, empty stores that ``make()`` returns.

    >>> from gradsync.stores.hash import HashStore
    >>> check_store(HashStore)
    """
    for check in store_checks(traits):
        try:
            check(make)
        except BaseException as error:
            raise AssertionError(f"the store fails {check.__name__}: {error}") from error
