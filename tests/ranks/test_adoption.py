"""Private tensors that are reduced again and again: shared where they are, and nobody notices."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import gradsync as dist
from gradsync.group import adopting

# The kit's own group is observed, which takes calls off the lane on which tensors are adopted.
RANKS = pytest.mark.ranks(2, 3, group=False)
TWO = pytest.mark.ranks(2, group=False)
COUNT = 100_003
OFTEN = 10
"""Calls after which a tensor has been adopted."""


@pytest.fixture(autouse=True)
def world(rank: int, world_size: int, store: dist.Store) -> Iterator[None]:
    place = dist.PrefixStore("world", store)
    dist.init_process_group(store=place, rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def _is_adopted(tensor: torch.Tensor) -> bool:
    """Return whether the page in the middle of a tensor is one of shared memory."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= middle < end:
                return "gradsync-arena" in line
    raise AssertionError("not mapped at all")


def _values(seed: int) -> torch.Tensor:
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(seed))


def _reduce_often(tensor: torch.Tensor, times: int = OFTEN) -> None:
    """Reduce a tensor again and again, and check each result bit by bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(times):
        tensor.copy_(_values(100 * turn + rank))
        expected = _values(100 * turn)
        for other in range(1, size):
            expected += _values(100 * turn + other)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)


@RANKS
def test_results_address_and_views_stay_what_they_were() -> None:
    storage = torch.full((COUNT + 200,), 7.0)
    tensor = storage[3 + 50 * dist.get_rank() :][:COUNT]
    address = tensor.data_ptr()
    _reduce_often(tensor)
    assert _is_adopted(tensor)
    assert tensor.data_ptr() == address
    array = tensor.numpy()
    _reduce_often(tensor)
    assert torch.equal(torch.from_numpy(array), tensor)
    around = torch.cat([storage[: tensor.storage_offset()], storage[-150 + 50 * dist.get_rank() :]])
    assert around.eq(7).all()
    dist.all_reduce_coalesced([tensor, tensor.clone()])
    work = dist.all_reduce(tensor.fill_(1), async_op=True)
    work.wait()
    assert tensor.eq(dist.get_world_size()).all()


@RANKS
def test_a_part_and_the_whole_of_one_storage() -> None:
    whole = torch.zeros(3 * COUNT)
    for _ in range(2):
        _reduce_often(whole[COUNT : 2 * COUNT])
        _reduce_often(whole[2 * COUNT :])
    assert _is_adopted(whole[COUNT : 2 * COUNT])
    assert whole[:COUNT].eq(0).all()
    dist.all_reduce(whole.fill_(2))
    assert whole.eq(2 * dist.get_world_size()).all()


@RANKS
def test_memory_that_others_have_a_hand_in_is_left_alone() -> None:
    array = np.zeros(COUNT, np.float32)
    theirs, lent = torch.from_numpy(array), torch.zeros(COUNT)
    lent.numpy()
    for tensor in (theirs, lent):
        _reduce_often(tensor)
        assert not _is_adopted(tensor)


@RANKS
def test_memory_is_private_again_when_the_tensor_has_gone() -> None:
    def arenas() -> int:
        with open("/proc/self/maps") as file:
            return sum("gradsync-arena" in line for line in file)

    dist.barrier()
    before = arenas()
    dist.barrier()
    for _ in range(3):
        tensor = torch.zeros(COUNT)
        _reduce_often(tensor)
        del tensor
    gc.collect()
    dist.barrier()
    assert arenas() <= before


@RANKS
def test_one_rank_whose_tensor_cannot_be_adopted() -> None:
    tensor = torch.zeros(COUNT)
    if dist.get_rank() == 1:
        tensor.share_memory_()
    _reduce_often(tensor)
    assert _is_adopted(tensor) == (dist.get_rank() != 1)


@TWO
def test_storages_that_get_other_memory() -> None:
    # Made together: one that came later might lie where another was, and be left alone.
    tensors = [torch.zeros(COUNT), torch.zeros(COUNT)]
    for tensor, change in zip(tensors, ("share", "set"), strict=True):
        _reduce_often(tensor)
        assert _is_adopted(tensor)
        expected = tensor.clone()
        if change == "share":
            tensor.share_memory_()
        else:
            tensor.set_(expected.clone())
        assert torch.equal(tensor[:COUNT], expected)
        assert not _is_adopted(tensor)
        _reduce_often(tensor[:COUNT])


@TWO
def test_a_buffer_for_tensors_of_many_sizes_can_still_grow() -> None:
    buffer = torch.zeros(2 * COUNT)
    for turn in range(3 * OFTEN):
        tensor = buffer.resize_(COUNT + 5 * (turn % 3 // 2)).fill_(1)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        assert not _is_adopted(tensor)
    buffer.resize_(5 * COUNT)


@TWO
def test_a_tensor_where_one_of_another_size_was() -> None:
    tensor = torch.zeros(COUNT)
    part = tensor[: COUNT // 2]  # lies where one would that was freed before
    dist.all_reduce(part)
    _reduce_often(tensor)
    assert _is_adopted(tensor)
    buffer = torch.zeros(2 * COUNT)
    dist.all_reduce(buffer[:COUNT])
    for _ in range(7):
        dist.all_reduce(buffer)
    work = dist.all_reduce(torch.zeros(20 * COUNT), async_op=True)
    dist.all_reduce(buffer)  # due, and put off
    work.wait()
    _reduce_often(buffer[:COUNT])
    assert not _is_adopted(buffer[:COUNT])


@TWO
def test_forked_child_neither_writes_to_its_parent_nor_sees_it_write() -> None:
    tensor = torch.zeros(COUNT)
    _reduce_often(tensor)
    assert _is_adopted(tensor)
    tensor.fill_(5)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        saw = bool(tensor.eq(5).all())
        tensor.fill_(9)
        os.write(ready[1], b"x")
        os._exit(0 if saw and not _is_adopted(tensor) else 1)
    tensor.fill_(6)
    os.write(go[1], b"x")
    os.read(ready[0], 1)
    assert tensor.eq(6).all()
    assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *go):
        os.close(end)
    _reduce_often(tensor)
    assert _is_adopted(tensor)


@TWO
def test_ctrl_c_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.full((COUNT,), 4.0)
    make = adopting.from_dlpack

    def interrupted(memory: object) -> torch.Tensor:
        make(memory)
        raise KeyboardInterrupt

    for _ in range(OFTEN - 3):
        dist.all_reduce(tensor.fill_(4))
    monkeypatch.setattr(adopting, "from_dlpack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(tensor.fill_(4))
    assert tensor.eq(4).all()
    assert not _is_adopted(tensor)
    dist.all_reduce(tensor)
    assert tensor.eq(8).all()


@TWO
def test_waits_for_a_moment_when_nothing_is_in_flight() -> None:
    tensor = torch.zeros(COUNT)
    for turn in range(40):
        tensor.fill_(1)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        dist.all_reduce(tensor)  # behind those, on the same tensor
        for work in works:
            work.wait()
        assert tensor.eq(2**4).all(), turn


@TWO
def test_not_when_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_ADOPT", "0")
    tensor = torch.zeros(COUNT)
    _reduce_often(tensor)
    assert not _is_adopted(tensor)


@TWO
def test_tensors_outlive_their_world_and_meet_another(rank: int, store: dist.Store) -> None:
    tensor = torch.zeros(COUNT)
    for name in ("first", "second"):
        place = dist.PrefixStore(name, store)
        world = dist.create_world(store=place, rank=rank, world_size=2)
        for _ in range(OFTEN):
            world.all_reduce(tensor.fill_(3))
            assert tensor.eq(6).all()
        world.close()
        assert _is_adopted(tensor)
    assert tensor.eq(6).all()
