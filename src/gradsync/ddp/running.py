"""``Running``: whether the backward that a pass belongs to is still going on, and whose it is too.

Autograd tells nobody when a backward raises; it only lets go of what it was to call at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

__all__ = ["Running"]


class Running:
    """The backward of one reducer's pass."""

    def __init__(self, params: Iterable[object]) -> None:
        self._ids = frozenset(map(id, params))
        self._end: Callable[[], object] = lambda: None

    def begin(self, end: Callable[[Any], None]) -> None:
        """Have ``end`` called when the backward that is going on ends, unless it raises.

        It gets the node of the graph where backward is now. Nobody else keeps that: the graph of a
        backward that raises must not outlive it.
        """
        at_end = partial(end, torch._C._current_autograd_node())
        self._end = weakref.ref(at_end)
        _all.add(self)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(at_end)

    def leads_to_params(self, node: Any) -> bool:
        """Return whether a graph has parameters of this reducer below ``node``."""
        seen, to_see = {node}, [node]
        while to_see:
            node = to_see.pop()
            if id(getattr(node, "variable", None)) in self._ids:
                return True
            new = {below for below, _ in node.next_functions if below is not None} - seen
            seen |= new
            to_see.extend(new)
        return False

    def end(self) -> None:
        """Forget the backward."""
        _all.discard(self)
        self._end = lambda: None

    def __bool__(self) -> bool:
        return self._end() is not None

    def has_rival(self) -> bool:
        """Return whether a reducer of some of the same parameters has a pass going on."""
        return any(
            other and other is not self and not other._ids.isdisjoint(self._ids) for other in _all
        )


# A model, or a part of it, may be in several wrappers.
_all: weakref.WeakSet[Running] = weakref.WeakSet()
