"""Meshes with real groups, beside torch's on a backend that only pretends."""

import copy
import pickle

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradsync as dist
from gradsync.device_mesh import current_mesh


def total(group: dist.ProcessGroup, rank: int) -> float:
    tensor = torch.tensor([float(rank)])
    group.all_reduce(tensor)
    return tensor.item()


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore")
def test_mesh_is_torchs_and_its_groups_work(rank, world_size, group):
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    names = ("dp", "one", "tp")
    ours = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    theirs = torch_mesh("cpu", (2, 1, 2), mesh_dim_names=names)

    def compare(a, b) -> None:
        assert torch.equal(a.mesh, b.mesh)
        assert a.mesh.dtype == b.mesh.dtype
        assert (a.shape, a.ndim, a.size(), a.get_rank()) == (b.shape, b.ndim, b.size(), rank)
        assert a.get_coordinate() == b.get_coordinate()
        assert (a.mesh_dim_names, a.device_type) == (b.mesh_dim_names, b.device_type)
        for dim, (mine, other) in enumerate(
            zip(a.get_all_groups(), b.get_all_groups(), strict=True)
        ):
            assert dist.get_process_group_ranks(mine) == torch_dist.get_process_group_ranks(other)
            assert a.get_local_rank(dim) == b.get_local_rank(dim) == mine.rank()
            assert total(mine, rank) == sum(dist.get_process_group_ranks(mine))

    compare(ours, theirs)
    for chosen in ("dp", "tp", "one", ("dp", "tp"), ("one", "dp"), ("dp", "one"), names):
        compare(ours[chosen], theirs[chosen])
    compare(ours["dp", "tp"]["tp"], theirs["dp", "tp"]["tp"])
    compare(ours["one", "tp"].flatten("flat"), theirs["one", "tp"]._flatten("flat"))
    compare(ours["flat"], theirs["flat"])
    compare(ours["dp", "flat"], theirs["dp", "flat"])
    assert ours["tp"].get_group() is ours.get_group("tp")
    assert ours["flat"].get_group() is ours["one", "tp"]._flatten("flat").get_group()
    assert ours[names] is ours
    assert ours["dp"].root is ours["flat"]._get_root_mesh() is ours
    assert ours._flatten().mesh_dim_names == ("dp_one_tp",)
    assert ours["dp_one_tp"].get_group() is group
    assert dist.init_device_mesh("cpu", (4,)).get_group() is group
    assert ours.get_group("dp").group_desc == "mesh_dp"
    torch_dist.destroy_process_group()


@pytest.mark.ranks(4)
def test_meshes_of_some_ranks_in_any_order(rank, group):
    mesh = dist.DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
    assert mesh.get_local_rank("a") == mesh.get_coordinate()[0] == mesh.get_group("a").rank()
    assert dist.get_process_group_ranks(mesh["b"].get_group()) == ([3, 1] if rank % 2 else [2, 0])
    some = dist.DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("x",))
    if rank in (0, 3):
        assert some.get_coordinate() is None
        for outside in (some.get_group, some.get_local_rank):
            with pytest.raises(RuntimeError, match=f"rank {rank} is not in DeviceMesh"):
                outside()
    else:
        assert total(some.get_group(), rank) == 3.0
    wrapped = dist.DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b")
    )
    assert wrapped == mesh
    assert hash(wrapped) == hash(mesh)
    assert wrapped["a"].get_group() is mesh.get_group("a")
    assert wrapped != dist.DeviceMesh.from_group(group, "cpu")
    assert dist.DeviceMesh.from_group(group, "cpu").mesh.tolist() == [0, 1, 2, 3]
    with mesh:
        with mesh["a"]:
            assert current_mesh() == mesh["a"]
        assert current_mesh() is mesh
    with pytest.raises(RuntimeError, match="no mesh around"):
        current_mesh()
    part = pickle.loads(pickle.dumps(mesh["b"]))
    assert part == mesh["b"]
    assert part.get_group() is mesh.get_group("b")
    assert part.root == mesh
    assert part.root.get_group("a") is mesh.get_group("a")
    again = copy.deepcopy({"mesh": mesh, "part": mesh["a"]})
    assert again["part"].root is again["mesh"]
    assert again["part"].get_group() is mesh.get_group("a")
    some = pickle.loads(pickle.dumps(some))
    assert (some.get_coordinate() is None) == (rank in (0, 3))
    with pytest.raises(ValueError, match="at least one group"):
        dist.DeviceMesh.from_group([], "cpu")
    with pytest.raises(ValueError, match="needs mesh and mesh_dim_names"):
        dist.DeviceMesh.from_group(mesh.get_all_groups(), "cpu")
    with pytest.raises(ValueError, match="where the group has"):
        dist.DeviceMesh.from_group(group, "cpu", [0, 1])


@pytest.mark.ranks(4, backend=["shm", "threads"])
def test_meshes_are_cut_and_joined(rank, group):
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    assert mesh.get_group() is group
    cut = mesh._unflatten("world", (2, 2), ("dp", "tp"))
    assert cut.mesh.tolist() == [[0, 1], [2, 3]]
    assert (cut.mesh_dim_names, cut.shape) == (("dp", "tp"), (2, 2))
    assert total(cut.get_group("dp"), rank) == 2 * (rank % 2) + 2
    assert total(cut["tp"].get_group(), rank) == (1.0 if rank < 2 else 5.0)
    more = cut["tp"]._unflatten(0, (2, 1), ("x", "y"))
    assert more.mesh.tolist() == [[rank // 2 * 2], [rank // 2 * 2 + 1]]
    assert total(more.get_group("x"), rank) == (1.0 if rank < 2 else 5.0)
    assert cut._unflatten("tp", (1, 2), ("x", "y")).get_group("dp") is cut.get_group("dp")
    assert dist.DeviceMesh._concatenate([cut["dp"], cut["tp"]]) == cut
    lines = cut._get_all_submeshes("dp")
    assert [line.mesh.tolist() for line in lines] == [[0, 2], [1, 3]]
    assert lines[rank % 2].get_group() is cut.get_group("dp")
    for kind, wrong in (
        (ValueError, lambda: mesh._unflatten(1, (2, 2), ("a", "b"))),
        (ValueError, lambda: mesh._unflatten("x", (2, 2), ("a", "b"))),
        (ValueError, lambda: mesh._unflatten(0, (2, 3), ("a", "b"))),
        (RuntimeError, lambda: mesh._unflatten(0, (2, 2), ("a",))),
        (RuntimeError, lambda: dist.DeviceMesh._concatenate([cut["dp"], cut["dp"]])),
        (RuntimeError, lambda: dist.DeviceMesh._concatenate([cut, mesh])),
    ):
        with pytest.raises(kind):
            wrong()


def test_mistakes_are_errors_of_torchs_kind():
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    try:
        bare = dist.init_device_mesh("cpu", [1])
        mistakes = [
            (RuntimeError, lambda: dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "a"))),
            (RuntimeError, lambda: dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a",))),
            (RuntimeError, lambda: dist.init_device_mesh("cpu", (4, 4))),
            (RuntimeError, lambda: dist.init_device_mesh("cpu", "1")),
            (RuntimeError, lambda: dist.init_device_mesh("cuda:0", (1,))),
            (RuntimeError, lambda: dist.init_device_mesh("cpu", (1,), backend_override={1: "shm"})),
            (RuntimeError, lambda: dist.DeviceMesh("cpu", [0.5])),
            (RuntimeError, lambda: dist.DeviceMesh("cpu", [-1])),
            (RuntimeError, lambda: dist.DeviceMesh("cpu", [1])),
            (RuntimeError, lambda: bare["dp"]),
            (RuntimeError, lambda: bare.flatten()),
            (RuntimeError, lambda: mesh.get_group()),
            (RuntimeError, lambda: mesh.get_local_rank()),
            (RuntimeError, lambda: mesh["dp", "dp"]),
            (KeyError, lambda: mesh["x"]),
            (KeyError, lambda: mesh.get_group("x")),
            (IndexError, lambda: mesh.get_group(2)),
            (ValueError, lambda: mesh.flatten("tp")),
        ]
        for kind, wrong in mistakes:
            with pytest.raises(kind):
                wrong()
        assert mesh.get_group(-1) is mesh.get_group("tp")
        assert repr(mesh) == "DeviceMesh((dp=1, tp=1), 'cpu')"
        override = {"dp": "shm", 1: ("shm", None)}
        named = dist.DeviceMesh(
            "cpu", [[0]], mesh_dim_names=("dp", "tp"), backend_override=override
        )
        assert named == mesh
        flat = mesh.flatten("both")
        assert mesh.flatten("both") == flat
        with pytest.raises(ValueError, match="another flattened mesh"):
            mesh["dp"].flatten("both")
    finally:
        dist.destroy_process_group()
