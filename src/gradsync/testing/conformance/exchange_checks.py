"""What all_to_all must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.conformance.refusing import refuses
from gradsync.testing.conformance.samples import DTYPES, SIZES, same, sample, sizes_for

__all__ = ["CHECKS"]


def _uneven(sender: int, receiver: int, count: int) -> int:
    """Return how many elements go from one to the other; sometimes none."""
    return 0 if (sender + 2 * receiver) % 3 == 2 else count + 11 * sender + receiver


def all_to_all_is_right_for_every_type_and_size(group: ProcessGroup) -> None:
    own, size = group.rank(), group.size()
    for dtype in DTYPES:
        for count in sizes_for(dtype):
            inputs = [sample(own, count, dtype, to) for to in range(size)]
            outputs = [torch.empty_like(inputs[0]) for _ in range(size)]
            group.all_to_all(outputs, inputs)
            for rank, output in enumerate(outputs):
                assert same(output, sample(rank, count, dtype, own)), (dtype, count, rank)


def all_to_all_takes_any_sizes(group: ProcessGroup) -> None:
    own, ranks = group.rank(), range(group.size())
    for count in SIZES:
        inputs = [sample(own, _uneven(own, to, count), "float32", to) for to in ranks]
        outputs = [torch.empty(_uneven(sender, own, count)) for sender in ranks]
        group.all_to_all(outputs, inputs)
        for rank, output in enumerate(outputs):
            assert same(output, sample(rank, output.numel(), "float32", own)), (count, rank)


def all_to_all_takes_one_tensor_for_all(group: ProcessGroup) -> None:
    own, size = group.rank(), group.size()
    for count in SIZES:
        tensor = torch.cat([sample(own, 2 * count, "int64", to) for to in range(size)])
        output = torch.empty_like(tensor)
        group.all_to_all_single(output, tensor)
        expected = torch.cat([sample(rank, 2 * count, "int64", own) for rank in range(size)])
        assert torch.equal(output, expected)
        sent = [_uneven(own, to, count) for to in range(size)]
        received = [_uneven(sender, own, count) for sender in range(size)]
        tensor = torch.cat(
            [sample(own, 2 * n, "float64", to).reshape(n, 2) for to, n in enumerate(sent)]
        )
        rows = torch.empty(sum(received), 2, dtype=torch.float64)
        group.all_to_all_single(rows, tensor, received, sent)
        expected = torch.cat(
            [sample(r, 2 * n, "float64", own).reshape(n, 2) for r, n in enumerate(received)]
        )
        assert torch.equal(rows, expected)


def all_to_all_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    size = group.size()
    tensor = torch.arange(2.0 * size).reshape(size, 2)
    output = torch.full((size, 2), -1.0)
    group.all_to_all_single(output[:, 1], tensor[:, 0])
    assert output.tolist() == [[-1.0, 2.0 * group.rank()]] * size
    group.all_to_all(list(output[:, :1]), list(tensor[:, 1:]))
    assert output[:, 0].tolist() == [2.0 * group.rank() + 1] * size


def all_to_all_refuses_what_does_not_fit(group: ProcessGroup) -> None:
    size = group.size()
    usual = [torch.ones(2) for _ in range(size)]
    whole = torch.ones(2 * size, 3)
    twos = [2] * size
    call = group.all_to_all_single
    refuses(
        group,
        UsageError,
        {
            "a short list": lambda: group.all_to_all(usual[1:], usual),
            "a list too long": lambda: group.all_to_all(usual, [*usual, usual[0]]),
            "another dtype": lambda: group.all_to_all([t.double() for t in usual], usual),
            "other rows": lambda: call(torch.ones(2 * size, 4), whole),
            "too few splits": lambda: call(torch.ones_like(whole), whole, twos[1:] or [1], twos),
            "a wrong sum": lambda: call(torch.ones_like(whole), whole, twos, [3] * size),
            "negative splits": lambda: call(
                torch.ones_like(whole), whole, twos, [2 * size + 2, -2, *[0] * (size - 2)]
            ),
        },
    )
    if size > 1:
        odd = torch.ones(2 * size + 1)
        refuses(group, UsageError, {"an odd row": lambda: call(torch.ones_like(odd), odd)})
    refuses(
        group,
        ValueError,
        {"no dimension": lambda: call(torch.tensor(1.0), torch.tensor(1.0))},
    )


CHECKS: dict[str, Sequence[Callable[[ProcessGroup], None]]] = {
    "all_to_all": (
        all_to_all_is_right_for_every_type_and_size,
        all_to_all_takes_any_sizes,
        all_to_all_takes_one_tensor_for_all,
        all_to_all_takes_tensors_with_gaps,
        all_to_all_refuses_what_does_not_fit,
    ),
}
