"""Asynchronous calls: handles, futures, many in flight, from many threads and on many groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import gradsync as dist
from gradsync.backends.shm import ShmBackend
from gradsync.errors import AbortedError, CollectiveTimeout, MismatchError, PeerLostError
from gradsync.group import work as work_module
from gradsync.group.work import bring_home
from gradsync.testing import faults

RANKS = pytest.mark.ranks(2, 3, backend=["shm", "threads"])


@RANKS
def test_every_operation_has_an_asynchronous_form_with_the_same_result() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(size * 2, dtype=torch.float32) + 10 * rank
    everyone = [torch.arange(size * 2, dtype=torch.float32) + 10 * r for r in range(size)]
    total = torch.stack(everyone).sum(0)
    is_root = rank == 1

    reduced, whole, part = mine.clone(), torch.empty(size * size * 2), torch.empty(2)
    sent, gathered = mine.clone(), [torch.empty(size * 2) for _ in range(size)]
    at_root = [torch.empty(size * 2) for _ in range(size)] if is_root else None
    given = [everyone[r] * 2 for r in range(size)] if is_root else None
    scattered, to_root, swapped = torch.empty(size * 2), mine.clone(), torch.empty(size * 2)
    listed, row = [torch.empty(2) for _ in range(size)], torch.empty(2)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.broadcast(sent, 1, async_op=True),
        dist.all_gather(gathered, mine, async_op=True),
        dist.all_gather_single(whole, mine, async_op=True),
        dist.gather(mine, at_root, 1, async_op=True),
        dist.scatter(scattered, given, 1, async_op=True),
        dist.reduce(to_root, 1, async_op=True),
        dist.reduce_scatter_single(part, mine, async_op=True),
        dist.reduce_scatter(row, list(mine.view(size, 2)), async_op=True),
        dist.all_to_all_single(swapped, mine, async_op=True),
        dist.all_to_all(listed, list(mine.view(size, 2)), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    columns = torch.stack([other.view(size, 2)[rank] for other in everyone])
    assert torch.equal(reduced, total)
    assert torch.equal(sent, everyone[1])
    assert torch.equal(torch.stack(gathered), torch.stack(everyone))
    assert torch.equal(whole, torch.cat(everyone))
    assert torch.equal(scattered, everyone[rank] * 2)
    assert torch.equal(to_root, total if is_root else mine)
    assert torch.equal(part, total.view(size, 2)[rank])
    assert torch.equal(row, part)
    assert torch.equal(swapped.view(size, 2), columns)
    assert torch.equal(torch.stack(listed), columns)
    if at_root is not None:
        assert torch.equal(torch.stack(at_root), torch.stack(everyone))
    assert works[0].result() == [reduced]
    assert len(works[2].result()) == size
    assert works[11].result() == []


@RANKS
def test_results_come_home_to_tensors_with_gaps_and_futures_resolve() -> None:
    size = dist.get_world_size()
    matrix = torch.ones(4, 4)
    column = matrix[:, 1]
    future = dist.all_reduce(column, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((4,), 2.0 * size))
    expected = torch.ones(4, 4)
    expected[:, 1] = size
    assert torch.equal(matrix, expected)
    work = dist.broadcast(matrix.t(), 0, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert torch.equal(matrix, expected)


@RANKS
def test_dropped_handles_and_temporaries_are_carried_out_all_the_same() -> None:
    size = dist.get_world_size()
    kept = [torch.ones(5000) for _ in range(40)]
    for tensor in kept:
        dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(torch.ones(5000), async_op=True)
    dist.barrier()  # follows them
    assert all(torch.equal(tensor, torch.full((5000,), float(size))) for tensor in kept)


@RANKS
def test_results_come_home_into_tensors_with_gaps_without_their_handles() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, received = torch.ones(3, 2).t(), torch.zeros(4, 2)[:, 0]
    dist.all_reduce(reduced, async_op=True)
    dist.irecv(received, (rank + 1) % size)
    dist.send(torch.ones(4), (rank - 1) % size)
    dist.barrier()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not ((reduced == size).all() and received.all()):
        time.sleep(0.001)
    assert torch.equal(reduced, torch.full((2, 3), float(size)))
    assert torch.equal(received, torch.ones(4))


@pytest.mark.ranks(2)
def test_tensors_with_gaps_are_filled_after_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(copies: object) -> None:
        begun.set()
        assert go_on.wait(20)
        bring_home(copies)

    monkeypatch.setattr(work_module, "bring_home", slowly)
    reduced = torch.ones(3, 2).t()
    dist.all_reduce(reduced, async_op=True)
    assert begun.wait(20)
    later = threading.Timer(0.05, go_on.set)
    later.start()
    dist.barrier()
    assert torch.equal(reduced, torch.full((2, 3), 2.0))
    later.join()


class Stand:
    """A call in flight that runs a function while somebody looks whether it is over."""

    def __init__(self, over: bool, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.over, self.meanwhile = over, meanwhile

    def done(self) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return self.over


def test_threads_that_tidy_up_together_drop_nothing_in_flight() -> None:
    """The tensors would be freed, and the core goes on working on them."""
    backend = ShmBackend(None)  # type: ignore[arg-type]
    kept = [object() for _ in range(4)]

    def start(number: int, stand: Stand) -> None:
        backend._started(stand, kept[number])  # type: ignore[arg-type]

    start(0, Stand(True, lambda: start(2, Stand(False))))  # another thread comes in between
    start(1, Stand(False))
    start(3, Stand(False))
    assert {id(call) for _, call in backend._in_flight} >= {id(call) for call in kept[1:]}


@pytest.mark.ranks(2, 3)
def test_many_threads_on_groups_of_their_own() -> None:
    groups = [dist.new_group() for _ in range(4)]
    size = dist.get_world_size()
    wrong: list[object] = []

    def use(group: dist.ProcessGroup) -> None:
        for number in range(25):
            tensors = [torch.full((100,), float(number)) for _ in range(3)]
            works = [group.all_reduce_async(tensor) for tensor in tensors]
            for tensor, work in zip(tensors, works, strict=True):
                work.wait()
                if not torch.equal(tensor, torch.full((100,), float(number * size))):
                    wrong.append(tensor)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_a_wait_may_give_up_and_come_back() -> None:
    tensor = torch.ones(3)
    if dist.get_rank() == 1:
        time.sleep(0.15)
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        with pytest.raises(CollectiveTimeout, match="may be waited for again"):
            work.wait(timeout=0.02)
    assert work.wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


@pytest.mark.ranks(2, backend=["shm", "threads"])
def test_the_error_of_a_call_is_raised_by_wait_and_breaks_what_follows() -> None:
    tensors = [torch.ones(3 + dist.get_rank()), torch.ones(2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        with pytest.raises(MismatchError, match=r"float32\[3\]"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
    with pytest.raises(RuntimeError, match="all_reduce"):
        works[0].get_future().wait()
    assert torch.equal(tensors[0], torch.ones(3 + dist.get_rank()))


@pytest.mark.ranks(2)
def test_the_error_of_a_call_whose_handle_was_dropped_is_told(group, caplog) -> None:
    for next_call in (True, False):
        sub = dist.new_group()
        assert isinstance(sub, dist.ProcessGroup)
        sub.all_reduce_async(torch.ones(3 + dist.get_rank()))
        if next_call:
            with pytest.raises(MismatchError, match=r"float32\[4\]"):
                sub.barrier()
        dist.destroy_process_group(sub)
        told = [r.getMessage() for r in caplog.records if "nobody waited for" in r.getMessage()]
        assert len(told) == (not next_call)
    assert "float32[4]" in told[0]
    dist.barrier()


@pytest.mark.ranks(3, faults=[faults.kill(rank=1, at="all_reduce#3")])
def test_a_lost_peer_ends_every_call_in_flight() -> None:
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    with pytest.raises(PeerLostError) as caught:
        works[-1].wait()
    assert caught.value.ranks == (1,)


@pytest.mark.ranks(2)
def test_destroying_a_group_ends_calls_that_nobody_answers() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = group.all_reduce_async(torch.ones(2))
        begun = time.monotonic()
        group.abort("not needed")
        with pytest.raises(AbortedError, match="not needed"):
            work.wait()
        assert time.monotonic() - begun < 2
    dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("together", [False, True])
def test_callback_of_a_future_may_wait_for_a_further_call(group, together):
    """It runs in the group's only worker, which would wait for itself."""

    def total(x):
        if together:
            return dist.all_reduce_coalesced([x], async_op=True)
        return group.all_reduce_async(x).get_future()

    future = total(torch.ones(2)).then(lambda done: total(done.value()[0]).wait()[0])
    end = time.monotonic() + 20
    while not future.done():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert future.value().tolist() == [4.0, 4.0]
