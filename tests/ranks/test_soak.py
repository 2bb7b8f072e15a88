"""Thousands of random calls on random groups, checked against a model in one process.

Every rank draws the same plan from the same seed, fills its tensors from (call, rank), and knows
what all ranks gave; so it can work out what it must get without asking anybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import gradsync as dist

CALLS = 2000
IN_FLIGHT = 12
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16)
SIZES = (0, 1, 3, 17, 250, 1024, 5000, 20_000, 150_000)


class Pending(NamedTuple):
    """A call whose result is still to be looked at."""

    what: str
    work: dist.Work | None
    check: Callable[[], bool]


def data(call: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank gives: small integers, so that sums are exact in any order."""
    return ((torch.arange(count) * 7 + call * 3 + rank * 5) % 11).to(dtype)


class Soak:
    """One rank's way through the plan."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.own = random.Random(
            dist.get_rank()
        )  # when to look at results is everyone's own affair
        world = [0, 1, 2, 3]
        lists = [world, [0, 1], [2, 3], [1, 3], [3, 0, 2], [2]]
        self.groups = [dist.new_group(ranks, sort_ranks=False) for ranks in lists]
        self.ranks = lists
        self.pending: list[Pending] = []

    def place(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the same values with gaps, in shared memory, or as they are."""
        if kind == "gaps":
            wide = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
            wide[:, 1] = tensor
            return wide[:, 1]
        return dist.shared_like(tensor) if kind == "shared" else tensor

    def run(self) -> None:
        for number in range(CALLS):
            self.step(number)
            while len(self.pending) > self.own.randrange(1, IN_FLIGHT):
                self.settle(self.pending.pop(self.own.randrange(len(self.pending))))
        for left in self.pending:
            self.settle(left)

    def settle(self, pending: Pending) -> None:
        if pending.work is not None:
            pending.work.wait()
        assert pending.check(), pending.what

    def step(self, number: int) -> None:
        draw = self.draw
        chosen = draw.randrange(len(self.groups))
        kinds = (self.all_reduce, self.broadcast, self.all_gather, self.reduce_scatter)
        kind = draw.choice(
            (*kinds, self.all_to_all, self.reduce, self.gather_scatter, self.barrier)
        )
        count, dtype = draw.choice(SIZES), draw.choice(DTYPES)
        layout, asynchronous = draw.choice(("plain", "gaps", "shared")), draw.random() < 0.6
        root = draw.randrange(len(self.ranks[chosen]))
        group = self.groups[chosen]
        if not isinstance(group, dist.ProcessGroup):
            return
        self.members, self.group, self.root = self.ranks[chosen], group, root
        work, check = kind(number, count, dtype, layout, asynchronous)
        what = f"call {number}: {kind.__name__} of {dtype}[{count}] {layout} on {self.members}"
        self.pending.append(Pending(what, work, check))

    def everyone(self, number: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [data(number, rank, count, dtype) for rank in self.members]

    def total(self, number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack(self.everyone(number, count, dtype)).sum(0).to(dtype)

    def mine(self, number: int, count: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
        return self.place(data(number, dist.get_rank(), count, dtype), layout)

    def start(self, name: str, asynchronous: bool, *arguments: object) -> dist.Work | None:
        if asynchronous:
            work: dist.Work = getattr(self.group, f"{name}_async")(*arguments)
            return work
        getattr(self.group, name)(*arguments)
        return None

    # -- one method an operation: start it, and say how to check it -------------------------------

    def all_reduce(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        tensor = self.mine(number, count, dtype, layout)
        expected = self.total(number, count, dtype)
        work = self.start("all_reduce", asynchronous, tensor)
        return work, lambda: torch.equal(tensor, expected)

    def reduce(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        tensor = self.mine(number, count, dtype, layout)
        at_root = self.group.rank() == self.root
        expected = self.total(number, count, dtype) if at_root else tensor.clone()
        work = self.start("reduce", asynchronous, tensor, self.root)
        return work, lambda: torch.equal(tensor, expected)

    def broadcast(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        tensor = self.mine(number, count, dtype, layout)
        expected = data(number, self.members[self.root], count, dtype)
        work = self.start("broadcast", asynchronous, tensor, self.root)
        return work, lambda: torch.equal(tensor, expected)

    def all_gather(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        tensor = self.mine(number, count, dtype, layout)
        whole = self.place(torch.zeros(count * len(self.members), dtype=dtype), layout)
        expected = torch.cat(self.everyone(number, count, dtype))
        work = self.start("all_gather_single", asynchronous, whole, tensor)
        return work, lambda: torch.equal(whole, expected)

    def reduce_scatter(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        size = len(self.members)
        tensor = self.mine(number, count * size, dtype, layout)
        part = self.place(torch.zeros(count, dtype=dtype), layout)
        expected = self.total(number, count * size, dtype).view(size, count)[self.group.rank()]
        work = self.start("reduce_scatter_single", asynchronous, part, tensor)
        return work, lambda: torch.equal(part, expected)

    def all_to_all(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        """Exchange uneven pieces: rank a sends b % 3 rows more to rank b."""
        size, rank, rows = len(self.members), self.group.rank(), count // 10
        sent = [rows + to % 3 for to in range(size)]
        received = [rows + rank % 3] * size
        pieces = [torch.split(whole, sent) for whole in self.everyone(number, sum(sent), dtype)]
        expected = torch.cat([piece[rank] for piece in pieces])
        tensor = self.mine(number, sum(sent), dtype, layout)
        output = self.place(torch.zeros(sum(received), dtype=dtype), layout)
        work = self.start("all_to_all_single", asynchronous, output, tensor, received, sent)
        return work, lambda: torch.equal(output, expected)

    def gather_scatter(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        """Bring everything to the root and hand it out again: everybody gets back what it gave."""
        at_root = self.group.rank() == self.root
        tensor = self.mine(number, count, dtype, layout)
        row = [torch.zeros(count, dtype=dtype) for _ in self.members] if at_root else None
        back = self.place(torch.zeros(count, dtype=dtype), layout)
        self.start("gather", asynchronous, tensor, row, self.root)
        work = self.start("scatter", asynchronous, back, row, self.root)
        return work, lambda: torch.equal(back, tensor)

    def barrier(self, number, count, dtype, layout, asynchronous):  # type: ignore[no-untyped-def]
        return self.start("barrier", asynchronous), lambda: True


@pytest.mark.ranks(4, timeout=120)
def test_random_calls_on_random_groups_agree_with_the_model() -> None:
    Soak(seed=20_000).run()
