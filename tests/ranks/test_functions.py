"""The torch-shaped functions and the object collectives, beside Gloo on the same inputs."""

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.stores import to_torch


def exercise(d, rank: int, size: int) -> list[torch.Tensor]:
    """Run every function once, with the module that is asked for, and return what came out."""
    x = torch.arange(6, dtype=torch.float32) + 10 * rank
    out = []

    def fresh() -> torch.Tensor:
        return x.clone()

    t = fresh()
    d.all_reduce(t)
    out.append(t)
    t = fresh()
    d.broadcast(t, src=1)
    out.append(t)
    t = fresh()
    d.reduce(t, dst=0)
    out.append(t if rank == 0 else x)
    pieces = [torch.empty(6) for _ in range(size)]
    d.all_gather(pieces, x)
    out += pieces
    pieces = [torch.empty(6) for _ in range(size)] if rank == 1 else None
    d.gather(x, pieces, dst=1)
    out += pieces or []
    t = torch.empty(6)
    d.scatter(t, [x + r for r in range(size)] if rank == 0 else None, src=0)
    out.append(t)
    t = torch.empty(6)
    d.reduce_scatter(t, [x + r for r in range(size)])
    out.append(t)
    outputs = [torch.empty(3) for _ in range(size)]  # Gloo's must all be of one size
    d.all_to_all(outputs, [torch.full((3,), 10.0 * rank + r) for r in range(size)])
    out += outputs
    t = torch.empty(6)
    d.all_to_all_single(t, x[:6])
    out.append(t)
    splits_in = [1, 5] if rank == 0 else [4, 2]
    splits_out = [1, 4] if rank == 0 else [5, 2]
    t = torch.empty(sum(splits_out))
    d.all_to_all_single(t, x, splits_out, splits_in)
    out.append(t)
    d.barrier()
    return out


@pytest.mark.ranks(2, may_leave=["thread", "socket"])
def test_functions_give_what_gloos_give(rank, world_size, store):
    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    ours, theirs = exercise(dist, rank, world_size), exercise(torch_dist, rank, world_size)
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), number
    torch_dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_single_forms_and_their_older_names(rank, world_size):
    x = torch.full((2, 3), float(rank))
    output = torch.empty(6, 3)
    dist.all_gather_into_tensor(output, x)
    assert output[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    work = dist.reduce_scatter_tensor(x, output, async_op=True)
    assert work.wait()
    assert x.tolist() == [[3.0 * rank] * 3] * 2
    assert dist.all_gather_single is dist.all_gather_into_tensor


@pytest.mark.ranks(4)
def test_roots_are_ranks_of_the_world_unless_said_otherwise(rank):
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        with pytest.warns(UserWarning, match="does not belong to"):
            assert dist.all_reduce(torch.ones(1), group=group) is None
        return
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=3, group=group)
    assert tensor.item() == 3.0
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group=group, group_src=0)
    assert tensor.item() == 1.0
    with pytest.raises(dist.UsageError, match="rank 0 of the world is not in the group"):
        dist.broadcast(tensor, src=0, group=group)
    with pytest.raises(dist.UsageError, match="needs a rank of the world"):
        dist.reduce(tensor, dst=1, group_dst=0, group=group)
    with pytest.raises(dist.UsageError, match="a group is a ProcessGroup, got str"):
        dist.barrier("world")


@pytest.mark.ranks(3, backend=["shm", "threads"])
def test_objects_of_any_size_reach_everyone(rank, world_size):
    mine = {"rank": rank, "data": "x" * (100_000 * rank), "tensor": torch.arange(rank), "no": None}
    found = [None] * world_size + ["beyond"]
    dist.all_gather_object(found, mine)
    assert found.pop() == "beyond"
    assert [f["rank"] for f in found] == [0, 1, 2]
    assert [len(f["data"]) for f in found] == [0, 100_000, 200_000]
    gathered = [None] * 4 if rank == 2 else None
    dist.gather_object(rank * 10, gathered, dst=2)
    assert gathered == ([0, 10, 20, None] if rank == 2 else None)
    with pytest.raises(ValueError, match="an entry for each of 3 ranks, got 2"):
        dist.all_gather_object([None] * 2, mine)
    objects = ["a", {"b": 1}, None] if rank == 1 else [0, 0, 0]
    dist.broadcast_object_list(objects, src=1)
    assert objects == ["a", {"b": 1}, None]
    output = [None]
    dist.scatter_object_list(output, ["x", "y", "z"] if rank == 0 else None)
    assert output == ["xyz"[rank]]


@pytest.mark.ranks(2)
def test_object_that_cannot_be_pickled_fails_on_every_rank(rank):
    bad = (lambda: None) if rank == 1 else "good"
    with pytest.raises(dist.UsageError, match="object of rank 1 could not be pickled"):
        dist.all_gather_object([None, None], bad)
    with pytest.raises(dist.UsageError, match="could not be pickled"):
        dist.broadcast_object_list([bad], src=1)
    with pytest.raises(dist.UsageError, match="object for rank 0 could not be pickled"):
        dist.scatter_object_list([None], [bad, "good"], src=1)
    with pytest.raises(dist.UsageError, match="an entry for each of 2 ranks, got 1"):
        dist.all_gather_object([None], 1)
    with pytest.raises(TypeError, match=r"broadcast_object_list needs a list, got tuple: \(1,\)"):
        dist.broadcast_object_list((1,), src=1)
    dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_and_splits_that_are_no_numbers_are_refused():
    tensor = torch.ones(4)
    for wrong in ("0", 0.0, None):
        with pytest.raises((TypeError, ValueError)) as caught:
            dist.broadcast(tensor, group_src=wrong)
        assert repr(wrong) in str(caught.value)
    for wrong in ([2.0, 2.0], "22"):
        with pytest.raises(TypeError, match="output_splits are ints, got"):
            dist.all_to_all_single(tensor.clone(), tensor, wrong, [2, 2])
    dist.all_to_all_single(
        tensor.zero_(), torch.ones(4), torch.tensor([2, 2]), torch.tensor([2, 2])
    )
    assert tensor.tolist() == [1.0] * 4
    dist.all_to_all_single(tensor.zero_(), torch.ones(4), [], [])
    assert tensor.tolist() == [1.0] * 4
    dist.barrier()


@pytest.mark.ranks(2)
def test_autograd_counts_no_result_as_a_change():
    leaf = torch.ones(2, requires_grad=True)
    gaps = torch.ones(4)[::2]
    versions = leaf._version, gaps._version
    dist.all_reduce(leaf)
    dist.all_reduce(gaps)
    dist.all_reduce_coalesced([leaf, gaps])
    assert (leaf.tolist(), gaps.tolist()) == ([4.0, 4.0], [4.0, 4.0])
    assert (leaf._version, gaps._version) == versions


@pytest.mark.ranks(2)
def test_lists_of_objects_that_differ_in_length_are_a_mismatch_on_every_rank(rank, group):
    with pytest.raises(dist.MismatchError, match=r"test_functions\.py"):
        dist.broadcast_object_list(["a", "b"][: rank + 1], 0)
