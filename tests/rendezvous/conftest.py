from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
from ranks_environment import clean_environment

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that runs a piece of Python; ended at the end of the test at the latest."""
    processes: list[subprocess.Popen[str]] = []

    def start_process(
        code: str, *, prefix: tuple[str, ...] = (), **env: object
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", textwrap.dedent(code)],
            env=clean_environment(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def free_port() -> int:
    """A port number that no other test uses at this moment; rendezvous does not open it."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
