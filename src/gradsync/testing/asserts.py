"""Assertions that every rank takes part in, so that a failure on one is a failure on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve
from gradsync.stores.store import Store

__all__ = ["assert_all_ranks", "assert_same_on_all_ranks", "gather_for_assert", "share"]


def gather_for_assert(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``value``, in rank order, on every rank.

    Values are pickled: a means for tests, where all ranks are one's own.
    """
    where = resolve(group)
    data = pickle.dumps(value)
    length = torch.tensor([len(data)])
    where.all_reduce(length, ReduceOp.MAX)
    # Every rank fills a row of its own, so the sum is all rows side by side.
    rows = torch.zeros(where.size(), 8 + int(length), dtype=torch.uint8)
    row = len(data).to_bytes(8, "little") + data
    rows[where.rank(), : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    where.all_reduce(rows)
    values = []
    for line in rows:
        raw = bytes(line.numpy())
        values.append(pickle.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
    return values


def assert_all_ranks(
    condition: object, message: str = "", group: ProcessGroup | None = None
) -> None:
    """Fail on every rank when ``condition`` is false on any, and name those.

    A plain ``assert`` fails on one rank only, and the others meet their next collective without it.
    """
    __tracebackhide__ = True
    verdicts = gather_for_assert((bool(condition), message), group)
    failed = [rank for rank, (good, _) in enumerate(verdicts) if not good]
    if failed:
        texts = {text for good, text in verdicts if not good and text}
        about = f": {'; '.join(sorted(texts))}" if texts else ""
        raise AssertionError(
            f"false on rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))} of "
            f"{len(verdicts)}{about}"
        )


def assert_same_on_all_ranks(tensor: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Fail on every rank unless ``tensor`` has the same shape, dtype and bits on all of them."""
    __tracebackhide__ = True
    tensors = gather_for_assert(tensor.detach().cpu(), group)
    first = tensors[0]
    for rank, other in enumerate(tensors):
        if other.shape != first.shape or other.dtype != first.dtype:
            raise AssertionError(
                f"rank 0 has {first.dtype}{list(first.shape)}, "
                f"rank {rank} has {other.dtype}{list(other.shape)}"
            )
        differs = _bytes_of(other) != _bytes_of(first)
        if differs.any():
            at = int(differs.reshape(first.numel(), -1).any(1).nonzero()[0])
            raise AssertionError(
                f"rank 0 and rank {rank} differ, first at flat index {at}: "
                f"{first.reshape(-1)[at].item()!r} and {other.reshape(-1)[at].item()!r}"
            )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, where NaN equals itself and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def share(store: Store, rank: int, make: Callable[[], Any]) -> Any:
    """Call ``make`` on rank 0 and return its result everywhere."""
    number = store.add(f"shared/count/{rank}", 1)
    key = f"shared/{number}"
    if rank == 0:
        store.set(key, pickle.dumps(make()))
    return pickle.loads(store.get(key))
