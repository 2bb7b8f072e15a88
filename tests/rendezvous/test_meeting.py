from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import pytest

import gradsync
from gradsync.errors import RendezvousError, UsageError
from gradsync.rendezvous import meet, register_rendezvous_handler, rendezvous
from gradsync.rendezvous.place import TcpPlace, UnixPlace
from gradsync.rendezvous.resolve import is_own_host, parent_identity, settle
from gradsync.rendezvous.spec import Spec
from gradsync.stores.hash import HashStore

MEET = """
    import json, os, sys
    from gradsync.rendezvous import meet
    meeting = meet(timeout=float(os.environ.get("LIMIT", "20")))
    print(json.dumps([meeting.rank, [m.evidence.pid for m in meeting.members]]), flush=True)
    input()
"""


def listening_sockets(pid: int) -> list[str]:
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6", "udp"):
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [row[1] for row in rows if f"socket:[{row[9]}]" in inodes and row[3] != "01"]
    return found


def finish(*processes) -> list[str]:
    return [process.communicate("\n", timeout=30)[0] for process in processes]


def test_nothing_given_is_a_world_of_one():
    meeting = meet(env={})
    assert (meeting.rank, meeting.world_size, meeting.local_rank) == (0, 1, 0)
    meeting.store.set("k", "v")
    assert meeting.store.get("k") == b"v"
    assert meeting.members[0].evidence.pid == os.getpid()


def test_given_store_serves_one_group_after_another():
    store = HashStore()
    for generation in range(3):
        meeting = meet(store=store, rank=0, world_size=1)
        assert meeting.generation == generation
        assert not meeting.store.check(["stale"])
        meeting.store.set("stale", "1")
        meeting.leave()


def test_store_needs_rank_and_size_and_excludes_a_url():
    with pytest.raises(UsageError, match="rank"):
        meet(store=HashStore())
    with pytest.raises(UsageError, match="either"):
        meet("env://", store=HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "own"])
def test_one_host_meets_without_any_port(start, free_port, host):
    host = os.uname().nodename if host == "own" else host
    env = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": free_port}
    ranks = [start(MEET, RANK=rank, **env) for rank in (1, 0)]
    told = [json.loads(process.stdout.readline()) for process in ranks]
    assert [rank for rank, _ in told] == [1, 0]
    assert told[0][1] == told[1][1] == [ranks[1].pid, ranks[0].pid]
    assert [listening_sockets(process.pid) for process in ranks] == [[], []]
    finish(*ranks)


@pytest.mark.parametrize(
    "common",
    [
        {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2},
        {"SLURM_NTASKS": 2, "SLURM_STEP_NODELIST": "here", "SLURM_JOB_ID": os.getpid()},
    ],
    ids=["mpirun", "srun"],
)
def test_schedulers_on_one_host_need_no_launcher(start, common):
    names = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
    ranks = [start(MEET, **common, **{names["SLURM_NTASKS" in common]: rank}) for rank in (0, 1)]
    told = [json.loads(process.stdout.readline()) for process in ranks]
    assert told[0][1] == told[1][1] == [process.pid for process in ranks]
    finish(*ranks)


def test_file_url_meets(start, tmp_path):
    code = """
        import sys
        from gradsync.rendezvous import meet
        for _ in range(3):
            meeting = meet("file://{}", rank={}, world_size=2, timeout=20)
            meeting.leave()
        print(meeting.generation)
    """
    ranks = [start(code.format(tmp_path / "meeting", rank)) for rank in (0, 1)]
    assert finish(*ranks) == ["2\n", "2\n"]


def test_second_process_with_the_same_rank_fails_everyone(start, free_port):
    env = {"WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port, "LIMIT": 20}
    ranks = [start(MEET, RANK=rank, **env) for rank in (0, 1, 1)]
    errors = [process.communicate(timeout=15)[1] for process in ranks]
    pids = [process.pid for process in ranks]
    for process, error in zip(ranks, errors, strict=True):
        assert process.returncode == 1
        assert "RendezvousError" in error
        assert "rank 1 is already taken by pid" in error
        assert f"pid {pids[1]} on" in error
        assert f"pid {pids[2]} on" in error


def test_third_process_of_a_complete_pair_is_told_at_once(start, free_port):
    env = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port, "LIMIT": 20}
    pair = [start(MEET, RANK=rank, **env) for rank in (0, 1)]
    for process in pair:
        process.stdout.readline()
    begin = time.monotonic()
    stranger = start(MEET, RANK=1, **env)
    _, error = stranger.communicate(timeout=10)
    assert time.monotonic() - begin < 5
    assert f"rank 1 is already taken by pid {pair[1].pid} on" in error
    second_master = start(MEET, RANK=0, **env)
    _, error = second_master.communicate(timeout=10)
    assert "RendezvousError" in error
    assert f"could not serve the store at localhost:{free_port}" in error
    assert f"held by pid {pair[0].pid}" in error
    assert [process.poll() for process in pair] == [None, None]
    finish(*pair)


def test_processes_that_came_list_who_is_missing(start, free_port):
    env = {"WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    ranks = [start(MEET, RANK=rank, LIMIT=limit, **env) for rank, limit in ((0, 1.5), (2, 20))]
    for process in ranks:
        error = process.communicate(timeout=15)[1]
        assert "only 2 of 4 ranks came" in error
        assert "Missing: 1, 3." in error
        for other in ranks:
            assert f"pid {other.pid} on" in error


def test_missing_rank_0_is_named(start, free_port):
    rank = start(
        MEET, RANK=1, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=free_port, LIMIT=0.5
    )
    error = rank.communicate(timeout=15)[1]
    assert "RendezvousError" in error
    assert "Rank 0 serves it" in error


def test_groups_of_the_same_processes_follow_each_other(start, free_port):
    code = """
        import os, random, time
        from gradsync.rendezvous import meet
        rank = int(os.environ["RANK"])
        for turn in range(8):
            meeting = meet(timeout=20)
            meeting.store.set(f"turn-{rank}", str(turn))
            assert [meeting.store.get(f"turn-{r}") for r in range(3)] == [b"%d" % turn] * 3
            # The server must not leave while others still read from it.
            meeting.store.barrier("done", 3)
            time.sleep(random.random() * 0.02)
            meeting.leave()
            del meeting
        print("met")
    """
    env = {"WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    ranks = [start(code, RANK=rank, **env) for rank in range(3)]
    results = [process.communicate(timeout=40) for process in ranks]
    assert [out for out, _ in results] == ["met\n"] * 3, results


def test_replacement_of_a_dead_rank_meets_the_others_again(start):
    code = """
        import os
        from gradsync.rendezvous import meet
        from gradsync.stores.unix import UnixStore
        store = UnixStore(os.environ["NAME"])
        for line in iter(input, "end"):
            meeting = meet(store=store, rank=int(os.environ["RANK"]), world_size=2, timeout=20)
            print(meeting.generation, flush=True)
    """
    from gradsync.stores.unix import UnixStore

    name = f"test-replacement-{os.getpid()}"
    server = UnixStore(name, is_master=True)
    assert server.name == name
    survivor, victim = (start(code, NAME=name, RANK=rank) for rank in (0, 1))
    for process in (survivor, victim):
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [p.stdout.readline() for p in (survivor, victim)] == ["0\n", "0\n"]
    victim.kill()
    victim.wait()
    replacement = start(code, NAME=name, RANK=1)
    for process in (survivor, replacement):
        process.stdin.write("go\nend\n")
        process.stdin.flush()
    assert [p.stdout.readline() for p in (survivor, replacement)] == ["1\n", "1\n"]


def test_settle_replaces_only_addresses_of_this_host():
    def place(host: str, local: int):
        return settle(Spec(0, 2, TcpPlace(host, 29500), local_world_size=local)).place

    own = os.uname().nodename
    assert place("localhost", -1) == UnixPlace("port-29500")
    assert place("192.0.2.7", 2) == TcpPlace("192.0.2.7", 29500)
    assert place(own, -1) == TcpPlace(own, 29500)
    assert place(own, 2) == UnixPlace("port-29500")


def test_own_host_is_known_by_address():
    assert is_own_host("127.0.0.1")
    assert is_own_host(os.uname().nodename)
    assert not is_own_host("192.0.2.7")


def test_parent_identity_is_stable():
    assert parent_identity() == parent_identity()
    assert parent_identity().startswith(f"{os.getppid()}:")


def test_rendezvous_yields_one_triple(monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    triples = gradsync.rendezvous("env://")  # the name of the package and of torch's function
    store, rank, size = next(triples)
    assert (rank, size) == (0, 1)
    store.set("k", "v")
    with pytest.raises(RuntimeError):
        next(triples)


def test_rendezvous_reports_mistakes_when_called():
    for url, error in ((5, RuntimeError), ("tcp://h:1", ValueError), ("nope://", RuntimeError)):
        with pytest.raises(error):
            rendezvous(url)


def test_handlers_of_users_are_called_with_the_whole_url():
    calls = []
    store = HashStore()

    def handler(url, **options):
        calls.append((url, options))
        yield store, 0, 1

    register_rendezvous_handler("mine", handler)
    with pytest.raises(RuntimeError, match="already"):
        register_rendezvous_handler("mine", handler)
    with pytest.raises(RuntimeError, match="already"):
        register_rendezvous_handler("tcp", handler)
    assert next(rendezvous("mine://x?a=1", 0, 1, timeout=3)) == (store, 0, 1)
    assert calls == [("mine://x?a=1&rank=0&world_size=1", {"timeout": 3})]
    assert meet("mine://y", timeout=3).world_size == 1
    assert calls.pop() == ("mine://y", {"timeout": timedelta(seconds=3)})
    meet("mine://y", timeout=None)
    assert calls.pop()[1]["timeout"] > timedelta(days=10_000)


def test_lost_launcher_is_named():
    env = {"RANK": "1", "WORLD_SIZE": "2", "GRADSYNC_STORE": "unix:nobody-serves-this"}
    with pytest.raises(RendezvousError, match="launcher serves it"):
        meet(env=env, timeout=0.3)
