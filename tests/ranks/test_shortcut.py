"""Functions without a group: straight to the default group's lane, unless something speaks against.

The test kit observes the default group, which closes its lane; so these tests put one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import gradsync as dist
from gradsync.backends.lane import CLOSED_LANE
from gradsync.group import collectives, world


@contextmanager
def default_instead(group: dist.ProcessGroup) -> Iterator[None]:
    usual = world.default_group()
    world.replace_default_group(group)
    try:
        yield
    finally:
        world.replace_default_group(usual)


@pytest.mark.ranks(2)
def test_every_function_takes_it_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.new_group()
    rank = group.rank()
    mine, other = torch.tensor([1.0, 2.0]) + rank, torch.tensor([2.0, 1.0]) + rank
    both = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])]

    def detour(name: str, group: object) -> None:
        raise AssertionError(f"{name} took the ordinary way")

    monkeypatch.setattr(collectives, "member_group", detour)
    with default_instead(group):
        assert world.shortcut is group
        dist.barrier()
        summed = mine.clone()
        dist.all_reduce(summed)
        assert summed.tolist() == [3.0, 5.0]
        sent = mine.clone()
        dist.broadcast(sent, 1)
        assert sent.tolist() == [2.0, 3.0]
        reduced = mine.clone()
        dist.reduce(reduced, dst=1)
        assert reduced.tolist() == ([3.0, 5.0] if rank == 1 else mine.tolist())
        listed = [torch.empty(2), torch.empty(2)]
        dist.all_gather(listed, mine)
        assert torch.equal(torch.stack(listed), torch.stack(both))
        whole = torch.empty(4)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, torch.cat(both))
        for root in (None, 1):
            at_root = [torch.empty(2), torch.empty(2)] if rank == (root or 0) else None
            dist.gather(mine, at_root, root)
            assert at_root is None or torch.equal(torch.stack(at_root), torch.stack(both))
            piece = torch.empty(2)
            dist.scatter(piece, both if rank == (root or 0) else None, root)
            assert torch.equal(piece, mine)
        part = torch.empty(1)
        dist.reduce_scatter(part, list(mine.chunk(2)))
        assert part.item() == [3.0, 5.0][rank]
        dist.reduce_scatter_tensor(part, mine)
        assert part.item() == [3.0, 5.0][rank]
        swapped = torch.empty(2)
        dist.all_to_all_single(swapped, mine)
        assert swapped.tolist() == [both[0][rank].item(), both[1][rank].item()]
        pieces = [torch.empty(1), torch.empty(1)]
        dist.all_to_all(pieces, list(other.chunk(2)))
        assert torch.cat(pieces).tolist() == [2.0 - rank, 3.0 - rank]


@pytest.mark.ranks(2)
def test_not_for_other_groups_handles_or_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.new_group()
    names: list[str] = []
    member_group = collectives.member_group

    def noted(name: str, group: collectives.Group) -> dist.ProcessGroup | None:
        names.append(name)
        return member_group(name, group)

    monkeypatch.setattr(collectives, "member_group", noted)
    with default_instead(group):
        x = torch.ones(2)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.broadcast(x, group_src=0),
            lambda: dist.all_to_all_single(torch.empty(2), x, [1, 1], [1, 1]),
        ]
        for call in calls:
            call()
        handle = dist.all_reduce(x, async_op=True)
        assert handle is not None
        handle.wait()
        with pytest.raises(dist.UsageError):
            dist.broadcast(x)
    assert names == ["all_reduce", "broadcast", "all_to_all_single", "all_reduce", "broadcast"]


@pytest.mark.ranks(2)
def test_a_coalescing_manager_still_puts_calls_off() -> None:
    with default_instead(dist.new_group()):
        x = torch.ones(2)
        with dist.coalescing_manager():
            dist.all_reduce(x)
            assert x.tolist() == [1.0, 1.0]
        assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_closed_where_ranks_are_not_the_worlds_or_there_is_no_group() -> None:
    alone = dist.new_group([1])
    if dist.get_rank() == 1:
        with default_instead(alone):
            assert world.shortcut._lane is CLOSED_LANE
            x = torch.ones(1)
            dist.broadcast(x, 1)  # rank 1 of the world is rank 0 here
    usual = world.default_group()
    world.replace_default_group(None)
    try:
        with pytest.raises(dist.UsageError, match="not initialised"):
            dist.barrier()
    finally:
        world.replace_default_group(usual)
    assert world.shortcut is usual
