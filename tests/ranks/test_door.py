"""Ranks of one host that meet at rank 0's door, and what becomes of those that do not fit in."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import gradsync as dist
from gradsync.rendezvous import door
from gradsync.rendezvous.join import slot


@pytest.fixture
def address(rank, group):
    """An address that these ranks alone know."""
    ports = [None]
    if rank == 0:
        ports = [10_000 + os.getpid() % 50_000]
    dist.broadcast_object_list(ports, 0)
    return f"tcp://127.0.0.1:{ports[0]}"


def sum_of_ranks(world):
    total = torch.tensor([float(world.rank())])
    world.all_reduce(total)
    return total.item()


def root_store(world):
    return world.members.store.underlying_store


@pytest.mark.ranks(3)
def test_nobody_needs_the_store_to_meet(rank, address):
    world = dist.create_world(init_method=address, rank=rank, world_size=3)
    assert sum_of_ranks(world) == 3
    assert root_store(world)._connected is None
    assert [e.pid for e in world.members.evidence][rank] == os.getpid()
    world.close()


@pytest.mark.ranks(2)
def test_the_store_is_there_for_whoever_uses_it(rank, address):
    world = dist.create_world(init_method=address, rank=rank, world_size=2)
    if rank == 1:  # at once: rank 0 may still be busy
        world.members.store.set("from", "1")
    assert world.members.store.get("from") == b"1"
    assert root_store(world).check([slot(0, 0), slot(0, 1)])
    world.barrier()
    world.close()


@pytest.mark.ranks(2)
def test_forked_child_leaves_the_store_alone(rank, address):
    """Of its parent, which may be about to start serving it when it forks."""
    world = dist.create_world(init_method=address, rank=rank, world_size=2)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        threads = len(os.listdir("/proc/self/task"))
        try:
            world.members.store.set("from", "child")
        except dist.StoreConnectionError as error:
            is_told = "forked" in str(error)
            os._exit(0 if is_told and len(os.listdir("/proc/self/task")) == threads else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    world.members.store.set(f"from {rank}", "parent")
    world.barrier()
    assert not world.members.store.check(["from"])
    world.barrier()
    world.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_interrupted_when_all_have_met(rank, address, victim, monkeypatch):
    """The other is told, and both can try again though the error is kept."""
    kept = None
    if rank == victim:

        def interrupt(words):
            raise KeyboardInterrupt

        monkeypatch.setattr(door, "_joined", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            dist.create_world(init_method=address, rank=rank, world_size=2)
        monkeypatch.undo()
    else:
        world = dist.create_world(init_method=address, rank=rank, world_size=2)
        with pytest.raises(dist.PeerLostError, match=f"rank {victim}"):
            world.barrier()
        world.close()
    world = dist.create_world(init_method=address, rank=rank, world_size=2)
    assert sum_of_ranks(world) == 1
    world.close()
    del kept, world  # the error has this frame, which has the world


@pytest.mark.ranks(2)
def test_everyone_knows_where_everyone_runs(rank, address, group):
    world = dist.create_world(init_method=address, rank=rank, world_size=2)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    assert [evidence.pid for evidence in world.members.evidence] == pids
    assert len({evidence.boot_id for evidence in world.members.evidence}) == 1
    world.close()


@pytest.mark.ranks(2)
def test_again_and_again_at_one_address(rank, address):
    for _ in range(20):
        world = dist.create_world(init_method=address, rank=rank, world_size=2)
        assert sum_of_ranks(world) == 1
        world.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_late_rank_finds_the_others(rank, address, late):
    if rank == late:
        time.sleep(1.3)  # longer than the door is open
    world = dist.create_world(init_method=address, rank=rank, world_size=2, timeout=30)
    assert sum_of_ranks(world) == 1
    world.close()


@pytest.mark.ranks(3)
def test_one_who_comes_after_all_have_met_is_told_who_has_its_rank(rank, address, group):
    world = None
    if rank < 2:
        world = dist.create_world(init_method=address, rank=rank, world_size=2)
    group.barrier()
    if rank == 2:
        with pytest.raises(dist.RendezvousError, match=r"rank 1 is already taken by pid \d+"):
            dist.create_world(init_method=address, rank=1, world_size=2, timeout=20)
    group.barrier()
    if world is not None:
        assert sum_of_ranks(world) == 1
        world.close()


@pytest.mark.ranks(3)
def test_two_of_one_rank_are_named_on_all(rank, address):
    if rank == 0:
        time.sleep(0.2)  # until both are there
    with pytest.raises(dist.RendezvousError, match="rank 1 is already taken by pid"):
        dist.create_world(init_method=address, rank=min(rank, 1), world_size=3, timeout=20)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("other", [1, 2])
def test_ranks_that_disagree_on_the_size_are_told(rank, address, other):
    size = 4 if rank == other else 3
    with pytest.raises(dist.RendezvousError, match=r"disagree on the world size: 3 say .*4 say"):
        dist.create_world(init_method=address, rank=rank, world_size=size, timeout=20)


@pytest.mark.ranks(2)
def test_missing_rank_is_named(rank, address):
    with pytest.raises(dist.RendezvousError, match=r"only 2 of 3 ranks came .*Missing: 2"):
        dist.create_world(init_method=address, rank=rank, world_size=3, timeout=2)


@pytest.mark.ranks(2)
def test_token_of_another_job_is_refused(rank, address, monkeypatch):
    monkeypatch.setenv("GRADSYNC_TOKEN", f"secret of {rank}")
    expected = "Missing: 1" if rank == 0 else "different token"
    with pytest.raises(dist.RendezvousError, match=expected):
        dist.create_world(init_method=address, rank=rank, world_size=2, timeout=3)


@pytest.mark.ranks(3)
def test_old_world_does_not_use_the_store_of_a_new_one(rank, address, group):
    first = None
    if rank < 2:
        first = dist.create_world(init_method=address, rank=rank, world_size=2)
    if rank == 0:
        first.close()
        first = None
    group.barrier()
    second = None
    if rank != 1:
        second = dist.create_world(init_method=address, rank=min(rank, 1), world_size=2)
        second.members.store.set("key", "of the second")
    group.barrier()
    if rank == 1:
        with pytest.raises(dist.StoreConnectionError, match="another one by now"):
            first.members.store.check(["key"])
        first.close()  # and does not say there that rank 1 has left
    group.barrier()
    if second is not None:
        assert not root_store(second).check([slot(0, 1) + "/left"])
    group.barrier()  # whoever closes says that it has left
    if second is not None:
        second.close()


@pytest.mark.ranks(2)
def test_strangers_at_the_door_do_not_keep_anybody(rank, address, group):
    name = f"\0gradsync/{os.getuid()}-port-{address.rpartition(':')[2]}/door"
    silent = []
    if rank == 1:
        for words in (b"", b"", b"GET / HTTP/1.1\r\n\r\n"):
            while True:
                stranger = socket.socket(socket.AF_UNIX)
                try:
                    stranger.connect(name)
                    break
                except ConnectionRefusedError:  # rank 0 is on its way
                    stranger.close()
            stranger.sendall(words)
            silent.append(stranger)
    world = dist.create_world(init_method=address, rank=rank, world_size=2, timeout=20)
    assert sum_of_ranks(world) == 1
    for stranger in silent:
        stranger.close()
    world.close()


JOIN = """
import sys
import gradsync as dist
dist.init_process_group(init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=3, timeout=60)
dist.barrier()
print("met")
"""


ADDRESS = f"tcp://127.0.0.1:{10_000 + os.getpid() % 50_000}"


def start(rank, script=JOIN):
    command = [sys.executable, "-c", script, ADDRESS, str(rank)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def await_guests(count):
    """Wait until so many are at the door: the kernel lists it, and each connection."""
    with open("/proc/net/unix") as sockets:
        while sockets.read().count(f"{ADDRESS[-5:]}/door") < 1 + count:
            time.sleep(0.005)
            sockets.seek(0)


def all_meet(ranks):
    return [rank.communicate(timeout=60)[0] for rank in ranks] == ["met\n"] * len(ranks)


def test_rank_that_is_killed_at_the_door_can_be_replaced():
    early, zero = start(1), start(0)
    await_guests(1)
    early.send_signal(signal.SIGKILL)
    early.communicate()
    assert all_meet([zero, start(1), start(2)])


def test_rank_0_that_is_killed_at_the_door_can_be_replaced():
    guest, zero = start(1), start(0)
    await_guests(1)
    zero.send_signal(signal.SIGKILL)
    zero.communicate()
    assert all_meet([start(0), guest, start(2)])


def test_guests_wait_for_a_rank_0_that_is_stopped():
    zero, guests = start(0), [start(1)]
    await_guests(1)
    zero.send_signal(signal.SIGSTOP)
    guests.append(start(2))
    await_guests(2)
    time.sleep(1.5)  # longer than the door is open
    zero.send_signal(signal.SIGCONT)
    assert all_meet([zero, *guests])


def test_interrupted_rank_0_can_try_again_though_its_error_is_kept():
    again = JOIN.replace(
        "dist.init",
        """try:
    dist.init_process_group(init_method=sys.argv[1], rank=0, world_size=3, timeout=60)
except KeyboardInterrupt as error:
    kept = error
dist.init""",
        1,
    )
    zero, guest = start(0, again), start(1)
    await_guests(1)
    zero.send_signal(signal.SIGINT)
    assert all_meet([zero, guest, start(2)])
