"""Groups on real processes: the results of the collectives, and what a group's life looks like."""

import os

import pytest
import torch

import gradsync as dist

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"]
SIZES = [0, 1, 17, 5000, 300_000]


def sample(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 5, (count,), generator=generator).to(dtype)


def compare_with_gloo(rank: int, size: int) -> None:
    """The same inputs through gradsync and through Gloo; small integers add exactly in any type."""
    import torch.distributed as torch_dist

    dist.init_process_group()
    torch_dist.init_process_group("gloo", rank=rank, world_size=size)
    for dtype in DTYPES:
        for name in OPS:
            if name in ("BAND", "BOR", "BXOR") and dtype.is_floating_point:
                continue
            if name == "AVG" and not dtype.is_floating_point:
                continue
            for count in SIZES:
                ours, theirs = sample(rank, count, dtype), sample(rank, count, dtype)
                dist.all_reduce(ours, dist.ReduceOp[name])
                torch_dist.all_reduce(theirs, getattr(torch_dist.ReduceOp, name))
                assert torch.equal(ours, theirs), (dtype, name, count)
    torch_dist.destroy_process_group()
    dist.destroy_process_group()


def test_all_reduce_gives_what_gloo_gives():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    try:
        dist.spawn(compare_with_gloo, (2,), nprocs=2)
    finally:
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def walk_through(rank: int, size: int) -> None:
    dist.init_process_group()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_backend() == "shm"

    # Broadcast from every root, at sizes that take one chunk and many.
    for root in range(size):
        for count in SIZES:
            tensor = torch.full((count,), float(rank))
            dist.broadcast(tensor, src=root)
            assert torch.equal(tensor, torch.full((count,), float(root)))

    # A tensor with gaps: only its own elements take part.
    base = torch.full((6, 4), float(rank + 1))
    dist.all_reduce(base[:, 1])
    total = size * (size + 1) / 2
    assert torch.equal(base[:, 1], torch.full((6,), total))
    assert torch.equal(base[:, 0], torch.full((6,), float(rank + 1)))

    # Zero-dimensional, complex, bool; a leaf that wants gradients.
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar.item() == size - 1
    number = torch.tensor([complex(rank, 1)])
    dist.all_reduce(number)
    assert number.item() == complex(sum(range(size)), size)
    flag = torch.tensor([rank == 0, False])
    dist.all_reduce(flag)
    assert flag.tolist() == [True, False]
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [float(size)] * 3

    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    assert work.wait()
    assert work.is_success()
    assert work.result()[0].tolist() == [float(size)] * 2
    dist.barrier()

    # Mistakes are found before anything is sent, so the group stays good.
    with pytest.raises(dist.UsageError, match=r"no rank 7 in the group 'world' of \d ranks"):
        dist.broadcast(torch.ones(1), src=7)
    with pytest.raises(dist.UsageError, match="src or group_src"):
        dist.broadcast(torch.ones(1))
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor, got list"):
        dist.all_reduce([1, 2])
    with pytest.raises(dist.UsageError, match="not defined"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
    with pytest.raises(dist.UsageError, match="initialised already"):
        dist.init_process_group()
    seen = []
    handle = dist.group.world.default_group().hooks.add_before(
        lambda call: seen.append(call.op.name)
    )
    dist.barrier()
    handle.remove()
    dist.barrier()
    assert seen == ["barrier"]
    dist.destroy_process_group()

    # Again and again in the same processes, on the same store.
    for _ in range(5):
        dist.init_process_group()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == size
        dist.destroy_process_group()
    with pytest.raises(dist.UsageError, match="not initialised"):
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_walk_through_the_life_of_a_group(size):
    dist.spawn(walk_through, (size,), nprocs=size)


def test_world_of_one_needs_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    walk_through(0, 1)
