"""Sums of sparse tensors (COO): everybody gets all entries, and adds those of one place."""

from __future__ import annotations

import torch

from gradsync.backends.ops import ALL_REDUCE
from gradsync.backends.waits import present_site
from gradsync.base.deadline import Timeout
from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp
from gradsync.errors import MismatchError, UsageError
from gradsync.group.gathering import Gathering
from gradsync.group.reductions import Reduction, find_reduction, scaled

__all__ = ["all_reduce_sparse", "is_sparse"]

_MOST_DIMENSIONS = 64
"""torch's own limit."""
_SITE_BYTES = 240


def is_sparse(tensor: object) -> bool:
    """Return whether ``tensor`` is a sparse tensor of the kind that can be reduced."""
    return isinstance(tensor, torch.Tensor) and tensor.is_sparse


def all_reduce_sparse(
    group: Gathering, tensor: torch.Tensor, op: Reduction, timeout: Timeout | None
) -> None:
    """Replace ``tensor`` by the sum (or average) of the ranks' sparse tensors, coalesced.

    Three calls: what everybody has, then the indices, then the values.
    """
    kind, factor = find_reduction(op)
    if kind not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        raise UsageError(
            f"all_reduce of a sparse tensor takes SUM, AVG or PREMUL_SUM, got {kind.name}: places "
            f"that a rank has no entry for count as zero, so use .to_dense()"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES or (kind == ReduceOp.AVG and not _has_fractions(tensor)):
        raise UsageError(f"all_reduce: {kind.name} of sparse {tensor.dtype} is not defined")
    mine = tensor.detach().coalesce()
    values = mine.values() if factor is None else scaled(mine.values(), factor, "all_reduce")
    counts = _agree(group, mine, kind, timeout)
    indices = _gather(group, mine.indices().t(), counts, timeout)
    found = _gather(group, values, counts, timeout)
    # Halves are added in float32 and rounded once, as dense ones are.
    wide = found.float() if found.is_floating_point() and found.itemsize < 4 else found
    total = torch.sparse_coo_tensor(indices.t(), wide, mine.shape, check_invariants=False)
    total = total.coalesce()
    if kind == ReduceOp.AVG:
        total = total / len(counts)
    with torch.no_grad():
        tensor.copy_(total.to(tensor.dtype))


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _agree(
    group: Gathering, tensor: torch.Tensor, kind: ReduceOp, timeout: Timeout | None
) -> list[int]:
    """Return how many entries each rank has, or raise on every rank if they do not fit together."""
    number = DTYPE_NAMES.index(str(tensor.dtype).removeprefix("torch."))
    shape = [*tensor.shape, *[-1] * (_MOST_DIMENSIONS - tensor.dim())]
    row = torch.tensor([tensor._nnz(), number, kind, tensor.sparse_dim(), tensor.dim(), *shape])
    rows = torch.empty(group._size, row.numel(), dtype=torch.int64)
    group.all_gather_single(rows, row, timeout)
    if (rows[:, 1:] == rows[0, 1:]).all():
        return rows[:, 0].tolist()
    places = _sites(group, timeout)
    lines = [
        f"  rank {rank}: {_describe(each)} at {place}"
        for rank, (each, place) in enumerate(zip(rows.tolist(), places, strict=True))
    ]
    raise MismatchError(
        "all_reduce: the ranks' sparse tensors do not fit together, so nothing was done:\n"
        + "\n".join(lines),
        op=ALL_REDUCE.name,
        rank=group._rank,
        ranks=tuple(range(group._size)),
    )


def _sites(group: Gathering, timeout: Timeout | None) -> list[str]:
    """Return the line of code that each rank is at; all ranks ask."""
    text = present_site().encode()[:_SITE_BYTES].ljust(_SITE_BYTES)
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = torch.empty(group._size, _SITE_BYTES, dtype=torch.uint8)
    group.all_gather_single(rows, row, timeout)
    return [bytes(each.numpy()).decode(errors="replace").rstrip() for each in rows]


def _describe(row: list[int]) -> str:
    entries, dtype, kind, sparse, dimensions, *shape = row
    return (
        f"{ReduceOp(kind).name} of {DTYPE_NAMES[dtype]}{shape[:dimensions]}, {sparse} sparse "
        f"dimensions, {entries} entries"
    )


def _gather(
    group: Gathering, rows: torch.Tensor, counts: list[int], timeout: Timeout | None
) -> torch.Tensor:
    """Return everybody's rows, those of rank 0 first."""
    whole = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
    group.all_gather(whole.split_with_sizes(counts), rows, timeout)
    return whole
