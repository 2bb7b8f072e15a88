"""Collectives inside of functions that torch.compile compiles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import gradsync as dist
from gradsync.nn import functional

RANKS = pytest.mark.ranks(2, may_leave=["environment"])  # the compiler's


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()  # what it kept of groups


def gather_objects() -> None:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    assert found == list(range(dist.get_world_size()))


def reduce_together(tensor: torch.Tensor) -> None:
    with dist.coalescing_manager():
        dist.all_reduce(tensor)


@RANKS
def test_collectives_run_as_they_are_between_compiled_parts() -> None:
    group = dist.new_group()  # not observed by the test kit
    calls: list[Callable[[torch.Tensor], object]] = [
        dist.all_reduce,
        group.all_reduce,
        lambda x: dist.all_reduce(x, group=group),
        lambda x: dist.all_reduce(x, async_op=True).wait(),
        lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
        lambda x: dist.all_reduce_coalesced([x]),
        lambda x: dist.reduce_scatter_single(x, torch.cat([x, x])),
        lambda x: (dist.barrier(), gather_objects(), dist.all_reduce(x)),
        reduce_together,
    ]
    for call in calls:

        def step(x: torch.Tensor, call: Callable[[torch.Tensor], object] = call) -> torch.Tensor:
            y = x * 2
            call(y)
            return y + 1

        assert torch.compile(step, backend="eager")(torch.ones(2)).tolist() == [5, 5]


@RANKS
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_pass_through_collectives_between_compiled_parts() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 3).square().sum()

    x = torch.ones(2, requires_grad=True)
    torch.compile(loss, backend="eager")(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [72, 72]


@RANKS
def test_ranks_and_the_context_managers_of_others_stay_in_the_graph() -> None:
    @contextmanager
    def around() -> Iterator[None]:
        yield

    def step(x: torch.Tensor) -> torch.Tensor:
        with around():
            return x * dist.get_world_size() + dist.get_rank()

    found = torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1))
    assert found.item() == 2 + dist.get_rank()
