"""Gradient buckets in shared memory, as DistributedDataParallel uses them."""

from __future__ import annotations

import pytest
import torch

from gradsync.errors import MismatchError, PeerLostError, UsageError
from gradsync.group.world import resolve
from gradsync.testing import faults


@pytest.mark.ranks(2, 3, backend=["shm", "threads"])
def test_buckets_hold_the_weighted_mean_on_every_rank() -> None:
    group = resolve(None)
    rank, size = group.rank(), group.size()
    kinds = [(1, torch.float32), (1000, torch.bfloat16), (70_000, torch.float64)]
    buckets = [group.shared_empty(count, dtype=dtype) for count, dtype in kinds]
    board = group.bucket_board(buckets, [1, 2, 3])
    for step in range(10):
        weights = [1.0] * size if step % 2 else [1.0 + r for r in range(size)]
        for index, bucket in enumerate(buckets):
            bucket.fill_(float(step + rank))
            board.arrive(index, weights[rank], bytes([1, rank % 2]) if index == 1 else None)
        board.finish(30.0)
        mean = sum(w * (step + r) for r, w in enumerate(weights)) / sum(weights)
        for bucket in buckets:
            expected = torch.full_like(bucket, mean)
            assert torch.allclose(bucket, expected, rtol=1e-2 if bucket.itemsize == 2 else 1e-6)
        assert board.missing_everywhere(1) == [0]
        assert board.missing_everywhere(2) == []


@pytest.mark.ranks(2)
def test_mistakes_are_named() -> None:
    group = resolve(None)
    with pytest.raises(UsageError, match="not in shared memory"):
        group.bucket_board([torch.ones(4)], [1])
    bucket = group.shared_zeros(100)
    board = group.bucket_board([bucket], [1])
    board.arrive(0)
    with pytest.raises(UsageError, match="full already"):
        board.arrive(0)
    with pytest.raises(MismatchError, match="finish_buckets"):
        board.finish(10.0) if group.rank() == 0 else group.barrier()


@pytest.mark.ranks(3, faults=[faults.kill(rank=2, at="finish_buckets#2")])
def test_a_lost_rank_is_named() -> None:
    group = resolve(None)
    bucket = group.shared_zeros(5000)
    board = group.bucket_board([bucket], [1])
    board.arrive(0)
    board.finish(10.0)
    board.arrive(0)
    with pytest.raises(PeerLostError) as caught:
        board.finish(10.0)
    assert caught.value.ranks == (2,)
