"""Tensors that are read and written in one call: every rank gets what separate ones would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradsync as dist

COUNTS = (1, 20_000, 300_000)
"""Elements of a piece: along with the announcement, staged and read where it is."""


def cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(dist.get_world_size()))


def firsts(tensor: torch.Tensor) -> list[float]:
    pieces = cut(tensor)
    assert all(bool((piece == piece[0]).all()) for piece in pieces)
    return [piece[0].item() for piece in pieces]


def twice(method: str) -> Callable[..., object]:
    """Return a function that calls a method of a group, or its asynchronous form."""

    def call(group: dist.ProcessGroup, is_async: bool, *arguments: object) -> None:
        if is_async:
            getattr(group, method + "_async")(*arguments).wait()
        else:
            getattr(group, method)(*arguments)

    return call


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_results_are_those_of_separate_tensors(count: int, is_async: bool) -> None:
    group = dist.new_group()  # not observed by the test kit: its lane is open
    rank, size = group.rank(), group.size()
    numbers = torch.arange(size, dtype=torch.float32) + 10 * rank

    def fresh() -> torch.Tensor:
        return numbers.repeat_interleave(count)

    swapped = [float(rank + 10 * other) for other in range(size)]
    x = fresh()
    twice("all_to_all_single")(group, is_async, x, x)
    assert firsts(x) == swapped
    x = fresh()
    twice("all_to_all")(group, is_async, cut(x), cut(x))
    assert firsts(x) == swapped
    x = fresh()
    twice("all_gather_single")(group, is_async, x, x[:count])
    assert firsts(x) == [0.0, 10.0, 20.0]
    x = fresh()
    twice("all_gather")(group, is_async, cut(x), x[count : 2 * count])
    assert firsts(x) == [1.0, 11.0, 21.0]
    total = [float(30 + 3 * other) for other in range(size)]
    x = fresh()
    twice("reduce_scatter_single")(group, is_async, x[:count], x)
    assert firsts(x) == [total[rank], *numbers[1:].tolist()]
    x = fresh()
    twice("reduce_scatter")(group, is_async, x[-count:], cut(x))
    assert firsts(x) == [*numbers[:-1].tolist(), total[rank]]
    x = fresh()
    twice("gather")(group, is_async, x[:count], cut(x) if rank == 1 else None, 1)
    assert rank != 1 or firsts(x) == [0.0, 10.0, 20.0]
    x = fresh()
    twice("scatter")(group, is_async, x[:count], cut(x) if rank == 1 else None, 1)
    assert x[0] == 10 + rank
