"""Calls that read what a call before them is still to write, and memory that changes hands."""

import pytest
import torch

import gradsync as dist
from gradsync.backends.work import Work
from gradsync.group.buffers import view
from gradsync.group.work import GroupWork

SLOWLY = 200_000  # elements: the first call is still in flight when the second is made


def filled(rank, *shape):
    return torch.full(shape, float(rank + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [6, SLOWLY])
@pytest.mark.parametrize("wait", [True, False])
def test_call_on_a_tensor_with_gaps_follows_the_one_before_it(rank, elements, wait):
    for _ in range(5):
        tensor = filled(rank, 2, elements).t()
        first = dist.all_reduce(tensor, async_op=True)
        second = dist.all_reduce(tensor, async_op=wait)
        first.wait()
        if second is not None:
            second.wait()
        assert (tensor == 6).all()  # 1 + 2, twice


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [6, SLOWLY])
def test_scaled_sum_follows_the_call_before_it(rank, elements):
    for _ in range(5):
        tensor = filled(rank, elements)
        first = dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(tensor, dist.ReduceOp.PREMUL_SUM(2.0))
        first.wait()
        assert (tensor == 12).all()


@pytest.mark.ranks(2)
def test_gathering_a_tensor_with_gaps_follows_the_call_before_it(rank):
    for _ in range(5):
        tensor = filled(rank, 2, SLOWLY).t()
        first = dist.all_reduce(tensor, async_op=True)
        found = [torch.empty(SLOWLY, 2) for _ in range(2)]
        dist.all_gather(found, tensor)
        first.wait()
        assert all((each == 3).all() for each in found)


@pytest.mark.ranks(2)
def test_calls_together_follow_the_ones_before_them(rank):
    for _ in range(20):
        tensors = [filled(rank, 3) for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.all_reduce_coalesced(tensors)
        for work in works:
            work.wait()
        assert [tensor.tolist() for tensor in tensors] == [[6.0] * 3] * 3


@pytest.mark.ranks(2)
def test_overlapping_scatter_follows_the_call_before_it(rank):
    for _ in range(5):
        tensor = filled(rank, 2 * SLOWLY)
        first = dist.all_reduce(tensor, async_op=True)
        dist.reduce_scatter_tensor(tensor[1 : SLOWLY + 1], tensor)
        first.wait()
        assert (tensor[1 : SLOWLY + 1] == 6).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("elements", [5, 50_000, 1_000_000])
def test_one_tensor_is_all_inputs_and_the_output(rank, elements):
    tensor = filled(rank, elements)
    dist.reduce_scatter(tensor, [tensor] * 3)
    assert (tensor == 6).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["all_reduce", "isend"])
def test_memory_of_a_call_in_flight_outlives_its_tensor(rank, how):
    for _ in range(5):
        tensor = filled(rank, SLOWLY)
        if how == "all_reduce":
            work = dist.all_reduce(tensor, async_op=True)
            tensor.data = torch.zeros(1)
        elif rank == 0:
            work = dist.isend(tensor, 1)
            tensor.data = torch.zeros(1)
        else:
            work = dist.irecv(tensor, 0)
        rest = [torch.ones(SLOWLY) for _ in range(4)]  # takes the place of what was freed
        work.wait()
        assert all((each == 1).all() for each in rest)
        if how == "isend" and rank == 1:
            assert (tensor == 1).all()


class Finished(Work):
    """A call that is over, whose own thread has yet to get to the callbacks it was given before."""

    def is_completed(self):
        return True

    def exception(self):
        return None

    def on_done(self, callback):
        if not hasattr(self, "kept_back"):
            self.kept_back = callback
        else:
            callback()


def test_what_comes_after_a_call_finds_its_result_in_tensors_with_gaps():
    tensor = torch.zeros(2, 3).t()
    result = torch.ones(3, 2)
    handle = GroupWork(Finished(), [tensor], ((tensor, view(result, "test")),))
    found = []
    handle.on_done(lambda: found.append(tensor.clone()))
    assert (found[0] == 1).all()
