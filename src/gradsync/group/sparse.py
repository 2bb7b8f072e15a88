"""Sums of sparse tensors (COO): everybody gets all entries, and adds those of one place."""

from __future__ import annotations

import torch

from gradsync.base.deadline import Timeout
from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp
from gradsync.errors import UsageError
from gradsync.group.alike import check_alike
from gradsync.group.gathering import Gathering
from gradsync.group.reductions import Reduction, find_reduction, scaled

__all__ = ["all_reduce_sparse", "is_sparse"]


def is_sparse(tensor: object) -> bool:
    """Return whether ``tensor`` is a sparse tensor of the kind that can be reduced."""
    return isinstance(tensor, torch.Tensor) and tensor.is_sparse


def all_reduce_sparse(
    group: Gathering, tensor: torch.Tensor, op: Reduction, timeout: Timeout | None
) -> None:
    """Replace ``tensor`` by the sum (or average) of the ranks' sparse tensors, coalesced.

    Four calls: whether it is the same everywhere, how much everybody has, indices, values.
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
    said = f"{kind.name} of {name}{list(mine.shape)}, {mine.sparse_dim()} sparse dimensions"
    check_alike(group, "all_reduce of sparse tensors", said, timeout)
    lengths = torch.empty(group._size, dtype=torch.int64)
    group.all_gather_single(lengths, torch.tensor([mine._nnz()]), timeout)
    counts = lengths.tolist()
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


def _gather(
    group: Gathering, rows: torch.Tensor, counts: list[int], timeout: Timeout | None
) -> torch.Tensor:
    """Return everybody's rows, those of rank 0 first."""
    whole = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype)
    group.all_gather(whole.split_with_sizes(counts), rows, timeout)
    return whole
