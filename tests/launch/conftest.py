from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradsync.launch.guardian import find_carriers

Launch = Callable[..., "subprocess.Popen[str]"]

_FOREIGN = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "GRADSYNC_")
_MARK = b"TEST_OF_LAUNCHERS=%d" % os.getpid()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Launch]:
    """Start a program of this test; nothing that descends from it may outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env.pop("OMP_NUM_THREADS", None)
    name, _, value = _MARK.decode().partition("=")

    def start_process(*command: object, **values: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env | {name: value} | {n: str(v) for n, v in values.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start_process
    # They are ended by a guardian, which needs a core for that as everybody does.
    deadline = time.monotonic() + 3
    time.sleep(0.05)
    while (survivors := find_carriers(_MARK)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.kill()
        process.communicate()
    assert not survivors, "the test left processes behind"


@pytest.fixture
def gradsync_run(start: Launch) -> Launch:
    """Start ``gradsync run`` with the given words."""

    def launch(*words: object, **values: object) -> subprocess.Popen[str]:
        return start(sys.executable, "-m", "gradsync", "run", *words, **values)

    return launch
