"""The plugin in the ways that projects are laid out: conftest files, ini options, data loaders."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

FIRST = """
import os, sys, warnings
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
"""

SECOND = """
import pytest

@pytest.mark.ranks(2)
def test_fixture_of_a_folder_again(rank, of_folder):
    assert of_folder == "here"
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
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV"))}
    env["PYTHONPATH"] = str(folder)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *args],
        cwd=folder,
        env=env,
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
    (inner / "test_second.py").write_text(SECOND)
    (folder / "plugged.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 0 --timeout=50 --lf --cov=inner\n")
    args = "-v -p plugged -o console_output_style=classic --basetemp=given"
    output, _ = pytest_in(folder, *args.split(), "-W", "error::DeprecationWarning").communicate()
    return output


@pytest.mark.parametrize(
    "test",
    [
        "test_first.py::test_fixture_of_a_folder",
        "test_second.py::test_fixture_of_a_folder_again",
        "test_first.py::test_data_loader",
        "test_first.py::test_given_options",
    ],
)
def test_passes_as_in_plain_pytest(run, test):
    assert re.search(rf"^inner/{re.escape(test)} PASSED", run, re.MULTILINE), run


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


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
