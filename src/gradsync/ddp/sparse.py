"""Sparse gradients: every rank gets everybody's rows, and sums them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradsync.group.group import ProcessGroup

__all__ = ["mean_sparse", "sparse_parameters"]


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the identities of the parameters whose gradients are sparse."""
    return {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }


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
        grad = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64),
            param.new_empty(0, *param.shape[1:]),
            param.shape,
            check_invariants=False,
        )
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
    # Everyone sends as many rows as the longest has; the surplus is cut off on arrival.
    longest = int(counts.max())
    places = torch.zeros(longest, dtype=torch.int64)
    places[: indices.shape[1]] = indices[0]
    rows = values.new_zeros(longest, *values.shape[1:])
    rows[: values.shape[0]] = values.mul_(weight / (float(weights.sum()) or 1.0))
    all_places = places.new_empty(group.size() * longest)
    all_rows = rows.new_empty(group.size() * longest, *values.shape[1:])
    group.all_gather_single(all_places, places)
    group.all_gather_single(all_rows, rows)
    kept = torch.cat(
        [torch.arange(r * longest, r * longest + int(n)) for r, n in enumerate(counts)]
    )
    found = torch.sparse_coo_tensor(
        all_places[kept].unsqueeze(0), all_rows[kept], param.shape, check_invariants=False
    )
    return found.coalesce()
