"""all_reduce of sparse tensors, as gradients of embeddings are: the ranks' entries, gathered."""

from __future__ import annotations

from datetime import timedelta

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(
    group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp, timeout: timedelta
) -> None:
    """Sum a COO tensor over the ranks, in place; ranks may have different entries."""
    if tensor.layout is not torch.sparse_coo or op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(
            f"all_reduce of sparse tensors takes SUM or AVG of COO tensors, got {op.name} of "
            f"{tensor.layout}"
        )
    own = tensor.coalesce()
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([own._nnz()]), timeout=timeout)
    sizes = counts.tolist()
    indices = _gathered(group, own.indices().t().contiguous(), sizes, timeout)
    values = _gathered(group, own.values(), sizes, timeout)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    if op is ReduceOp.AVG:
        total = total / group.size()
    tensor.copy_(total)


def _gathered(
    group: ProcessGroup, rows: torch.Tensor, sizes: list[int], timeout: timedelta
) -> torch.Tensor:
    """Return the rows of every rank one after the other; they give different numbers of them."""
    ranks, here = group.size(), rows.shape[0]
    output = rows.new_empty(sum(sizes), *rows.shape[1:])
    everywhere = rows.expand(ranks, *rows.shape).reshape(ranks * here, *rows.shape[1:])
    group.all_to_all_single(output, everywhere, sizes, [here] * ranks, timeout=timeout)
    return output
