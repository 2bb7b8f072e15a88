"""Before the first step: all ranks hold the same parameters, with rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["verify_same"]


def verify_same(
    named: Sequence[tuple[str, torch.Tensor]],
    buffers: Mapping[str, torch.Tensor],
    group: ProcessGroup,
) -> None:
    """Raise ``UsageError`` on every rank, with the first difference, unless all hold the same.

    Names, shapes and types are compared, and of parameters strides, too.
    """
    own = [_describe(name, tensor) for name, tensor in named]
    own += [f"buffer {name}: {_kind(tensor)}" for name, tensor in buffers.items()]
    digest = hashlib.sha256("\n".join(own).encode()).digest()[:8]
    digests = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(digests, torch.tensor([int.from_bytes(digest, "big", signed=True)]))
    if bool((digests == digests[0]).all()):
        return
    raise UsageError(_first_difference(group.all_gather_object(own)))


def _describe(name: str, tensor: torch.Tensor) -> str:
    trains = "" if tensor.requires_grad else ", frozen"
    return f"{name}: {_kind(tensor)}, strides {list(tensor.stride())}{trains}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _first_difference(everyone: list[list[str]]) -> str:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other == first:
            continue
        at = next(
            (n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
            min(len(first), len(other)),
        )
        mine = first[at] if at < len(first) else "nothing"
        theirs = other[at] if at < len(other) else "nothing"
        return (
            f"the ranks do not hold the same parameters and buffers: rank 0 has {len(first)}, rank "
            f"{rank} has {len(other)}; number {at} is ({mine}) on rank 0 and ({theirs}) on rank "
            f"{rank}. Build the same model on every rank, and freeze the same parts of it."
        )
    return "the ranks do not hold the same parameters and buffers"
