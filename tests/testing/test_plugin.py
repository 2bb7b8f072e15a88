"""The pytest plugin, run in a pytest of its own: every kind of outcome, with its report."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from inner_pytest import environment

SAMPLE = """
import os, signal, threading, time
import pytest, torch
import gradsync as dist
from gradsync.testing import faults

@pytest.mark.ranks(2)
def test_passes(rank, world_size, group, store, backend):
    tensor = torch.full((3,), float(rank + 1))
    group.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    assert (world_size, backend) == (2, "shm")
    store.set(f"rank {rank}", "here")
    assert store.get(f"rank {1 - rank}") == b"here"

@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("factor", [1, 2])
def test_sizes(rank, world_size, factor):
    tensor = torch.ones(1) * factor
    dist.all_reduce(tensor)
    assert tensor.item() == factor * world_size

@pytest.mark.ranks(3)
def test_one_fails(rank):
    print(f"output of rank {rank}")
    if rank == 1:
        assert {"a": 1, "b": [1, 2, 3]} == {"a": 1, "b": [1, 2, 4]}
    dist.barrier()

@pytest.mark.ranks(2, timeout=1.5)
def test_hangs(rank):
    dist.barrier()
    if rank == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(7))

@pytest.mark.ranks(2, timeout=1.5)
def test_hangs_with_the_lock_held(rank):
    if rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [])
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

@pytest.mark.ranks(2)
def test_exits(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()

@pytest.mark.ranks(2)
def test_is_killed(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.ranks(2)
def test_runs_after_a_loss(rank):
    dist.barrier()

@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["environment", "thread", "process", "memory", "socket", "threads",
                                  "dtype", "seed"])
def test_leaves(rank, what):
    if rank == 1:
        return
    if what == "environment":
        os.environ["LEFT_BEHIND"] = "yes"
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(1,), name="sleepy", daemon=True).start()
    elif what == "process":
        import subprocess
        test_leaves.child = subprocess.Popen(["sleep", "1"])
    elif what == "memory":
        open(f"/dev/shm/left-by-a-test-{os.getpid()}", "w").close()
    elif what == "socket":
        import socket
        test_leaves.socket = socket.socket()
    elif what == "threads":
        torch.set_num_threads(torch.get_num_threads() + 1)
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "seed":
        torch.manual_seed(1234)

@pytest.mark.ranks(2, may_leave=["seed"])
def test_may_leave_what_it_says():
    torch.manual_seed(1234)

@pytest.mark.ranks(2)
def test_starts_clean(rank):
    assert "LEFT_BEHIND" not in os.environ
    assert torch.initial_seed() == 0

@pytest.mark.ranks(2)
def test_skips(rank):
    pytest.skip("not today")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure(rank):
    assert rank != 1

@pytest.mark.ranks(2, backend=["shm", "threads", "gloo"])
def test_backends(backend, rank):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    assert dist.get_backend() == backend

@pytest.fixture(scope="module")
def per_rank():
    return os.getpid()

@pytest.fixture
def same_everywhere(shared):
    return shared(lambda: os.getpid())

@pytest.mark.ranks(2)
def test_fixtures(rank, per_rank, same_everywhere, store):
    assert per_rank == os.getpid()
    store.set(f"pid {rank}", str(same_everywhere))
    assert store.get("pid 0") == store.get("pid 1")
    store.set(f"own {rank}", str(per_rank))
    assert store.get("own 0") != store.get("own 1")

@pytest.mark.ranks(2)
def test_module_fixture_is_kept(per_rank):
    assert per_rank == os.getpid()

@pytest.mark.ranks(2, group=False)
def test_without_a_group():
    assert not dist.is_initialized()

def test_plain():
    assert not dist.is_initialized()

def test_plain_cannot_use_rank(rank):
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def run(folder):
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = pytest_in(folder, "-v", "-p", "no:cacheprovider", "-rA")
    for path in Path("/dev/shm").glob("left-by-a-test-*"):
        path.unlink()
    return done.stdout


def pytest_in(folder, *args, timeout=100):
    return subprocess.run(
        [sys.executable, "-m", "pytest", *args],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def outcome(run: str, test: str) -> str:
    found = re.search(rf"^test_sample\.py::{re.escape(test)} (\w+)", run, re.MULTILINE)
    assert found, f"{test} is not in\n{run}"
    return found[1]


def block(run: str, test: str) -> str:
    """Return the part of the failure report that belongs to a test."""
    for kind in ("", "ERROR at teardown of ", "ERROR at setup of "):
        found = re.search(
            rf"^_+ {kind}{re.escape(test)} _+$(.*?)(?=^_{{3,}} [\w ]*test_|^={{3,}})",
            run,
            re.MULTILINE | re.DOTALL,
        )
        if found:
            return found[1]
    raise AssertionError(f"no report of {test} in\n{run}")


@pytest.mark.parametrize(
    "test",
    [
        "test_passes",
        "test_sizes[2ranks-1]",
        "test_sizes[4ranks-2]",
        "test_runs_after_a_loss",
        "test_may_leave_what_it_says",
        "test_starts_clean",
        "test_backends[shm]",
        "test_backends[threads]",
        "test_fixtures",
        "test_module_fixture_is_kept",
        "test_without_a_group",
        "test_plain",
    ],
)
def test_good_ones_pass(run, test):
    assert outcome(run, test) == "PASSED"


def test_failure_shows_the_failing_ranks_own_report(run):
    report = block(run, "test_one_fails")
    assert "'b': [1, 2, 4]" in report  # pytest's own diff
    assert re.search(r"^E .*At index 2 diff|Differing items", report, re.MULTILINE)
    assert re.search(r'^>\s+assert {"a": 1', report, re.MULTILINE)  # the line of source
    assert "shown above: rank 1" in report
    assert "rank 0: released: another rank had failed or ended" in report
    assert "rank 2: released: another rank had failed or ended" in report
    for rank in range(3):
        assert f"Captured stdout call (rank {rank})" in report
        assert f"output of rank {rank}" in report


def test_hang_shows_where_every_rank_stands(run):
    report = block(run, "test_hangs")
    assert "ranks 0, 1 had not finished after 1.5 s" in report
    first, second = report.split("---------- rank 1 ----------")
    assert "dist.all_reduce(torch.ones(7))" in first
    assert re.search(r"#2 all_reduce\(float32\[7\]\)  not finished", first)
    assert "rank 1 (pid" in first
    assert "time.sleep(100)" in second
    assert "_pytest" not in report  # the machinery is left out


def test_stopped_rank_is_shown_too(run):
    report = block(run, "test_hangs_with_the_lock_held")
    assert "had not finished after 1.5 s" in report
    assert "does not answer" in report


def test_death_is_reported_with_its_status(run):
    assert re.search(
        r"rank 1 died: its process \(pid \d+\) exited with code 7", block(run, "test_exits")
    )
    assert re.search(
        r"rank 0 died: its process \(pid \d+\) was killed by SIGKILL", block(run, "test_is_killed")
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("environment", "environment: LEFT_BEHIND='yes'"),
        ("thread", "thread: 'sleepy'"),
        ("process", r"process: pid \d+ \((sleep|python3?)\)"),
        ("memory", r"shared memory: /dev/shm/left-by-a-test-\d+"),
        ("socket", "socket: socket:"),
        ("threads", r"torch threads: \d became \d"),
        ("dtype", "default dtype: torch.float32 became torch.float64"),
        ("seed", "seed: torch's seed 0 became 1234"),
    ],
)
def test_what_a_test_leaves_behind_fails_it_by_name(run, what, text):
    report = block(run, f"test_leaves[{what}]")
    assert re.search(rf"rank 0 left something behind: .*{text}", report)


def test_skips_and_expected_failures_keep_their_meaning(run):
    assert outcome(run, "test_skips") == "SKIPPED"
    assert "not today" in run
    assert outcome(run, "test_expected_failure") == "XFAIL"


def test_backend_that_is_not_there_is_skipped_with_the_reason(run):
    assert outcome(run, "test_backends[gloo]") == "SKIPPED"
    assert "gradsync has no engine for 'gloo' here" in run


def test_rank_fixture_without_the_marker_says_what_is_missing(run):
    assert "needs @pytest.mark.ranks" in block(run, "test_plain_cannot_use_rank")


def test_nothing_is_left_after_the_run(run, folder):
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):  # every rank works where the test run does
                running.append(process)
    assert not running
