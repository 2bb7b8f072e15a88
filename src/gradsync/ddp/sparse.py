"""Sparse gradients: every rank gets everybody's rows, and sums them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsync.group.group import ProcessGroup

__all__ = ["mean_sparse"]


def mean_sparse(
    group: ProcessGroup,
    param: torch.Tensor,
    grad: torch.Tensor | None,
    used: bool,
    weigh: Callable[[torch.Tensor], float | None],
) -> torch.Tensor | None:
    """Return the mean of the ranks' sparse gradients of ``param``; None if no rank used it.

    ``weigh`` prepares a rank's rows in place and returns its weight. Rows are summed in rank
    order, so that every rank gets the same bits.
    """
    if grad is None:
        grad = param.new_zeros(0).to_sparse().sparse_resize_and_clear_(param.shape, 1, param.dim() - 1)
    own = (grad if grad.is_sparse else grad.to_sparse(1)).detach().coalesce()
    indices, values = own.indices(), own.values().clone()
    weight = weigh(values)
    weight = 1.0 if weight is None else weight
    head = torch.tensor([float(used), indices.shape[1], weight], dtype=torch.float64)
    heads = torch.empty(group.size() * 3, dtype=torch.float64)
    group.all_gather_single(heads, head)
    anyone, counts, weights = heads.view(group.size(), 3).unbind(1)
    if not anyone.any():
        return None
    indices_of = [torch.empty(int(n), 1, dtype=torch.int64) for n in counts]
    group.all_gather(indices_of, indices.t().contiguous())
    values_of = [torch.empty(int(n), *values.shape[1:], dtype=values.dtype) for n in counts]
    group.all_gather(values_of, values.mul_(weight / (float(weights.sum()) or 1.0)))
    rows = torch.cat(indices_of).t(), torch.cat(values_of)
    return torch.sparse_coo_tensor(*rows, param.shape).coalesce()
