"""Which modules and parameters a module is made of, when that has changed, and what came new."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from gradsync.errors import UsageError

__all__ = ["Parts", "Strangers"]


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


class Strangers:
    """Parameters that came after a module was wrapped: no one averages the gradients of these.

    ``find`` returns them by name; it is asked when the parts have changed, and when one that is
    frozen begins to train.
    """

    def __init__(self, parts: Parts, find: Callable[[], list[tuple[str, nn.Parameter]]]) -> None:
        self._parts = parts
        self._find = find
        self._edition = parts.edition
        self._frozen: list[nn.Parameter] = []

    def look(self) -> None:
        """Before a backward: raise if there are some that train.

        In forward, torch.func.functional_call() may have others in the place of the module's own.
        """
        changed = self._parts.edition != self._edition
        if changed or any(param.requires_grad for param in self._frozen):
            self.refuse()
            self._edition = self._parts.edition

    def refuse(self) -> None:
        """Raise if there are some that train."""
        found = self._find()
        trained = [name for name, param in found if param.requires_grad]
        if trained:
            raise UsageError(
                "the module has parameters that it did not have when it was wrapped, and no one "
                f"averages their gradients: {', '.join(trained)}. Wrap it again after changing it."
            )
        self._frozen = [param for _, param in found]
