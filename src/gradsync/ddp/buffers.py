"""Buffers: the same on every rank before each forward, or what a hook of the user makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from gradsync.ddp.agreement import WHILE_COPYING_BUFFERS, explaining
from gradsync.ddp.init_sync import broadcast_tensors
from gradsync.group.group import ProcessGroup

__all__ = ["BufferHook", "BufferHookLocation", "BufferSync"]


class BufferHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True)
class BufferHook:
    """A user's function that synchronises the buffers; may return futures to wait for."""

    call: Callable[[Any, Mapping[str, torch.Tensor]], Any]
    state: Any
    location: BufferHookLocation


class BufferSync:
    """Synchronises a module's buffers; looks them up each time, as modules may rebind them."""

    def __init__(
        self, module: torch.nn.Module, group: ProcessGroup, ignored: frozenset[str]
    ) -> None:
        self._parts = [(name, part._buffers) for name, part in module.named_modules()]
        self.group = group
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self._pending: list[Any] = []

    def named(self) -> dict[str, torch.Tensor]:
        """Return the buffers that take part."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, buffers in self._parts:
            for name, buffer in buffers.items() if buffers else ():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[full] = buffer
        return found

    def run(self, location: BufferHookLocation, root: int = 0) -> None:
        """Do what is due at this moment."""
        hook = self.hook
        due = BufferHookLocation.PRE_FORWARD if hook is None else hook.location
        if location is not due:
            return
        buffers = self.named()
        if not buffers:
            return
        if hook is None:
            with torch.no_grad(), explaining(WHILE_COPYING_BUFFERS):
                broadcast_tensors(list(buffers.values()), self.group, root)
            return
        # By .data, as in broadcast_tensors: what backward has saved is not changed by this.
        with torch.no_grad():
            futures = hook.call(hook.state, {name: b.data for name, b in buffers.items()})
        if futures is not None:
            self._pending += futures if isinstance(futures, Iterable) else [futures]

    def wait(self) -> None:
        """Wait for what hooks have begun; called at the end of backward."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()
