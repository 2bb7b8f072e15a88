"""``Parts``: which modules and parameters a module is made of, and when that has changed."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

__all__ = ["Parts"]


class Parts:
    """Notices when a module gets other parts or parameters: a look in each forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.edition = 0
        """How often others were noted."""
        self._note()

    def _note(self) -> None:
        named = list(self._module.named_modules())
        self._kept = [part for _, part in named]  # alive, so that no other has their identity
        self.buffers: list[tuple[str, dict[str, Any]]] = [(n, part._buffers) for n, part in named]
        """The tables of buffers, by the name of their module."""
        self._tables: list[dict[str, Any]] = []
        for part in self._kept:
            self._tables += (part._parameters, part._modules)
        self._seen = self._identities()

    def look(self) -> None:
        """Take the module as it is now."""
        if self._identities() != self._seen:
            self._note()
            self.edition += 1

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))
