from __future__ import annotations

import pytest

from gradsync.errors import UsageError
from gradsync.rendezvous.place import Alone, TcpPlace, UnixPlace
from gradsync.rendezvous.schedulers import expand_nodes
from gradsync.rendezvous.spec import Spec, parse

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-10,12]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-4242@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}


def read(env: dict[str, str], parent: str = "1:2") -> Spec:
    return parse(None, -1, -1, env, lambda: parent)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[0-1]-n[1-2]", ["r0-n1", "r0-n2", "r1-n1", "r1-n2"]),
        ("n[5].cluster", ["n5.cluster"]),
        ("", []),
    ],
)
def test_node_lists_expand(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[[1]]", "n[a-b]", "n[]", "n[0-99999999]"])
def test_unreadable_node_lists_are_refused(text):
    with pytest.raises(UsageError, match="node list"):
        expand_nodes(text)


def test_slurm_over_hosts_meets_at_its_first_node():
    spec = read(SLURM)
    assert (spec.rank, spec.world_size, spec.local_rank) == (3, 8, 1)
    assert isinstance(spec.place, TcpPlace)
    assert spec.place.host == "gpu08"
    assert 1024 < spec.place.port < 32768
    other_rank = read(SLURM | {"SLURM_PROCID": "0"})
    assert other_rank.place == spec.place
    for other_job in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "3"}):
        assert read(SLURM | other_job).place != spec.place


def test_slurm_on_one_host_opens_no_port():
    spec = read(SLURM | {"SLURM_STEP_NODELIST": "gpu08"})
    assert spec.place == UnixPlace("slurm-4711-2")
    assert spec.local_world_size == 8


def test_slurm_without_srun_is_refused_not_a_world_of_one():
    env = dict(SLURM)
    del env["SLURM_STEP_NODELIST"]
    with pytest.raises(UsageError, match=r"8 tasks.*srun"):
        read(env | {"SLURM_JOB_NODELIST": "gpu[08-10,12]"})


def test_slurm_with_one_task_is_a_world_of_one():
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
    assert read(env).place == Alone()


def test_slurm_names_the_missing_variable():
    env = dict(SLURM)
    del env["SLURM_NTASKS"]
    with pytest.raises(UsageError, match="SLURM_NTASKS"):
        read(env)


def test_exported_address_beats_the_derived_one():
    spec = read(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "5000"})
    assert (spec.rank, spec.place) == (3, TcpPlace("head", 5000))
    with pytest.raises(UsageError, match="MASTER_PORT"):
        read(SLURM | {"MASTER_ADDR": "head"})


def test_torch_variables_beat_the_scheduler():
    env = SLURM | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert read(env).world_size == 2
    # Half of torch's contract is a mistake, not a reason to guess from the other contract.
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        read(SLURM | {"RANK": "0"})


@pytest.mark.parametrize("job", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_mpirun_on_one_host_meets_at_a_name_of_the_job(job):
    rank = next(int(value) for name, value in job.items() if name.endswith("_RANK"))
    spec = read(job)
    assert (spec.rank, spec.world_size, spec.local_world_size) == (rank, 4, 4)
    assert isinstance(spec.place, UnixPlace)
    assert not spec.place.launched
    assert len(spec.place.name) < 60


def test_mpirun_jobs_are_told_apart():
    older = {k: v for k, v in OPEN_MPI.items() if k != "PMIX_NAMESPACE"}
    places = [
        read(OPEN_MPI).place,
        read(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-4243@1"}).place,
        read(older | {"OMPI_MCA_ess_base_jobid": "77"}).place,
        read(older, parent="10:500").place,
        read(older, parent="10:501").place,
        read(MPICH, parent="11:1").place,
    ]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "env",
    [
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {k: v for k, v in MPICH.items() if k != "MPI_LOCALNRANKS"},
    ],
    ids=["two hosts", "unknown"],
)
def test_mpirun_over_hosts_needs_an_address(env):
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        read(env)
    place = read(env | {"MASTER_ADDR": "h", "MASTER_PORT": "5"}).place
    assert place == TcpPlace("h", 5)


def test_srun_with_pmi_is_slurm_and_mpirun_under_slurm_is_mpi():
    by_srun = SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}
    assert read(by_srun).place == read(SLURM).place
    by_mpirun = SLURM | MPICH
    assert read(by_mpirun).world_size == 4
