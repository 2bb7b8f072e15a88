"""torch.distributed on gradsync gives what it gives on Gloo, operation by operation."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from beside_gloo import assert_same_as_on_gloo, run_on
from torch.distributed.device_mesh import init_device_mesh

from gradsync.stores import to_torch
from gradsync.torch_backend.flight import dump_flight_record


def collectives(rank, size):
    x = torch.arange(6, dtype=torch.float32).reshape(3, 2) + 10 * rank
    out = []

    def keep(tensor, work=None):
        if work is not None:
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
        out.append(tensor)

    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        t = x.clone()
        dist.all_reduce(t, op=getattr(dist.ReduceOp, op))
        keep(t)
    for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.complex64):
        t = x.to(dtype)
        keep(t, dist.all_reduce(t, async_op=True))
    ints = torch.tensor([rank + 4, 7])
    dist.all_reduce(ints, op=dist.ReduceOp.BXOR)
    keep(ints)
    t = x.clone()
    keep(t, dist.broadcast(t, src=1, async_op=True))
    t = x.clone()
    dist.reduce(t, dst=1)
    keep(t if rank == 1 else x)
    pieces = [torch.empty(3, 2) for _ in range(size)]
    work = dist.all_gather(pieces, x, async_op=True)
    assert [t.tolist() for t in work.get_future().wait()] == [t.tolist() for t in pieces]
    out.extend(pieces)
    for shape in ((3 * size, 2),):
        whole = torch.empty(shape)
        keep(whole, dist.all_gather_single(whole, x, async_op=True))
    # An input with gaps, beside what Gloo makes of a dense one.
    whole = torch.empty(2 * size, 3)
    across = x.t() if dist.get_backend() == "gradsync" else x.t().contiguous()
    keep(whole, dist.all_gather_single(whole, across, async_op=True))
    pieces = [torch.empty(3, 2) for _ in range(size)] if rank == 1 else None
    dist.gather(x, pieces, dst=1)
    out.extend(pieces or [])
    t = torch.empty(3, 2)
    dist.scatter(t, [x + r for r in range(size)] if rank == 0 else None, src=0)
    keep(t)
    t = torch.empty(3, 2)
    dist.reduce_scatter(t, [x + r for r in range(size)])
    keep(t)
    whole = torch.arange(4.0 * size) + rank
    t = torch.empty(4)
    dist.reduce_scatter_single(t, whole, op=dist.ReduceOp.MAX)
    keep(t)
    t = torch.empty(3 if rank == 0 else 5, 2)
    given, taken = ([1, 2], [1, 2]) if rank == 0 else ([2, 3], [2, 3])
    dist.all_to_all_single(t, torch.ones(sum(given), 2) * rank, taken, given)
    keep(t)
    pieces = [torch.empty(3, 2) for _ in range(size)]
    dist.all_to_all(pieces, [x + r for r in range(size)])
    out.extend(pieces)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    keep(torch.tensor([entry["rank"] for entry in objects]))
    entry = [rank]
    dist.broadcast_object_list(entry, src=1)
    keep(torch.tensor(entry))
    return out


def several_at_once(rank, size):
    group = dist.group.WORLD
    tensors = [torch.full((n + 1,), float(rank + n)) for n in range(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    outputs = [torch.empty(4 * size), torch.empty(2 * size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_single(output, output[: len(output) // size] * 0 + rank)
    manager.wait()
    parts = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_single(part, torch.arange(len(part) * size) + float(rank))
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    group.allgather_coalesced(lists, [torch.full((2,), 1.0 + rank), torch.ones(1)]).wait()
    return [*tensors, *outputs, *parts, *(t for each in lists for t in each)]


def futures(rank, size):
    def total(tensor):
        return dist.all_reduce(tensor, async_op=True).get_future()

    def raises(done):
        raise ValueError("not today")

    def polled(future):  # the callbacks run in the group's worker
        while not future.done():
            time.sleep(0.001)
        return future.value()

    x = torch.arange(3.0) + rank
    waits = polled(total(x * 1).then(lambda done: total(done.value()[0]).wait()[0]))
    chained = polled(total(x * 1).then(lambda done: total(done.value()[0]).then(first).wait()))
    with pytest.raises(RuntimeError, match="not today"):
        total(x * 1).then(raises).then(first).wait()
    lists = [[torch.empty(3), torch.empty(1)] for _ in range(size)]
    gathered = dist.all_gather_coalesced(lists, [x, x[:1]], async_op=True).wait()
    return [waits, chained, *(each for entry in gathered for each in entry)]


def first(done):
    return done.value()[0]


def functional_collectives(rank, size):
    x = torch.arange(4.0) + rank
    group = dist.group.WORLD
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_single(x, 0, group),
        functional.reduce_scatter_single(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "sum", group),
        functional.all_reduce(functional.all_reduce(x, "sum", group), "max", group),
    ]
    return [tensor + 0 for tensor in found]  # which waits


def groups(rank, size):
    out = []
    alone = dist.new_group([rank], use_local_synchronization=True)
    backwards = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    for group in (alone, backwards):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        whole = torch.empty(dist.get_world_size(group))
        dist.all_gather_single(whole, torch.tensor([float(rank)]), group=group)
        out += [x, whole, torch.tensor([dist.get_rank(group)])]
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("across", "within"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.get_group("across"))
    dist.destroy_process_group(backwards)
    out.append(x)
    return out


def parts_of_the_world(rank, size):
    out = []
    for ranks in ([0], range(size), range(size)):  # the same ones again are another group
        part = dist.group.WORLD.split_group(list(ranks))
        if part is None:
            out.append(None)
            continue
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=part)
        out.append((x.item(), part.rank(), part.size()))
    return out


def messages(rank, size):
    other = 1 - rank
    big, small = torch.arange(300_000.0) + rank, torch.tensor([rank + 5])
    got = [torch.empty_like(big), torch.empty_like(small), torch.empty(2), torch.empty(2)]
    if rank == 0:
        dist.send(big, dst=1, tag=3)
        assert dist.recv(got[0], src=1) == 1
    else:
        assert dist.recv(got[0], tag=3) == 0  # from whoever it is
        dist.send(big, dst=0)
    sent = [dist.isend(torch.full((2,), float(tag)), other, tag=tag) for tag in (8, 9)]
    taken = [dist.irecv(got[2 + at], other, tag=tag) for at, tag in enumerate((9, 8))]
    for work in (*taken, *sent):
        work.wait()
    batch = [dist.P2POp(dist.irecv, got[1], other), dist.P2POp(dist.isend, small, other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    anyone = torch.empty(1)
    work = dist.irecv(anyone)
    dist.send(torch.tensor([float(rank)]), other)
    work.wait()
    entry = [None]
    if rank == 0:
        dist.send_object_list(["hello"], dst=1)
    else:
        dist.recv_object_list(entry, src=0)
        assert entry == ["hello"]
    return [*got, anyone]


def sparse_sums(rank, size):
    places = torch.tensor([[rank, rank + 1], [0, 1]])
    x = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (4, 2), check_invariants=True)
    dist.all_reduce(x)
    return [x.to_dense()]


# Work that nobody waits for stays registered in torch, and keeps Gloo's sockets open.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment", "socket"])
@pytest.mark.parametrize(
    "program",
    [
        collectives,
        several_at_once,
        futures,
        functional_collectives,
        groups,
        messages,
        sparse_sums,
    ],
)
def test_results_equal_those_on_gloo(store, rank, world_size, program):
    assert_same_as_on_gloo(store, rank, world_size, program)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment"])
def test_group_objects_can_be_split(store, rank, world_size):
    # Not beside Gloo, on which the second group of the same ranks never forms now and then.
    found = run_on("gradsync", store, rank, world_size, parts_of_the_world)
    both = (3.0, rank, 2)
    assert found == [(1.0, 0, 1) if rank == 0 else None, both, both]


def identity(rank, size):
    group = dist.group.WORLD
    assert dist.get_backend() == "gradsync"
    assert group.name() == "gradsync"
    assert (group.rank(), group.size()) == (rank, size)
    assert group.group_name == dist.group.WORLD.group_name != ""
    assert group.group_desc == "default_pg"
    assert [device.type for device in group._device_types] == ["cpu"]
    backend = group._get_backend(torch.device("cpu"))
    assert (backend.name(), backend.rank()) == ("gradsync", rank)
    assert not backend.supports_coalescing
    assert group.group.is_shared(backend.allocate_tensor(5, dtype=torch.float32, device="cpu"))
    # Programs may call the group itself, with the options spelled out.
    x = torch.tensor([rank + 1.0])
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    assert x.item() == size
    group.broadcast(x.zero_() + rank, root=1).wait()
    group.barrier().wait()
    patient = dist.new_group(timeout=timedelta(0))  # no limit
    dist.all_reduce(x, group=patient)
    dist.destroy_process_group(patient)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(x)
    assert "gradsync:all_reduce" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment"])
def test_group_says_what_it_is_and_starts_again_on_the_same_store(store, rank, world_size):
    for _ in range(2):
        run_on("gradsync", store, rank, world_size, identity)


def two_devices(rank, size):
    group = dist.group.WORLD
    kinds = {device.type for device in group._device_types}
    assert kinds == {"cpu", "cuda"}
    assert type(group._get_backend(torch.device("cuda"))).__name__ == "ProcessGroupGloo"
    x = torch.tensor([1.0])
    dist.all_reduce(x)
    assert x.item() == size
    dist.barrier()
    with pytest.raises(ValueError, match="knows CPUs only"):
        group.split_group([0, 1])
    with pytest.raises(ValueError, match=r"different ranks of its group, got \[0, 7\]"):
        group.split_group([0, 7])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment"])
def test_other_devices_keep_their_own_backends(store, rank, world_size):
    for devices in ("cpu:gradsync,cuda:gloo", "cuda:gloo,cpu:gradsync"):
        run_on(devices, store, rank, world_size, two_devices)


def tensors_without_data(rank, size):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def calls(device):
        x = torch.ones(2, 3, device=device)
        whole = torch.empty(2 * size, 3, device=device)
        dist.all_reduce(x)
        assert dist.broadcast(x, 0, async_op=True).wait()
        dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter_single(x, whole)
        dist.all_to_all_single(whole, torch.empty_like(whole))
        return whole.shape

    with FakeTensorMode():
        assert calls("cpu") == (2 * size, 3)
    assert calls("meta") == (2 * size, 3)
    for name in ("all_gather_single_coalesced", "reduce_scatter_single_coalesced"):
        one = torch.empty(2, device="meta")
        with pytest.raises(NotImplementedError, match="Meta"):  # torch has no such kernel
            getattr(dist.group.WORLD, name)([one], [one])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment"])
def test_what_has_no_data_is_left_to_torch(store, rank, world_size):
    run_on("gradsync", store, rank, world_size, tensors_without_data)


def recorded_calls(rank, size):
    group = dist.new_group([1, 0], sort_ranks=False)
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    exchange = dist.send if rank == 0 else dist.recv
    exchange(torch.ones(1), 1 - rank)  # the first message right after the first collective
    for _ in range(2):
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.all_gather_single(torch.empty(2 * size), torch.ones(2), group=group)
    parts = list(torch.ones(size, 3))
    dist.all_gather(parts, parts[rank])
    dist.reduce_scatter(torch.empty(3), parts)
    sizes = [1 + rank] * size  # what ranks give and get may differ
    dist.all_to_all_single(torch.ones(3), torch.ones(sum(sizes)), [1, 2], sizes)
    dist.all_reduce(torch.eye(3).to_sparse())
    dist.gather(torch.ones(2), list(torch.ones(size, 2)) if rank == 0 else None)
    dist.scatter(torch.ones(2), list(torch.ones(size, 2)) if rank == 0 else None)
    dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, group=False, may_leave=["environment"])
def test_last_calls_are_written_for_torchs_analyser(
    store, rank, world_size, shared, tmp_path, monkeypatch
):
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dump

    folder = shared(lambda: str(tmp_path))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    own = dist.PrefixStore("record", to_torch(store))
    dist.init_process_group("gradsync", store=own, rank=rank, world_size=world_size)
    recorded_calls(rank, world_size)
    path = dump_flight_record(f"{folder}/rank_")
    dist.barrier()
    dist.destroy_process_group()
    assert path == f"{folder}/rank_{rank}"
    entries = read_dump("rank_", path)["entries"]
    assert [e["profiling_name"] for e in entries if not e["is_p2p"]] == [
        *["gloo:all_reduce"] * 3,
        "gloo:all_gather_single",
        "gloo:all_gather",
        "gloo:reduce_scatter",
        "gloo:all_to_all",
        "gloo:all_reduce",
        "gloo:gather",
        "gloo:scatter",
        "gloo:barrier",
    ]
    assert {entry["state"] for entry in entries} == {"completed"}
    assert entries[0]["input_sizes"] == [[4]]
    if rank == 0:
        dumps = {str(r): read_dump("rank_", f"{folder}/rank_{r}") for r in range(world_size)}
        arguments = JobConfig().parse_args([folder, "--prefix", "rank_"])
        database = build_db(dumps, arguments, dumps["0"]["version"])
        assert [call.pass_check for call in database.collectives] == [True] * 12
