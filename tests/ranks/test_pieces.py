"""Collectives with a piece per rank: beside Gloo, and when a rank dies or differs."""

import time

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.backends.ops import FINISH_BUCKETS, OPS
from gradsync.testing import faults

COLLECTIVES = [op for op in OPS if op is not FINISH_BUCKETS]  # which has a test of its own
COUNTS = (0, 1, 17, 5000, 300_000)


def pieces(seed: int, counts: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 9, (n,), generator=generator).float() for n in counts]


def like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


@pytest.mark.ranks(2, 3, may_leave=["thread", "socket"])  # Gloo's own go when they like
def test_results_are_those_of_gloo(rank, world_size, group, store):
    from gradsync.stores import to_torch

    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    for count in COUNTS:
        mine = pieces(rank, [count] * world_size)
        for root in range(world_size):
            ours, theirs = mine[0].clone(), mine[0].clone()
            group.reduce(ours, root, dist.ReduceOp.MAX)
            torch_dist.reduce(theirs, root, torch_dist.ReduceOp.MAX)
            assert rank != root or torch.equal(ours, theirs)

            outputs = (like(mine), like(mine)) if rank == root else (None, None)
            group.gather(mine[0], outputs[0], root)
            torch_dist.gather(mine[0], outputs[1], root)
            assert rank != root or all(map(torch.equal, *outputs))

            inputs = mine if rank == root else None
            group.scatter(ours, inputs, root)
            torch_dist.scatter(theirs, inputs, root)
            assert torch.equal(ours, theirs)

        both = like(mine), like(mine)
        group.all_gather(both[0], mine[0])
        torch_dist.all_gather(both[1], mine[0])
        assert all(map(torch.equal, *both))

        uneven = pieces(rank, [count + 3 * r for r in range(world_size)])
        ours, theirs = torch.zeros_like(uneven[rank]), torch.zeros_like(uneven[rank])
        group.reduce_scatter(ours, uneven)
        torch_dist.reduce_scatter(theirs, uneven)
        assert torch.equal(ours, theirs)

        sent = [count + rank + to for to in range(world_size)]
        received = [count + sender + rank for sender in range(world_size)]
        whole = torch.cat(pieces(rank, sent))
        ours, theirs = torch.zeros(sum(received)), torch.zeros(sum(received))
        group.all_to_all_single(ours, whole, received, sent)
        torch_dist.all_to_all_single(theirs, whole, received, sent)
        assert torch.equal(ours, theirs)
    torch_dist.destroy_process_group()


def call(group: dist.ProcessGroup, name: str, count: int) -> None:
    """Make a call of the operation, from rank 0 where it has a root."""
    tensor, size = torch.ones(count), group.size()
    several = [torch.ones(count) for _ in range(size)]
    at_root = several if group.rank() == 0 else None
    calls = {
        "barrier": lambda: group.barrier(),
        "broadcast": lambda: group.broadcast(tensor, 0),
        "all_reduce": lambda: group.all_reduce(tensor),
        "reduce": lambda: group.reduce(tensor, 0),
        "all_gather": lambda: group.all_gather(several, tensor),
        "gather": lambda: group.gather(tensor, at_root, 0),
        "scatter": lambda: group.scatter(tensor, at_root, 0),
        "reduce_scatter": lambda: group.reduce_scatter(tensor, several),
        "all_to_all": lambda: group.all_to_all(several, like(several)),
    }
    calls[name]()


@pytest.mark.ranks(2, 3, faults=[faults.kill(rank=1, at=f"{op.name}#1") for op in COLLECTIVES])
@pytest.mark.parametrize("name", [op.name for op in COLLECTIVES])
def test_rank_killed_at_any_call_is_named(group, name):
    start = time.monotonic()
    with pytest.raises(dist.PeerLostError) as caught:
        call(group, name, 400_000)
    assert caught.value.ranks == (1,)
    assert caught.value.op == name
    assert time.monotonic() - start < 1
    with pytest.raises(dist.PeerLostError):
        group.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [op.name for op in OPS if op.has_count and op.has_data])
def test_another_size_is_a_mismatch_on_every_rank(rank, group, name):
    with pytest.raises(dist.MismatchError) as caught:
        call(group, name, 10 + (rank == 1))
    for count in (10, 11):
        assert f"{name}(float32[{count}]" in str(caught.value)


@pytest.mark.ranks(3)
def test_other_pieces_are_a_mismatch_that_shows_them(rank, group):
    counts = [1, 2, 3] if rank != 1 else [3, 2, 1]
    output = torch.full((counts[rank],), -1.0)
    with pytest.raises(dist.MismatchError, match="rank 0: 1 2 3; rank 1: 3 2 1;") as caught:
        group.reduce_scatter(output, [torch.ones(count) for count in counts])
    assert "reduce_scatter(float32[6 in uneven pieces], SUM)" in str(caught.value)
    assert (output == -1).all()


@pytest.mark.ranks(3)
def test_wrong_expectation_is_a_mismatch_that_names_the_two(rank, group):
    output = torch.full((3,), -1.0)
    received = [1, 1, 1] if rank != 2 else [2, 0, 1]
    expected = "rank 0 sends 1 elements to rank 2, which expects 2; rank 1 sends 1 .* expects 0"
    with pytest.raises(dist.MismatchError, match=expected) as caught:
        group.all_to_all_single(output, torch.ones(3), received, [1, 1, 1])
    assert caught.value.ranks == (0, 1, 2)
    assert (output == -1).all()


@pytest.mark.ranks(2)
def test_leaves_and_scalars(rank, world_size, group):
    leaf = torch.ones(2, requires_grad=True)
    group.reduce(leaf, 0)
    assert leaf.tolist() == ([2.0, 2.0] if rank == 0 else [1.0, 1.0])
    output = torch.zeros(world_size)
    group.all_gather_single(output, torch.tensor(float(rank)))
    assert output.tolist() == [0.0, 1.0]
    scalar = torch.tensor(0.0)
    group.reduce_scatter_single(scalar, torch.arange(2.0))
    assert scalar.item() == 2.0 * rank


@pytest.mark.ranks(3)
def test_uneven_all_gather_that_differs_is_a_mismatch_that_shows_the_sizes(rank, group):
    counts = [1, 2, 3] if rank != 1 else [3, 2, 1]
    outputs = [torch.full((count,), -1.0) for count in counts]
    with pytest.raises(dist.MismatchError, match="rank 0: 1 2 3; rank 1: 3 2 1;") as caught:
        group.all_gather(outputs, torch.ones(counts[rank]))
    assert "all_gather(float32[6 in uneven pieces])" in str(caught.value)
    assert all((output == -1).all() for output in outputs)


@pytest.mark.ranks(2)
def test_even_and_uneven_all_gather_do_not_mix(rank, group):
    outputs = [torch.full((2 + rank * r,), -1.0) for r in range(2)]
    with pytest.raises(dist.MismatchError, match="in uneven pieces"):
        group.all_gather(outputs, torch.ones(2 + rank))
    assert all((output == -1).all() for output in outputs)


@pytest.mark.ranks(2)
def test_own_piece_of_two_sizes_is_found_before_anything_is_sent(rank, group):
    sent, received = ([2, 1], [3, 1]) if rank == 0 else ([1, 2], [1, 2])
    if rank == 0:
        with pytest.raises(dist.UsageError, match="gives itself 2 elements and expects 3"):
            dist.all_to_all([torch.empty(n) for n in received], [torch.ones(n) for n in sent])
        with pytest.raises(dist.UsageError, match="gives itself 2 elements and expects 3"):
            dist.all_to_all_single(torch.empty(4), torch.ones(3), received, sent)
    dist.barrier()
