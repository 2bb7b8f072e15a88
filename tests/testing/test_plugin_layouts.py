"""The plugin in the ways that projects are laid out: conftest files, ini options, data loaders."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from inner_pytest import environment

FIRST = """
import os, subprocess, time, warnings
import pytest, torch
import gradsync as dist

@pytest.mark.ranks(2)
def test_fixture_of_a_folder(rank, of_folder):
    assert of_folder == "here"

@pytest.mark.ranks(2)
def test_data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    assert sum(1 for _ in torch.utils.data.DataLoader(data, num_workers=1)) == 4

@pytest.mark.ranks(2)
def test_given_options(rank, tmp_path, pytestconfig, from_plugin):
    assert pytestconfig.getini("console_output_style") == "classic"
    assert from_plugin == "plugged"
    assert f"given/rank-{rank}" in str(tmp_path)
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning)

@pytest.mark.ranks(2)
def test_interrupted(rank):
    if rank == 1:
        raise KeyboardInterrupt("stop it")
    dist.barrier()

@pytest.mark.ranks(2)
def test_after_an_interrupt():
    dist.barrier()

@pytest.mark.ranks(2)
@pytest.mark.timeout(2)
def test_sleeps_too_long():
    time.sleep(100)

@pytest.mark.ranks(2)
def test_memory_of_another_process():
    subprocess.run(["sh", "-c", "touch /dev/shm/gradsync-of-another-$$"], check=True)
"""

VERDICTS = """
import os, signal
import pytest, torch
import gradsync as dist
from gradsync.testing import faults

@pytest.mark.ranks(2, backend=["shm", "threads"], faults=[faults.delay(1, "barrier#3", 0)])
def test_fault_that_never_strikes():
    dist.barrier()

@pytest.mark.ranks(2, faults=[faults.kill(1, "barrier#2")])
def test_death_that_was_not_the_planned_one(rank):
    if rank == 1:
        os._exit(3)
    with pytest.raises(dist.PeerLostError):
        dist.barrier()

@pytest.fixture
def breaks(rank):
    assert rank != 0, "broken"

@pytest.mark.ranks(2)
def test_setup_breaks_on_one_rank(breaks):
    dist.barrier()

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expected_of_one_kind(rank):
    if rank == 1:
        raise ValueError("expected")
    dist.barrier()

@pytest.mark.ranks(2)
def test_output_of_a_survivor(rank):
    print("last words of", rank)
    if rank == 1:
        os._exit(3)
    dist.barrier()

made = []

@pytest.mark.ranks(3, threads=True)
def test_shared_on_threads(rank, shared):
    assert shared(lambda: made.append(rank) or 7) == 7
    dist.barrier()
    assert made == [0]
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "yes"

def test_threads_leave_the_process_alone():
    assert torch.get_default_dtype() == torch.float32
    assert "LEFT_BEHIND" not in os.environ

@pytest.mark.ranks(2, threads=True, timeout=1)
def test_hangs_on_threads(rank):
    if rank == 0:
        dist.barrier()
    else:
        import time
        time.sleep(3)
"""

SECOND = """
import warnings
import pytest

@pytest.mark.ranks(2)
def test_fixture_of_a_folder_again(rank, of_folder):
    assert of_folder == "here"

opened = []

@pytest.fixture(scope="module")
def of_module():
    opened.append(1)
    yield
    opened.append(2)

@pytest.mark.ranks(2)
def test_uses_it(of_module):
    warnings.warn("from a rank", UserWarning)

def test_plain_between():
    pass

@pytest.mark.ranks(1)
def test_one_rank_between():
    pass

@pytest.mark.ranks(2)
def test_uses_it_still(of_module):
    assert opened == [1]
"""

CONFTEST = """
import pytest

@pytest.fixture
def of_folder():
    return "here"
"""

PLUGIN = """
import pytest

@pytest.fixture
def from_plugin():
    return "plugged"
"""


def pytest_in(folder, *args):
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *args],
        cwd=folder,
        env=environment(PYTHONPATH=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    inner = folder / "inner"
    inner.mkdir()
    (inner / "conftest.py").write_text(CONFTEST)
    (inner / "test_first.py").write_text(FIRST)
    (inner / "test_verdicts.py").write_text(VERDICTS)
    (inner / "test_second.py").write_text(SECOND)
    (folder / "plugged.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 0 --timeout=50 --lf --cov=inner\n")
    args = "-v -p plugged -o console_output_style=classic --basetemp=given"
    output, _ = pytest_in(folder, *args.split(), "-W", "error::DeprecationWarning").communicate()
    for path in Path("/dev/shm").glob("gradsync-of-another-*"):
        path.unlink()
    return output


@pytest.mark.parametrize(
    "test",
    [
        "test_first.py::test_fixture_of_a_folder",
        "test_second.py::test_fixture_of_a_folder_again",
        "test_second.py::test_uses_it_still",
        "test_first.py::test_data_loader",
        "test_first.py::test_given_options",
        "test_first.py::test_after_an_interrupt",
        "test_first.py::test_memory_of_another_process",
        "test_verdicts.py::test_shared_on_threads",
        "test_verdicts.py::test_threads_leave_the_process_alone",
    ],
)
def test_passes_as_in_plain_pytest(run, test):
    assert re.search(rf"^inner/{re.escape(test)} PASSED", run, re.MULTILINE), run


def test_interrupt_on_a_rank_fails_its_own_test(run):
    assert re.search(r"^inner/test_first.py::test_interrupted FAILED", run, re.MULTILINE), run
    assert "rank 1: failed: KeyboardInterrupt: stop it" in run


def test_warnings_of_ranks_are_listed_once(run):
    assert run.count("UserWarning: from a rank") == 1


def test_deadline_comes_before_that_of_pytest_timeout(run):
    assert "ranks 0, 1 had not finished after 1.5 s" in run
    assert "INTERNALERROR" not in run


def outcomes(run, test):
    return re.findall(rf"^inner/test_verdicts.py::{re.escape(test)} (\w+)", run, re.MULTILINE)


def test_plan_that_does_not_come_true_fails(run):
    assert outcomes(run, "test_fault_that_never_strikes[shm]") == ["FAILED"]
    assert outcomes(run, "test_fault_that_never_strikes[threads]") == ["FAILED"]
    assert run.count("delay on rank 1 at barrier#3, but it made only 1 such calls") >= 2
    assert outcomes(run, "test_death_that_was_not_the_planned_one") == ["FAILED"]


def test_consequences_are_not_counted_as_failures(run):
    assert outcomes(run, "test_setup_breaks_on_one_rank") == ["ERROR"]
    assert outcomes(run, "test_expected_of_one_kind") == ["XFAIL"]


def test_death_shows_what_the_others_wrote(run):
    assert outcomes(run, "test_output_of_a_survivor") == ["FAILED"]
    assert re.search(r"Captured stdout call \(rank 0\) -+\nlast words of 0", run)
    assert "---------- rank 0 ----------\nreleased: another rank had failed or ended" in run


def test_hang_on_threads_shows_every_rank(run):
    assert outcomes(run, "test_hangs_on_threads") == ["FAILED"]
    report = run[run.index("ranks 0, 1 had not finished after 1 s") :]
    assert "dist.barrier()" in report
    assert "time.sleep(3)" in report
    assert "thread_item.py" not in report.split("====")[0]


BUSY = """
import os, re, time
import pytest, torch

@pytest.mark.ranks(2)
def test_holds_the_lock(rank):
    with open(f"{rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")
"""


def test_killed_controller_takes_even_ranks_that_hold_the_lock_along(tmp_path):
    (tmp_path / "test_busy.py").write_text(BUSY)
    child = pytest_in(tmp_path, "-q")
    pids = [tmp_path / f"{rank}.pid" for rank in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in pids))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))


def test_interrupting_pytest_does_not_wait_for_busy_ranks(tmp_path):
    (tmp_path / "test_busy.py").write_text(BUSY)
    child = pytest_in(tmp_path, "-q")
    until(lambda: all((tmp_path / f"{rank}.pid").exists() for rank in range(2)))
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert time.monotonic() - start < 4


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
