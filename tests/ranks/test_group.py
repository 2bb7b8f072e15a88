"""Groups on real ranks: the results of the collectives, and what a group's life looks like."""

import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync import _native
from gradsync.testing.conformance import check_backend, check_group

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


@pytest.mark.ranks(1, 2, 3, 4, backend=["shm", "threads"])
def test_group_conforms(group):
    check_group(group)


def test_backend_that_returns_nonsense_does_not_conform():
    from gradsync.backends.threads import ThreadsBackend
    from gradsync.backends.work import DoneWork

    class Lazy(ThreadsBackend):
        def submit(self, call):
            return DoneWork([call.buffer.owner])

    with pytest.raises(AssertionError, match=r"fails (all_reduce|broadcast)_is_right"):
        check_backend(Lazy.make, sizes=(2,))


@pytest.mark.ranks(2, may_leave=["thread", "socket"])  # Gloo's own go when they like
def test_all_reduce_gives_what_gloo_gives(rank, world_size, store):
    """The same inputs through gradsync and through Gloo; small integers are exact in any type."""
    from gradsync.stores import to_torch

    torch_dist.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=world_size)
    for dtype in DTYPES:
        for name in OPS:
            if name in ("BAND", "BOR", "BXOR") and dtype.is_floating_point:
                continue
            if name == "AVG" and not dtype.is_floating_point:
                continue
            for count in (0, 1, 17, 5000, 300_000):
                generator = torch.Generator().manual_seed(100 + rank)
                ours = torch.randint(1, 5, (count,), generator=generator).to(dtype)
                theirs = ours.clone()
                dist.all_reduce(ours, dist.ReduceOp[name])
                torch_dist.all_reduce(theirs, getattr(torch_dist.ReduceOp, name))
                assert torch.equal(ours, theirs), (dtype, name, count)
    torch_dist.destroy_process_group()


@pytest.mark.ranks(4)
def test_sums_have_the_same_bits_on_every_rank_and_in_every_run(rank, world_size):
    inputs = [
        torch.randn(70_001, generator=torch.Generator().manual_seed(r)) for r in range(world_size)
    ]
    expected = inputs[0].clone()
    for other in inputs[1:]:
        expected += other  # in rank order
    for count in (5, 3000, 70_001):
        for _ in range(3):
            tensor = inputs[rank][:count].clone()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected[:count])


@pytest.mark.ranks(2)
def test_scalars_views_and_leaves(rank, world_size):
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar.item() == world_size - 1
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [float(world_size)] * 3
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor, got list"):
        dist.all_reduce([1, 2])
    with pytest.raises(dist.UsageError, match="dense CPU tensors"):
        dist.broadcast(torch.eye(2).to_sparse(), src=0)
    with pytest.raises(dist.UsageError, match=r"rank 7 of the world is not in the group"):
        dist.broadcast(torch.ones(1), src=7)
    with pytest.raises(dist.UsageError, match="needs a rank of the world"):
        dist.broadcast(torch.ones(1))


@pytest.mark.ranks(2)
def test_lazy_views_are_taken_at_their_value(rank):
    tensor = torch.tensor([1 + 2j]).conj() if rank == 0 else torch.zeros(1, dtype=torch.complex64)
    dist.broadcast(tensor, src=0)
    assert tensor.item() == 1 - 2j
    tensor = torch._neg_view(torch.arange(3.0) * (rank + 1))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [0.0, -1.0, -2.0]


@pytest.mark.ranks(2)
def test_second_thread_does_not_wait_for_ever_behind_the_first(rank, group):
    if rank == 1:
        time.sleep(0.6)
        group.barrier()
        group.all_reduce(torch.ones(1), timeout=20)
        return
    first = threading.Thread(target=group.barrier)
    first.start()
    time.sleep(0.1)
    with pytest.raises(dist.CollectiveTimeout, match="another thread of this rank"):
        group.all_reduce(torch.ones(1), timeout=0.1)
    first.join()
    group.all_reduce(torch.ones(1), timeout=20)  # nothing was announced, so nothing is broken


@pytest.mark.ranks(2)
def test_hooks_see_every_call_and_cannot_stop_it(group, caplog):
    seen = []
    handle = group.hooks.add_before(lambda call: seen.append(call.op.name))
    group.hooks.add_after(lambda call: 1 / 0)
    dist.barrier()
    handle.remove()
    dist.barrier()
    assert seen == ["barrier"]
    assert "raised on barrier and was removed" in caplog.text


@pytest.mark.ranks(2, group=False)
def test_initialise_again_and_again(rank, world_size, store):
    for _ in range(20):
        dist.init_process_group(store=store, rank=rank, world_size=world_size)
        with pytest.raises(dist.UsageError, match="initialised already"):
            dist.init_process_group()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world_size
        dist.destroy_process_group()
    with pytest.raises(dist.UsageError, match="not initialised"):
        dist.barrier()


@pytest.mark.ranks(2, group=False)
def test_nothing_is_left_after_a_hundred_groups(rank, world_size, store):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mappings() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:gradsync" in line for line in file)

    gc.collect()  # what an earlier test of this process left to the collector
    before = descriptors(), mappings(), threading.active_count()
    for _ in range(100):
        dist.init_process_group(store=store, rank=rank, world_size=world_size)
        dist.barrier()
        dist.destroy_process_group()
    assert (descriptors(), mappings(), threading.active_count()) == before


@pytest.mark.ranks(2, group=False)
def test_store_of_torch_is_taken(rank, world_size, store):
    port = store.get("port") if rank else None
    server = torch_dist.TCPStore(
        "127.0.0.1", int(port or 0), is_master=rank == 0, wait_for_workers=False
    )
    store.set("port", str(server.port))
    dist.init_process_group(store=server, rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()
    store.barrier("end", world_size)  # rank 0 serves, so it goes last


def test_world_of_one_needs_nothing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "shm")
    check_group(dist.group.world.default_group())
    dist.destroy_process_group()


def test_unknown_backend_and_variable_are_refused(monkeypatch):
    with pytest.raises(dist.BackendUnavailable, match="'gloo' is not available"):
        dist.init_process_group("gloo")
    monkeypatch.setenv("GRADSYNC_TOKN", "typo")
    with pytest.raises(dist.UsageError, match="GRADSYNC_TOKN"):
        dist.init_process_group()


def ports_of(pid: int) -> list[str]:
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    listening = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    listening.append(fields[1])
    return listening


@pytest.mark.ranks(2, group=False)
def test_no_port_is_open_on_one_host(rank, world_size, store, monkeypatch):
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            store.set("port", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", store.get("port").decode())
    dist.init_process_group("shm", init_method="env://")
    assert ports_of(os.getpid()) == []
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_ctrl_c_ends_a_wait(rank, group):
    sub = dist.new_group()
    if rank == 1:
        time.sleep(0.8)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sub.barrier_async()  # never ends, and so keeps those waiting who destroy the group
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group(sub)
    assert sub.is_closed()
    timer.join()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.barrier()
    assert time.monotonic() - start < 0.4
    timer.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match=r"a signal .* interrupted a call"):
            group.barrier()


@pytest.mark.ranks(2)
def test_ctrl_c_ends_the_first_wait_for_a_call_in_flight(rank, group):
    sub = dist.new_group()
    if rank == 1:
        time.sleep(0.6)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work = sub.all_reduce_async(torch.ones(3))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()


def test_shortage_of_memory_is_an_error_of_the_first_call():
    sessions = _native.local_sessions(2, 1 << 40)  # staging space that no machine has
    failures: list[str] = []

    def body(session: _native.Session) -> None:
        session.enter(20)
        with pytest.raises(_native.StatusError, match="no room for") as caught:
            session.barrier(20)
        failures.append(caught.value.args[0])

    threads = [threading.Thread(target=body, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "no_space" in failures
    assert len(failures) == 2
