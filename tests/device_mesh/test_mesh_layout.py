"""Where ranks are in a grid, beside torch's meshes on a backend that only pretends."""

import random
from contextlib import contextmanager
from itertools import combinations
from math import prod

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradsync as dist
from gradsync.device_mesh.layout import Layout


@contextmanager
def pretending(rank: int, size: int):
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def as_layout(ranks: torch.Tensor) -> Layout:
    return Layout(tuple(ranks.shape), tuple(ranks.flatten().tolist()))


@pytest.mark.filterwarnings("ignore")
def test_grids_are_those_of_torch():
    dice = random.Random(3)
    for _ in range(12):
        shape = tuple(dice.choice((1, 2, 2, 3)) for _ in range(dice.choice((1, 2, 3))))
        ranks = torch.randperm(prod(shape) + 1, generator=torch.Generator().manual_seed(len(shape)))
        ranks = ranks[: prod(shape)].sort().values.reshape(shape)  # one of the world is not in it
        names = ("a", "b", "c")[: len(shape)]
        layout = as_layout(ranks)
        rank = dice.choice(layout.ranks)
        with pretending(rank, prod(shape) + 1):
            theirs = TorchMesh("cpu", ranks, mesh_dim_names=names)
            coordinate = layout.coordinate(rank)
            assert coordinate == theirs.get_coordinate()
            assert layout.rank_at(coordinate) == rank
            for dim in range(len(shape)):
                mine = [line for line in layout.lines((dim,)) if rank in line]
                assert mine == [torch_dist.get_process_group_ranks(theirs.get_group(dim))]
            for count in range(1, len(shape) + 1):
                for dims in combinations(range(len(shape)), count):
                    part = theirs[tuple(names[dim] for dim in dims)]
                    assert layout.around(coordinate, [(dim,) for dim in dims]) == as_layout(
                        part.mesh
                    )
                    flat = part._flatten("_".join(names[dim] for dim in dims))
                    assert layout.around(coordinate, [dims]) == as_layout(flat.mesh)
                    mine = [line for line in layout.lines(dims) if rank in line]
                    assert mine == [torch_dist.get_process_group_ranks(flat.get_group())]


def test_lines_cover_the_grid_once_whatever_the_dimensions():
    layout = Layout((2, 3, 4), tuple(range(24)))
    for dims in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), ()):
        lines = layout.lines(dims)
        assert sorted(rank for line in lines for rank in line) == list(range(24))
        assert {len(line) for line in lines} == {layout.length(dims)}


def test_ranks_that_make_no_grid_are_refused():
    with pytest.raises(dist.UsageError, match="only once"):
        Layout((2,), (3, 3))
    with pytest.raises(dist.UsageError, match="cannot have 3 ranks"):
        Layout((2, 2), (0, 1, 2))
    assert Layout((2,), (0, 1)).coordinate(5) is None
