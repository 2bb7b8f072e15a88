"""Buffers: the same on every rank before each forward, or what a hook of the user makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any, TypeAlias

import torch

from gradsync.ddp.agreement import WHILE_COPYING_BUFFERS, explaining
from gradsync.ddp.parcel import Parcel, broadcast_tensors, parcels
from gradsync.ddp.parts import Parts
from gradsync.group.group import ProcessGroup

__all__ = ["BufferHook", "BufferHookLocation", "BufferSync"]


# Buffers of up to so many bytes keep a place to travel in: making one anew took 0.6 ms in each
# forward for 24 statistics of batch norm.
_KEPT_BYTES = 1 << 20


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


_Place: TypeAlias = tuple[Any, ...]


def _place_of(tensor: torch.Tensor) -> _Place:
    """Return which elements of which memory a tensor has, while that is not freed."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _can_be_kept(buffers: Sequence[torch.Tensor]) -> bool:
    """Return whether these are plain tensors, and the storages that would be kept are small."""
    plain = all(type(buffer) is torch.Tensor for buffer in buffers)
    return plain and sum(b.untyped_storage().nbytes() for b in buffers) <= _KEPT_BYTES


class BufferSync:
    """Synchronises a module's buffers; looks them up each time, as modules may rebind them.

    Of the parts that were noted last: whoever runs it sees to that.
    """

    def __init__(self, parts: Parts, group: ProcessGroup, ignored: frozenset[str]) -> None:
        self._parts = parts
        self.group = group
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self._pending: list[Any] = []
        self._kept: list[Parcel] = []
        self._kept_for: list[_Place] = []

    def named(self) -> dict[str, torch.Tensor]:
        """Return the buffers that take part."""
        self._parts.look()
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, buffers in self._parts.buffers:
            for name, buffer in buffers.items() if buffers else ():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[full] = buffer
        return found

    def _present(self) -> list[torch.Tensor]:
        """Return the same without their names, which takes a third of the time."""
        tables = (buffers.values() for _, buffers in self._parts.buffers if buffers)
        found = [buffer for buffer in chain.from_iterable(tables) if buffer is not None]
        if self._ignored or len(set(map(id, found))) != len(found):
            return list(self.named().values())
        return found

    def run(self, location: BufferHookLocation, root: int = 0) -> None:
        """Do what is due at this moment."""
        hook = self.hook
        due = BufferHookLocation.PRE_FORWARD if hook is None else hook.location
        if location is not due:
            return
        if hook is None:
            present = self._present() if self.group.size() > 1 else []
            if present:
                with torch.no_grad(), explaining(WHILE_COPYING_BUFFERS):
                    self._broadcast(present, root)
            return
        buffers = self.named()
        if not buffers:
            return
        # By .data, as in Parcel: what backward has saved is not changed by this.
        with torch.no_grad():
            futures = hook.call(hook.state, {name: b.data for name, b in buffers.items()})
        if futures is not None:
            self._pending += futures if isinstance(futures, Iterable) else [futures]

    def _broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        # The kept ones' memory is not freed, so no other tensor has its address.
        places = [_place_of(buffer) for buffer in buffers]
        if places != self._kept_for:
            if not _can_be_kept(buffers):
                self._kept, self._kept_for = [], []
                broadcast_tensors(buffers, self.group, root)
                return
            # Tensors made in inference mode are of no use after it.
            with torch.inference_mode(False):
                self._kept = [Parcel(each) for each in parcels(buffers)]
            self._kept_for = places
        for parcel in self._kept:
            parcel.broadcast(self.group, root)

    def wait(self) -> None:
        """Wait for what hooks have begun; called at the end of backward."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()
