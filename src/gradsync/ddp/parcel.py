"""``Parcel``: tensors that travel together, their bytes side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.group.group import ProcessGroup

__all__ = ["Parcel", "broadcast_tensors", "parcels"]

_MOST_BYTES = 32 << 20


class Parcel:
    """Flat memory for the bytes of some tensors of one device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # By .data, autograd does not count it as a change. Batch norm saves its running statistics,
        # though it needs none of them: a second forward before backward would be an error.
        self._tensors = [tensor.data for tensor in tensors]
        self._flat, self._parts = _byte_views(self._tensors)

    def broadcast(self, group: ProcessGroup, root: int) -> None:
        """Overwrite the tensors with those of rank ``root``."""
        if group.rank() == root:
            torch._foreach_copy_(self._parts, self._tensors)
        group.broadcast(self._flat, root)
        if group.rank() != root:
            torch._foreach_copy_(self._tensors, self._parts)


def parcels(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide tensors into those of one parcel each; those without elements need not travel."""
    found: list[list[torch.Tensor]] = []
    filled, device = _MOST_BYTES, None
    for tensor in tensors:
        if not tensor.numel():
            continue
        if filled >= _MOST_BYTES or tensor.device != device:
            found.append([])
            filled, device = 0, tensor.device
        found[-1].append(tensor)
        filled += tensor.nbytes
    return found


def broadcast_tensors(tensors: Sequence[torch.Tensor], group: ProcessGroup, root: int = 0) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, many in one call."""
    for each in parcels(tensors):
        Parcel(each).broadcast(group, root)


def _byte_views(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return flat bytes, and tensors on them in the likeness of ``tensors``."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // 16) * 16  # aligned for every type
    # The gaps must not hide that a rank has another number of elements: the length tells.
    length = end + sum(t.nbytes for t in tensors) % 16
    flat = torch.zeros(length, dtype=torch.uint8, device=tensors[0].device)
    parts = [
        flat[at : at + t.nbytes].view(t.dtype).view(t.shape)
        for at, t in zip(offsets, tensors, strict=True)
    ]
    return flat, parts
