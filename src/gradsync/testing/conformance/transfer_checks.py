"""What send and recv must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.conformance.refusing import refuses
from gradsync.testing.conformance.samples import DTYPES, SIZES, same, sample, sizes_for

__all__ = ["CHECKS"]


def _neighbours(group: ProcessGroup) -> tuple[int, int]:
    return (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()


def messages_arrive_for_every_type_and_size(group: ProcessGroup) -> None:
    after, before = _neighbours(group)
    for dtype in DTYPES:
        for count in sizes_for(dtype):
            got = torch.empty_like(sample(0, count, dtype))
            work = group.send_async(sample(group.rank(), count, dtype), after, tag=count)
            receipt = group.recv_async(got, before, tag=count)
            assert receipt.wait()
            assert work.wait()
            assert receipt.source_rank() == before
            assert same(got, sample(before, count, dtype)), (dtype, count)


def tags_may_come_in_any_order(group: ProcessGroup) -> None:
    after, before = _neighbours(group)
    counts = [size + 1 for size in SIZES]
    works = [group.send_async(sample(group.rank(), n, "float32"), after, tag=n) for n in counts]
    again = [group.send_async(sample(after, n, "float32"), after, tag=n) for n in counts]
    for count in reversed(counts):
        for seed in (before, group.rank()):  # first sent, first received
            got = torch.empty(count)
            group.recv_async(got, before, tag=count).wait()
            assert same(got, sample(seed, count, "float32")), count
    for work in (*works, *again):
        assert work.wait()


def any_rank_may_be_the_sender(group: ProcessGroup) -> None:
    if group.rank() != 0:
        group.send(torch.full((3,), float(group.rank())), 0, tag=1)
        return
    found = []
    for _ in range(group.size() - 1):
        got = torch.empty(3)
        source = group.recv(got, tag=1)
        assert got.tolist() == [float(source)] * 3
        found.append(source)
    assert sorted(found) == list(range(1, group.size()))


def messages_take_tensors_with_gaps(group: ProcessGroup) -> None:
    after, before = _neighbours(group)
    grid = torch.arange(12.0).reshape(3, 4) + 100 * group.rank()
    target = torch.full((3, 4), -1.0)
    work = group.send_async(grid[:, 1], after)
    receipt = group.recv_async(target[:, 2], before)
    assert receipt.wait()
    assert work.wait()
    assert target[:, 2].tolist() == [100.0 * before + n for n in (1, 5, 9)]
    assert (target[:, [0, 1, 3]] == -1).all()
    assert receipt.result()[0].shape == (3,)


def messages_refuse_what_makes_no_sense(group: ProcessGroup) -> None:
    tensor, own = torch.ones(2), group.rank()
    other = (own + 1) % group.size()
    refuses(
        group,
        UsageError,
        {
            "a message to oneself": lambda: group.send(tensor, own),
            "a rank too high": lambda: group.send(tensor, group.size()),
            "a negative rank": lambda: group.send(tensor, -1),
            "a negative tag": lambda: _dropped(group.send_async(tensor, other, tag=-1)),
            "a tag too large": lambda: _dropped(group.recv_async(tensor, other, tag=2**63)),
            "an expanded output": lambda: _dropped(group.recv(torch.ones(1).expand(3), other)),
        },
    )


def _dropped(result: object) -> None:
    del result


CHECKS: dict[str, Sequence[Callable[[ProcessGroup], None]]] = {
    "send": (
        messages_arrive_for_every_type_and_size,
        messages_take_tensors_with_gaps,
        messages_refuse_what_makes_no_sense,
    ),
    "recv": (tags_may_come_in_any_order, any_rank_may_be_the_sender),
}
