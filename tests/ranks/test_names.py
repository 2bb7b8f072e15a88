"""Names and arguments that ports of scripts use, on a world of one."""

import pytest
import torch

import gradsync as dist


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
