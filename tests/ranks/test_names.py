"""Names and arguments that ports of scripts use, on a world of one."""

from datetime import timedelta

import pytest
import torch

import gradsync as dist
from gradsync.session import breakpoint as at_breakpoint


@pytest.fixture
def world():
    dist.init_process_group(pg_options=None, device_id=None)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_world_answers_to_torchs_names(world):
    assert dist._get_default_group() is world
    assert dist._get_default_store() is world.members.store
    assert dist.get_backend_config() == "cpu:shm"
    assert dist.get_backend_config(world) == str(dist.BackendConfig(dist.get_backend()))
    group = dist.new_group([0], None, None, object(), False, "what for")
    assert group.group_desc == "what for"
    mine, all_of_them = dist.new_subgroups_by_enumeration([[0]], None, "shm", object(), "parts")
    assert all_of_them == [mine]
    assert mine.group_desc == "parts"
    assert dist.new_subgroups(1, None, None, None, object(), "halves")[0].group_desc == "halves"
    assert dist.split_group(world, [[0]], None, object(), "split", "shm").group_desc == "split"
    with pytest.raises(TypeError, match="device_ids"):
        dist.barrier(device_ids=0)
    dist.barrier(device_ids=[0])
    output = torch.empty(2)
    dist.all_gather_into_tensor(output_tensor=output, input_tensor=torch.ones(2))
    assert output.tolist() == [1.0, 1.0]


def test_group_answers_to_torchs_names(world):
    assert world.get_group_store() is dist._get_default_store()
    assert (world._get_backend_name(), world._device_types) == ("shm", [torch.device("cpu")])
    assert world.bound_device_id is None
    before = world._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), dist.ReduceOp.RedOpType.SUM)
    dist._all_gather_base(torch.empty(1), torch.ones(1))
    assert world._get_sequence_number_for_group() == before + 2
    assert not dist._rank_not_in_group(world)
    assert dist._rank_not_in_group(dist.GroupMember.NON_GROUP_MEMBER)
    sent, received = dist.isend(torch.ones(1), 0), dist.irecv(torch.ones(1))
    assert (sent.wait(), received.wait(), received._source_rank()) == (True, True, 0)
    group = dist.new_group()
    group.shutdown()
    assert group.is_closed()


@pytest.mark.ranks(2)
def test_limit_of_a_group_can_be_changed(rank, group):
    dist._set_pg_timeout(timedelta(seconds=0.2))
    assert group.timeout_s == 0.2
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeout, match=r"timed out after 0\.2 s"):
            dist.barrier()
        dist._get_default_store().set("over", "")
    else:
        dist._get_default_store().wait(["over"])


@pytest.mark.ranks(2)
def test_breakpoint_stops_one_rank_where_it_was_called(rank, group, tmp_path, monkeypatch, capsys):
    typed = tmp_path / "typed"
    typed.write_text("p found * 2\nc\n")
    monkeypatch.setattr(at_breakpoint, "_TERMINAL", str(typed))
    for found in (20, 21):
        assert found
        dist.breakpoint(rank=1, skip=1)
    said = capsys.readouterr().out
    assert ("42" in said, "40" in said) == (rank == 1, False)
    assert ("rank 1 of 2; the others wait" in said) == (rank == 1)
    assert group.timeout_s == 3600
    assert group._get_sequence_number_for_group() == 1  # the barrier in which the other waited
    with pytest.raises(ValueError, match="there is no rank 2"):
        dist.breakpoint(rank=2)


def test_before_there_is_a_world():
    assert dist.group.WORLD is None
    with pytest.raises(ValueError, match="not initialised"):
        dist._get_default_group()
    assert dist.default_pg_timeout.total_seconds() == 1800
    assert dist.reduce_op.SUM is dist.ReduceOp.SUM
    assert dist.get_default_backend_for_device(torch.device("cpu")) == "shm"
    with pytest.raises(ValueError, match="no backend for 'cuda:0'"):
        dist.get_default_backend_for_device("cuda:0")
    for wrong in ("cpu:", "cpu:shm,cpu:shm", ":shm", ""):
        with pytest.raises(ValueError, match="device:backend"):
            dist.BackendConfig(wrong)


def test_profiler_shows_the_name_of_a_block():
    with torch.profiler.profile() as profile, dist.record_comm("exchange"):
        torch.ones(1).add_(1)
    assert "exchange" in [event.key for event in profile.key_averages()]
