"""What all_gather, gather and scatter must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.conformance.refusing import refuses
from gradsync.testing.conformance.samples import DTYPES, SIZES, same, sample, sizes_for

__all__ = ["CHECKS"]


def all_gather_is_right_for_every_type_and_size(group: ProcessGroup) -> None:
    for dtype in DTYPES:
        for count in sizes_for(dtype):
            tensor = sample(group.rank(), count, dtype)
            outputs = [torch.empty_like(tensor) for _ in range(group.size())]
            group.all_gather(outputs, tensor)
            for rank, output in enumerate(outputs):
                assert same(output, sample(rank, count, dtype)), (dtype, count, rank)


def all_gather_takes_tensors_of_different_sizes(group: ProcessGroup) -> None:
    for count in SIZES:
        for step in (1, 5000):
            counts = [count + step * rank for rank in range(group.size())]
            counts[-1] = 0
            mine = sample(group.rank(), counts[group.rank()], "float32")
            outputs = [torch.empty(number) for number in counts]
            group.all_gather(outputs, mine)
            for rank, output in enumerate(outputs):
                assert same(output, sample(rank, counts[rank], "float32")), (counts, rank)
    mine = torch.full((group.rank(), 2), float(group.rank()))
    shaped = [torch.empty(rank, 2) for rank in range(group.size())]
    shaped[group.rank()] = mine  # in place
    group.all_gather(shaped, mine)
    assert all((output == rank).all() for rank, output in enumerate(shaped))


def all_gather_takes_one_tensor_for_all(group: ProcessGroup) -> None:
    size = group.size()
    for count in SIZES:
        expected = torch.cat([sample(rank, count, "float32") for rank in range(size)])
        tensor = sample(group.rank(), count, "float32")
        for shape in ((size * count,), (size, count)):
            output = torch.empty(shape)
            group.all_gather_single(output, tensor)
            assert torch.equal(output.flatten(), expected)
        output = torch.empty(size * count)
        own = output[group.rank() * count : (group.rank() + 1) * count]
        own.copy_(tensor)
        group.all_gather_single(output, own)  # in place
        assert torch.equal(output, expected)


def all_gather_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    size = group.size()
    mine = torch.full((4, 3), float(group.rank()))
    base = torch.full((size, 4), -1.0)
    group.all_gather([base[rank, ::2] for rank in range(size)], mine.t()[1, ::2])
    assert base[:, ::2].tolist() == [[float(rank)] * 2 for rank in range(size)]
    assert (base[:, 1::2] == -1).all()
    wide = torch.full((size, 2), -1.0)
    group.all_gather_single(wide[:, 0], torch.tensor([float(group.rank())]))
    assert wide[:, 0].tolist() == [float(rank) for rank in range(size)]
    assert (wide[:, 1] == -1).all()


def all_gather_refuses_what_does_not_fit(group: ProcessGroup) -> None:
    size, tensor = group.size(), torch.ones(2, 3)
    usual = [torch.empty(2, 3) for _ in range(size)]
    refuses(
        group,
        UsageError,
        {
            "a list too long": lambda: group.all_gather([*usual, tensor], tensor),
            "another shape": lambda: group.all_gather([torch.empty(3, 2)] * size, tensor),
            "another dtype": lambda: group.all_gather([*usual[1:], tensor.double()], tensor),
            "an expanded output": lambda: group.all_gather(
                [*usual[1:], torch.empty(1).expand(2, 3)], tensor
            ),
            "one row too many": lambda: group.all_gather_single(
                torch.empty(2 * size + 1, 3), tensor
            ),
            "another dtype of one": lambda: group.all_gather_single(
                torch.empty(2 * size, 3, dtype=torch.int32), tensor
            ),
        },
    )
    refuses(
        group,
        TypeError,
        {
            "a tensor for a list": lambda: group.all_gather(tensor, tensor),  # type: ignore[arg-type]
            "numbers in a list": lambda: group.all_gather([1.0] * size, tensor),  # type: ignore[list-item]
            "a number": lambda: group.all_gather(usual, 1.0),  # type: ignore[arg-type]
        },
    )


def gather_is_right_for_every_root(group: ProcessGroup) -> None:
    for root in range(group.size()):
        for dtype in DTYPES:
            for count in sizes_for(dtype):
                tensor = sample(group.rank(), count, dtype)
                outputs = None
                if group.rank() == root:
                    outputs = [torch.empty_like(tensor) for _ in range(group.size())]
                group.gather(tensor, outputs, root)
                for rank, output in enumerate(outputs or ()):
                    assert same(output, sample(rank, count, dtype)), (dtype, count, rank)


def gather_refuses_what_does_not_fit(group: ProcessGroup) -> None:
    size, tensor = group.size(), torch.ones(2)
    usual = [torch.empty(2) for _ in range(size)]
    root = group.rank()  # each rank is refused for itself
    refuses(
        group,
        UsageError,
        {
            "no outputs on the root": lambda: group.gather(tensor, None, root),
            "a short list": lambda: group.gather(tensor, usual[1:], root),
            "another shape": lambda: group.gather(tensor, [*usual[1:], torch.empty(3)], root),
            "no such root": lambda: group.gather(tensor, usual, size),
        },
    )
    if size > 1:
        other = (root + 1) % size
        refuses(group, UsageError, {"outputs": lambda: group.gather(tensor, usual, other)})


def scatter_is_right_for_every_root(group: ProcessGroup) -> None:
    for root in range(group.size()):
        for dtype in DTYPES:
            for count in sizes_for(dtype):
                inputs = None
                if group.rank() == root:
                    inputs = [sample(root, count, dtype, piece) for piece in range(group.size())]
                output = torch.empty(count, dtype=getattr(torch, dtype))
                group.scatter(output, inputs, root)
                assert same(output, sample(root, count, dtype, group.rank())), (dtype, count)


def scatter_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    base = torch.arange(6.0).reshape(3, 2)
    inputs = [base[:, 1] + rank for rank in range(group.size())]
    output = torch.full((3, 2), -1.0)
    group.scatter(output[:, 0], inputs if group.rank() == 0 else None, 0)
    assert output[:, 0].tolist() == [1.0 + group.rank(), 3.0 + group.rank(), 5.0 + group.rank()]
    assert (output[:, 1] == -1).all()


def scatter_refuses_what_does_not_fit(group: ProcessGroup) -> None:
    size, tensor = group.size(), torch.ones(2)
    usual = [torch.empty(2) for _ in range(size)]
    root = group.rank()
    refuses(
        group,
        UsageError,
        {
            "no inputs on the root": lambda: group.scatter(tensor, None, root),
            "a short list": lambda: group.scatter(tensor, usual[1:], root),
            "another dtype": lambda: group.scatter(tensor, [*usual[1:], tensor.int()], root),
            "no such root": lambda: group.scatter(tensor, usual, -1),
        },
    )
    if size > 1:
        other = (root + 1) % size
        refuses(group, UsageError, {"inputs": lambda: group.scatter(tensor, usual, other)})


CHECKS: dict[str, Sequence[Callable[[ProcessGroup], None]]] = {
    "all_gather": (
        all_gather_is_right_for_every_type_and_size,
        all_gather_takes_tensors_of_different_sizes,
        all_gather_takes_one_tensor_for_all,
        all_gather_takes_tensors_with_gaps,
        all_gather_refuses_what_does_not_fit,
    ),
    "gather": (gather_is_right_for_every_root, gather_refuses_what_does_not_fit),
    "scatter": (
        scatter_is_right_for_every_root,
        scatter_takes_tensors_with_gaps,
        scatter_refuses_what_does_not_fit,
    ),
}
