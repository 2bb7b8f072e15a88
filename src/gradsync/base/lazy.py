"""Packages whose names are loaded when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str]
) -> tuple[list[str], Callable[[str], Any]]:
    """Return the names of a package, sorted, and its ``__getattr__``.

    ``homes`` has the names by the module of the package that they live in; ``modules`` are those
    that are attributes themselves.

    >>> names, load = lazy_names("gradsync", {"errors": ["UsageError"]}, ["base"])
    >>> names, load("UsageError").__name__
    (['UsageError', 'base'], 'UsageError')
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted([*home_of, *modules]), load
