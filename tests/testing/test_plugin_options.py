"""The plugin beside pytest's own options and other plugins: -x, --lf, xdist, coverage, --pdb."""

import json
import subprocess
import sys

import pexpect
import pytest
from inner_pytest import environment

SAMPLE = """
import pytest, torch
import gradsync as dist
import shop

@pytest.mark.ranks(2)
def test_first(rank):
    assert shop.price(rank) >= 0
    dist.barrier()

@pytest.mark.ranks(2)
def test_second(rank):
    bill = 42
    assert rank != 1, "rank 1 has no money"

@pytest.mark.ranks(2)
def test_third(rank):
    dist.barrier()

@pytest.mark.ranks(3, threads=True)
def test_fourth(rank):
    dist.barrier()
"""

SHOP = """
def price(rank):
    if rank == 0:
        return 0
    return 1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


def run(folder, *args):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *args],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def test_stop_at_first_failure_and_last_failed(folder):
    assert "1 failed, 1 passed" in run(folder, "-x")
    again = run(folder, "--lf")
    assert "1 failed" in again
    assert "rank 1 has no money" in again


def test_xdist(folder):
    output = run(folder, "-n", "2")
    assert "1 failed, 3 passed" in output
    assert "rank 1 has no money" in output


LOOP = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    some = [item for item in session.items if "again" not in item.name]
    for item, following in zip(some, [*some[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True
"""

ONE_MODULE = """
import pytest

@pytest.fixture(scope="module", autouse=True)
def around():
    yield
    print("end of", __name__)

@pytest.mark.ranks(2)
def test_on_ranks(rank): pass

def test_here(): pass

@pytest.mark.ranks(2)
def test_on_ranks_again(rank): pass
"""


def test_items_may_come_in_another_order_than_they_were_collected(tmp_path):
    # As they do for a worker of xdist, which takes what is left; whoever guesses that a module goes
    # on is wrong here.
    (tmp_path / "conftest.py").write_text(LOOP)
    (tmp_path / "test_a.py").write_text(ONE_MODULE)
    (tmp_path / "test_b.py").write_text(ONE_MODULE)
    assert "4 passed" in run(tmp_path)


def test_coverage_counts_what_ranks_ran(folder):
    output = run(folder, "--cov=shop", "--cov-report=json", "-k", "first")
    assert "1 passed, 3 deselected" in output
    report = json.loads((folder / "coverage.json").read_text())
    # Line 4 runs on rank 0 only, line 5 on rank 1 only.
    assert report["files"]["shop.py"]["missing_lines"] == []
    assert {4, 5} <= set(report["files"]["shop.py"]["executed_lines"])


FAULT = """
import pytest, torch
import gradsync as dist
from gradsync.testing import faults

@pytest.mark.ranks(2, faults=[faults.kill(rank=1, at="all_reduce#1")])
def test_killed(rank):
    with pytest.raises(dist.PeerLostError):
        dist.all_reduce(torch.ones(1))
"""


def test_coverage_is_kept_when_a_rank_is_killed_later(folder):
    (folder / "test_then.py").write_text(FAULT)
    output = run(folder, "--cov=shop", "--cov-report=json", "-k", "first or killed")
    assert "2 passed, 3 deselected" in output
    report = json.loads((folder / "coverage.json").read_text())
    assert report["files"]["shop.py"]["missing_lines"] == []


@pytest.mark.parametrize("option", ["--pdb-rank=1", "--pdb"])
def test_pdb_on_a_chosen_rank_or_the_one_that_fails(folder, option):
    command = ["-m", "pytest", "-q", option, "-k", "second"]
    child = pexpect.spawn(sys.executable, command, cwd=str(folder), env=environment(), timeout=60)
    try:
        child.expect(r"\(Pdb\)")
        child.sendline("p (rank, bill)")
        child.expect(r"\(1, 42\)")
        child.sendline("c")
        child.expect("rank 1 has no money")
        child.expect("1 failed|FAILED")
    finally:
        child.close(force=True)
