"""Sums of sparse tensors, beside Gloo."""

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.stores import to_torch


def sparse(places: list[list[int]], shape: tuple[int, ...], dtype=torch.float32) -> torch.Tensor:
    """Return a tensor with the numbers 1, 2, 3, … at ``places``."""
    dense = shape[len(places) :]
    entries = len(places[0])
    values = torch.arange(1, entries + 1).reshape(-1, *[1] * len(dense)).expand(-1, *dense)
    return torch.sparse_coo_tensor(
        torch.tensor(places), values.to(dtype), shape, check_invariants=True
    )


def samples(rank: int) -> list[torch.Tensor]:
    return [
        sparse([[rank]], (4,)),  # disjoint
        sparse([[0, 2]], (4,)),  # the same
        sparse([[0, rank]], (4, 3)),  # overlapping, dense rows; twice the same place on rank 0
        sparse([[1, 1], [rank, 2]], (3, 5)),
        sparse([[1, 1, rank]], (3, 2, 2)),
        sparse([[]], (4,)) if rank == 0 else sparse([[3]], (4,)),  # nothing on one rank
        sparse([[0, rank]], (4,), torch.float64),
    ]


@pytest.mark.ranks(2, 3, may_leave=["thread", "socket"])
def test_sums_are_those_of_gloo(rank, world_size, store):
    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    for number, (ours, theirs) in enumerate(zip(samples(rank), samples(rank), strict=True)):
        dist.all_reduce(ours)
        torch_dist.all_reduce(theirs)
        assert ours.is_coalesced(), number
        assert torch.equal(ours.indices(), theirs.coalesce().indices()), number
        assert torch.equal(ours.values(), theirs.coalesce().values()), number
    torch_dist.destroy_process_group()


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_sparse_tensors_are_checked_on_every_rank(rank, group):
    leaf = sparse([[0, 1]], (3,)).requires_grad_()
    work = dist.all_reduce(leaf, dist.ReduceOp.AVG, async_op=True)
    assert work.get_future().wait()[0].to_dense().tolist() == [1.0, 2.0, 0.0]
    scaled = sparse([[0]], (3,), torch.float16)
    group.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(rank + 1))
    assert scaled.to_dense().tolist() == [3.0, 0.0, 0.0]
    whole = sparse([[rank]], (3,), torch.int64)
    group.all_reduce(whole)
    assert whole.to_dense().tolist() == [1, 1, 0]

    for other in (
        sparse([[0]], (3 + rank,)),
        sparse([[0]], (3, 1) if rank else (3,)),
        sparse([[0]], (3,), torch.float64 if rank else torch.float32),
    ):
        before = other.clone()
        with pytest.raises(dist.MismatchError, match=r"(?s)0: SUM of .*1: SUM of ") as caught:
            group.all_reduce(other)
        assert str(caught.value).count(" at tests/ranks/test_sparse_sums.py:") == 2
        assert torch.equal(other.to_dense(), before.to_dense())
    tensor = sparse([[0]], (3,))
    for wrong in (
        lambda: group.all_reduce(tensor, dist.ReduceOp.MAX),
        lambda: group.all_reduce(sparse([[0]], (3,), torch.int32), dist.ReduceOp.AVG),
        lambda: group.broadcast(tensor, 0),
        lambda: group.reduce(tensor, 0),
    ):
        with pytest.raises(dist.UsageError):
            wrong()
    group.barrier()  # and the group is still good
