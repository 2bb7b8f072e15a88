"""Worlds as objects, backends of others, the end of groups, debug levels, monitored barriers."""

import logging
import os
import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import gradsync as dist
from gradsync.backends.shm import ShmBackend
from gradsync.testing.threads import run_threads


@pytest.mark.ranks(3, group=False)
def test_a_process_is_in_several_worlds_at_once(rank, store):
    everybody = dist.create_world(store=dist.PrefixStore("a", store), rank=rank, world_size=3)
    assert not dist.is_initialized()
    pair = None
    if rank != 1:
        place = {0: 1, 2: 0}[rank]  # another order
        pair = dist.create_world(store=dist.PrefixStore("b", store), rank=place, world_size=2)
    dist.init_process_group(store=dist.PrefixStore("c", store), rank=rank, world_size=3)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=everybody)
    if pair is not None:
        dist.all_reduce(ones, group=pair)
        assert (pair.rank(), pair.size()) == ({0: 1, 2: 0}[rank], 2)
    dist.all_reduce(ones)
    assert ones.item() == 15
    # Sub-groups of a world that is not the default one, and parts of those.
    some = dist.split_group(everybody, [[0, 2]])
    if rank == 1:
        assert some is None
    else:
        assert everybody.children == [some]
        alone = dist.split_group(some, [[0], [1]])
        assert alone in everybody.children
        assert dist.get_process_group_ranks(alone) == [rank]
        dist.barrier(group=some)
    dist.destroy_process_group(everybody)
    assert dist.is_initialized()
    if rank != 1:
        assert some.is_closed()
    for gone in (everybody, some):
        if rank == 1 and gone is some:
            continue
        with pytest.raises(dist.UsageError, match="has been destroyed already"):
            dist.destroy_process_group(gone)
    if pair is not None:
        pair.barrier()
        pair.close()
    dist.barrier()
    dist.destroy_process_group()


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def await_threads(count: int) -> None:
    """Wait until this process has so many threads: one that begins or ends takes a moment."""
    deadline = time.monotonic() + 10
    while count_threads() != count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.ranks(2, group=False)
def test_worlds_that_are_dropped_give_their_threads_back(rank, store):
    for _ in range(2):  # as many threads as rest in between
        dist.create_world(store=store, rank=rank, world_size=2).barrier()
    time.sleep(0.1)  # until they do
    worlds = [dist.create_world(store=store, rank=rank, world_size=2) for _ in range(6)]
    together = count_threads()
    worlds[-1].barrier()
    worlds.clear()
    await_threads(together - 4)  # six had one each, and two rest


@pytest.mark.ranks(2)
def test_abort_ends_a_group_for_everyone(rank):
    sub = dist.new_group()
    if rank == 0:
        time.sleep(0.1)
        dist.abort_process_group(sub, "enough")
        assert sub.is_closed()
    else:
        start = time.monotonic()
        with pytest.raises(dist.AbortedError, match="rank 0 aborted the group: enough"):
            dist.barrier(group=sub)
        assert time.monotonic() - start < 1
    dist.barrier()  # the world is well
    if rank == 0:
        dist.abort_process_group(reason="all of it")
        assert not dist.is_initialized()
    else:
        with pytest.raises(dist.AbortedError, match="all of it"):
            dist.barrier()


# -- backends of others ---------------------------------------------------------------------------


class Foreign:
    """An engine as somebody else might write it."""

    def __init__(self, store, rank, size, options):
        self.name = "foreign"
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.calls = []
        self.closed = False

    def submit(self, call):
        self.calls.append(call.op.name)
        self.store.add("calls", 1)
        return dist.Work()

    def abort(self, reason):
        self.reason = reason

    def leave(self, note=""):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def unregister(monkeypatch):
    backend = dist.Backend
    for name in ("backend_list", "default_device_backend_map", "backend_capability", "_plugins"):
        monkeypatch.setattr(backend, name, getattr(backend, name).copy())
    yield
    for name in ("FOREIGN", "EXTENDED", "EMPTY"):
        if hasattr(backend, name):
            delattr(backend, name)


@pytest.mark.ranks(2, group=False)
def test_registered_backend_carries_groups(rank, store, unregister):
    def extended(options, pg_options):
        size = options.group_size
        return Foreign(options.store, options.group_rank, size, (options, pg_options))

    def plain(store, rank, size, timeout):
        assert timeout <= timedelta(seconds=20)
        return Foreign(store, rank, size, None)

    dist.Backend.register_backend("Foreign", plain, devices="cpu")
    dist.Backend.register_backend("extended", extended, extended_api=True, devices=["cpu", "abc"])
    dist.Backend.register_backend("empty", lambda *_: object(), devices=["cpu"])
    with pytest.raises(RuntimeError, match="there is a backend 'foreign' already"):
        dist.Backend.register_backend("foreign", plain, devices="cpu")
    assert dist.Backend.FOREIGN == "foreign" in dist.Backend.backend_list
    assert dist.get_default_backend_for_device("abc:0") == "extended"
    assert dist.get_default_backend_for_device(torch.device("cpu")) == "shm"
    assert dist.is_backend_available("cpu:foreign")

    dist.init_process_group("FOREIGN", store=store, rank=rank, world_size=2, timeout=20)
    assert (dist.get_backend(), dist.get_backend_config()) == ("foreign", "cpu:foreign")
    dist.all_reduce(torch.ones(2))
    assert dist.group.WORLD.backend.calls == ["all_reduce"]
    with pytest.raises(dist.UsageError, match="which is no backend: it lacks submit, abort"):
        dist.new_group(backend="empty")
    sub = dist.new_group(backend="cpu:extended", pg_options={"a": 1})
    options, given = sub.backend.options
    assert (options.group_rank, options.group_size, given) == (rank, 2, {"a": 1})
    assert options.global_ranks_in_group == [0, 1]
    shared = dist.new_group(backend="shm")  # and back to shared memory
    ones = torch.ones(1)
    shared.all_reduce(ones)
    assert ones.item() == 2
    sub.abort("why not")
    assert sub.backend.reason == "why not"
    engine = sub.backend
    dist.destroy_process_group()
    assert engine.closed


def test_names_of_backends(unregister):
    assert dist.Backend("GLOO") == torch_dist.Backend("GLOO") == dist.Backend.GLOO
    assert type(dist.Backend("Foo")) is str
    for wrong in (3, None):
        with pytest.raises(ValueError, match="named by a string"):
            dist.Backend(wrong)
    for text in ("cpu:shm,cpu:shm", "cpu:shm,", "cpu:shm:x", ":shm", "cpu:"):
        with pytest.raises(ValueError, match=r"twice|not a pair"):
            dist.BackendConfig(text)
    assert dist.BackendConfig("cpu:SHM").get_device_backend_map() == {"cpu": "shm"}
    with pytest.warns(UserWarning, match="registered without devices"):
        dist.Backend.register_backend("foreign", Foreign)
    with pytest.raises(ValueError, match="must be an identifier"):
        dist.Backend.register_backend("no:good", Foreign, devices="cpu")
    with pytest.raises(ValueError, match="needs a function"):
        dist.Backend.register_backend("good", 3, devices="cpu")


def test_bad_arguments_are_refused_before_anybody_is_met():
    for arguments, match in (
        ({"backend": "nccl"}, "'nccl' is not available"),
        ({"backend": "cpu:shm,cuda:gradsync"}, "a group runs on one backend"),
        ({"backend": 3}, "named by a string"),
        ({"device_id": 0}, "device_id binds a group to an accelerator"),
        ({"timeout": "soon"}, "timedelta or a number"),
        ({"timeout": -1}, "must not be negative"),
    ):
        with pytest.raises((ValueError, TypeError, dist.BackendUnavailable), match=match):
            dist.init_process_group(**arguments)
        assert not dist.is_initialized()


@pytest.mark.ranks(2, group=False)
def test_zero_is_no_limit_everywhere(rank, store):
    dist.init_process_group(store=store, rank=rank, world_size=2, timeout=0)
    if rank == 0:
        time.sleep(0.2)
    dist.group.WORLD.barrier(timeout=timedelta(0))
    work = dist.barrier(async_op=True)
    assert work.wait(timedelta(0))
    dist.destroy_process_group()


# -- monitored_barrier ----------------------------------------------------------------------------


@pytest.mark.ranks(4, backend=["shm", "threads"])
@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_who_is_missing(rank, wait_all):
    dist.monitored_barrier()
    limit = timedelta(seconds=0.3)
    if rank in (1, 3):
        time.sleep(0.8)
        with pytest.raises(dist.AbortedError):
            dist.monitored_barrier()
        return
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=limit, wait_all_ranks=wait_all)
    text = str(caught.value)
    if rank == 0:
        missing = "ranks 1, 3" if wait_all else "rank 1"
        assert text.startswith(f"{missing} did not come to monitored_barrier within 300 ms"), text
        assert caught.value.ranks == ((1, 3) if wait_all else (1,))
    else:
        assert "the error of rank 0 names those that are missing" in text
    assert "stands at" in str(caught.value.__cause__)


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_monitored_barrier_does_not_blame_ranks_for_what_broke_the_group_before(rank):
    if rank == 1:
        time.sleep(0.6)
        return
    with pytest.raises(dist.CollectiveTimeout):
        dist.group.WORLD.all_reduce(torch.ones(1), timeout=0.3)
    with pytest.raises(dist.CollectiveTimeout, match="broken since an earlier call failed: all_re"):
        dist.monitored_barrier()


def test_monitored_barrier_takes_what_torch_takes():
    def body(me):
        with pytest.raises(TypeError, match="takes a timedelta"):
            dist.monitored_barrier(timeout=3)
        with pytest.warns(UserWarning, match="taken as seconds"):
            dist.monitored_barrier(timeout=3.0)
        with pytest.warns(UserWarning, match="does not belong"):
            dist.monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER)

    (me,) = run_threads(1, body)
    assert me.error is None, me.error


# -- debug levels ---------------------------------------------------------------------------------


@pytest.fixture
def level():
    yield
    dist.set_debug_level(dist.DebugLevel.OFF)
    logging.getLogger("gradsync").setLevel(logging.NOTSET)


def test_levels_come_from_the_environment(monkeypatch, level):
    for own, torchs, expected in (
        ("", "", "OFF"),
        ("", "info", "INFO"),
        ("detail", "INFO", "DETAIL"),
        ("off", "DETAIL", "OFF"),
    ):
        monkeypatch.setenv("GRADSYNC_DEBUG", own)
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", torchs)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel[expected]
    monkeypatch.setenv("GRADSYNC_DEBUG", "loud")
    with pytest.raises(ValueError, match="must be OFF, INFO or DETAIL, got 'loud'"):
        dist.set_debug_level_from_env()
    with pytest.raises(TypeError):
        dist.set_debug_level(2)


@pytest.mark.ranks(2, group=False)
def test_levels_tell_of_groups_and_calls(rank, store, caplog, level):
    def lines_of_a_life(name):
        caplog.clear()
        where = dist.PrefixStore(name, store)
        dist.init_process_group(store=where, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
        dist.destroy_process_group()
        return "\n".join(record.getMessage() for record in caplog.records)

    assert lines_of_a_life("off") == ""
    dist.set_debug_level(dist.DebugLevel.INFO)
    text = lines_of_a_life("info")
    mine = f"gradsync: rank {rank} of group 'world': "
    assert re.fullmatch(
        rf"{mine}formed on shm in \d+ ms, world ranks \[0, 1\]\n{mine}destroyed", text
    )
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    here = r"\S*test_worlds\.py:\d+ in lines_of_a_life"
    assert re.search(rf"{mine}all_reduce\(float32\[3\], MAX\) at {here}", lines_of_a_life("detail"))


def test_shm_is_what_none_means():
    dist.init_process_group(world_size=1)
    assert isinstance(dist.group.WORLD.backend, ShmBackend)
    dist.destroy_process_group()


@pytest.mark.ranks(1)
def test_two_threads_close_a_world(rank):
    for _ in range(100):
        world = dist.create_world(world_size=1)
        together = threading.Barrier(2)

        def close(world=world, together=together):
            together.wait()
            world.close()

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert world.is_closed()
