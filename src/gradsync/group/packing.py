"""Several tensors in one call: side by side in a flat buffer, which is taken apart afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gradsync.errors import UsageError
from gradsync.group.in_flight import settle

__all__ = ["PACK_BYTES", "check_tensors", "joined", "packs", "spread"]

PACK_BYTES = 256 * 1024
"""Tensors are put together up to this size. A call of it takes so long that what another call costs
is of no weight, and copying a larger tensor would cost more than is saved."""


def check_tensors(name: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless ``tensors`` is a list of tensors."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} needs a list of tensors as {what}, got {type(tensors).__name__}")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} needs tensors in {what}, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} takes dense tensors, got one of layout {tensor.layout}")


def packs(tensors: Sequence[torch.Tensor], most_bytes: int = PACK_BYTES) -> Iterator[list[int]]:
    """Yield the positions of tensors that go together: one dtype, in order, up to ``most_bytes``.

    >>> tensors = [torch.ones(3), torch.ones(3).double(), torch.ones(2), torch.ones(1)]
    >>> list(packs(tensors)), list(packs(tensors, most_bytes=16))
    ([[0, 2, 3], [1]], [[0], [2, 3], [1]])
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for at, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(at)
    for positions in by_dtype.values():
        pack: list[int] = []
        room = most_bytes
        for at in positions:
            size = tensors[at].nbytes
            if size >= most_bytes:
                yield [at]
                continue
            if size > room:
                yield pack
                pack, room = [], most_bytes
            pack.append(at)
            room -= size
        if pack:
            yield pack


def joined(tensors: Sequence[torch.Tensor], rows: int = 1) -> torch.Tensor:
    """Return the tensors, each cut into ``rows`` equal parts, as one of that many rows.

    >>> joined([torch.arange(4), torch.tensor([8, 9])], rows=2)
    tensor([[0, 1, 8],
            [2, 3, 9]])
    """
    for tensor in tensors:
        settle(tensor)
    cut = [tensor.detach().reshape(rows, tensor.numel() // rows) for tensor in tensors]
    dtype = tensors[0].dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch cannot join all of these
        return torch.cat([each.view(torch.uint8) for each in cut], dim=1).view(dtype)
    return torch.cat(cut, dim=1)


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor], rows: int = 1) -> None:
    """Fill the tensors from what ``joined`` would have made of them."""
    sizes = [tensor.numel() // rows for tensor in tensors]
    parts = flat.view(rows, sum(sizes)).split_with_sizes(sizes, dim=1)
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data.copy_(part.reshape(tensor.shape))
