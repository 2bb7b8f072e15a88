"""What reduce and reduce_scatter must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.testing.conformance.refusing import refuses
from gradsync.testing.conformance.samples import (
    DTYPES,
    SIZES,
    is_defined,
    model,
    same,
    sample,
    sizes_for,
)

__all__ = ["CHECKS"]


def _defined() -> Iterator[tuple[str, ReduceOp]]:
    for dtype in DTYPES:
        for reduce in ReduceOp:
            if is_defined(dtype, reduce):
                yield dtype, reduce


def reduce_is_right_for_every_type_and_operation(group: ProcessGroup) -> None:
    for number, (dtype, reduce) in enumerate(_defined()):
        root = number % group.size()
        for count in sizes_for(dtype, reduce):
            inputs = [sample(rank, count, dtype) for rank in range(group.size())]
            tensor = inputs[group.rank()].clone()
            group.reduce(tensor, root, reduce)
            expected = model(inputs, reduce) if group.rank() == root else inputs[group.rank()]
            assert same(tensor, expected), (dtype, reduce.name, count, root)


def reduce_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    base = torch.full((5, 6), float(group.rank()))
    group.reduce(base.t()[1], 0, ReduceOp.MAX)
    expected = group.size() - 1 if group.rank() == 0 else group.rank()
    assert base[:, 1].tolist() == [float(expected)] * 5
    assert base[:, 0].tolist() == [float(group.rank())] * 5


def reduce_refuses_what_has_no_meaning(group: ProcessGroup) -> None:
    refuses(group, UsageError, {"no such root": lambda: group.reduce(torch.ones(1), group.size())})
    refuses(
        group,
        ValueError,
        {"bits of floats": lambda: group.reduce(torch.ones(1), 0, ReduceOp.BOR)},
    )


def _pieces(rank: int, counts: Sequence[int], dtype: str) -> list[torch.Tensor]:
    return [sample(rank, count, dtype, piece) for piece, count in enumerate(counts)]


def _expected(
    group: ProcessGroup, counts: Sequence[int], dtype: str, reduce: ReduceOp
) -> torch.Tensor:
    own = group.rank()
    inputs = [sample(rank, counts[own], dtype, own) for rank in range(group.size())]
    return model(inputs, reduce)


def reduce_scatter_is_right_for_every_type_and_operation(group: ProcessGroup) -> None:
    for dtype, reduce in _defined():
        for count in sizes_for(dtype, reduce):
            counts = [count] * group.size()
            inputs = _pieces(group.rank(), counts, dtype)
            before = [piece.clone() for piece in inputs]
            output = torch.empty_like(inputs[0])
            group.reduce_scatter(output, inputs, reduce)
            expected = _expected(group, counts, dtype, reduce)
            assert same(output, expected), (dtype, reduce.name, count)
            assert all(same(a, b) for a, b in zip(inputs, before, strict=True))


def reduce_scatter_takes_pieces_of_different_sizes(group: ProcessGroup) -> None:
    for count in SIZES:
        for step in (1, 5000):
            counts = [count + step * rank for rank in range(group.size())]
            counts[-1] = 0
            inputs = _pieces(group.rank(), counts, "float32")
            output = torch.empty(counts[group.rank()])
            group.reduce_scatter(output, inputs)
            assert same(output, _expected(group, counts, "float32", ReduceOp.SUM)), counts


def reduce_scatter_takes_one_tensor_for_all(group: ProcessGroup) -> None:
    size = group.size()
    for count in SIZES:
        counts = [count] * size
        whole = torch.cat(_pieces(group.rank(), counts, "float32"))
        expected = _expected(group, counts, "float32", ReduceOp.SUM)
        for shape in ((size * count,), (size, count)):
            output = torch.empty(count)
            group.reduce_scatter_single(output, whole.reshape(shape))
            assert torch.equal(output, expected)
        own = whole[group.rank() * count : (group.rank() + 1) * count]
        group.reduce_scatter_single(own, whole)  # in place
        assert torch.equal(own, expected)


def reduce_scatter_takes_tensors_with_gaps(group: ProcessGroup) -> None:
    size = group.size()
    base = torch.ones(size, 3, 2)
    output = torch.zeros(3, 2)
    group.reduce_scatter(output[:, 1], [base[rank, :, 0] for rank in range(size)])
    assert output.tolist() == [[0.0, float(size)]] * 3


def reduce_scatter_refuses_what_does_not_fit(group: ProcessGroup) -> None:
    size = group.size()
    tensor = torch.ones(2, 3)
    usual = [torch.ones(2, 3) for _ in range(size)]
    other = [torch.ones(3, 2) for _ in range(size)]
    refuses(
        group,
        UsageError,
        {
            "a short list": lambda: group.reduce_scatter(tensor, usual[1:]),
            "another shape": lambda: group.reduce_scatter(tensor, other),
            "another dtype": lambda: group.reduce_scatter(tensor, [t.double() for t in usual]),
            "one row too many": lambda: group.reduce_scatter_single(
                tensor, torch.ones(2 * size + 1, 3)
            ),
        },
    )
    refuses(
        group,
        TypeError,
        {"a tensor for a list": lambda: group.reduce_scatter(tensor, tensor)},  # type: ignore[arg-type]
    )


CHECKS: dict[str, Sequence[Callable[[ProcessGroup], None]]] = {
    "reduce": (
        reduce_is_right_for_every_type_and_operation,
        reduce_takes_tensors_with_gaps,
        reduce_refuses_what_has_no_meaning,
    ),
    "reduce_scatter": (
        reduce_scatter_is_right_for_every_type_and_operation,
        reduce_scatter_takes_pieces_of_different_sizes,
        reduce_scatter_takes_one_tensor_for_all,
        reduce_scatter_takes_tensors_with_gaps,
        reduce_scatter_refuses_what_does_not_fit,
    ),
}
