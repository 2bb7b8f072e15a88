"""What every store must do, as small checks that run on any implementation.

A check takes a factory of fresh, empty stores and the store's ``Traits``; it raises AssertionError
when the store misbehaves. ``check_store`` runs those that apply.
"""

from __future__ import annotations

import conformance_values  # noqa: F401  (its checks enter the list)
import conformance_waiting  # noqa: F401
from conformance_kit import CHECKS, Check, Factory, Traits, applicable

__all__ = ["CHECKS", "Check", "Factory", "Traits", "check_store"]


def check_store(make: Factory, traits: Traits) -> None:
    """Run every check that applies to stores of these traits."""
    for check in applicable(traits):
        check(make)
