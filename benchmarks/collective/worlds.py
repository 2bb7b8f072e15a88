"""Worlds of ranks that wait for orders, one for each system, and what it takes to start them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 300.0
HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "bench"
SYSTEMS = ("gradsync", "gloo", "openmpi", "mpich")
MPIS = ("openmpi", "mpich")


def pages(system: str, huge: bool) -> dict[str, str]:
    """Return what gives every system memory of the same kind.

    Left alone, numpy asks for huge pages from 4 MiB on and torch does not, so that the MPIs would
    copy up to twice as fast for what is allocated, and not for what is measured.
    """
    if system in MPIS:
        return {"NUMPY_MADVISE_HUGEPAGE": str(int(huge))}
    return {"THP_MEM_ALLOC_ENABLE": str(int(huge))}


def settings(system: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment that serve a system best, beyond its defaults.

    Both MPIs spin while they wait. With more ranks than cores they are told to yield on every
    poll, without which the waiting keep the working ranks off the cores. No rank is bound to a
    core, which is no better on an idle machine and worse on a busy one.
    """
    crowded = ranks > len(os.sched_getaffinity(0))
    if system == "openmpi":
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        options += ["--mca", "mpi_yield_when_idle", "1"] if crowded else []
        return [*options, "-n", str(ranks)], {}
    if system == "mpich":
        return ["-bind-to", "none", "-n", str(ranks)], (
            {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if crowded else {}
        )
    return [], {"GLOO_SOCKET_IFNAME": "lo"} if system == "gloo" else {}


def environment_of(mpi: str) -> Path:
    """Return the folder of the environment that has an MPI, set up when it is missing.

    The two wheels cannot live in one environment, and mpi4py finds the MPI that is beside it.
    """
    folder = ENVIRONMENTS / mpi
    done = folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run(
            [folder / "bin" / "pip", "install", "-q", "mpi4py", mpi, "numpy"], check=True
        )
        done.touch()
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class World:
    """All ranks of one system; they sleep in a read from a socket until they get an order."""

    def __init__(self, system: str, ranks: int, huge_pages: bool = False) -> None:
        self.system, self.ranks, self.pages = system, ranks, pages(system, huge_pages)
        self.folder = tempfile.TemporaryDirectory(prefix="gradsync-bench-")
        self.log = open(Path(self.folder.name) / "log", "w+b")  # noqa: SIM115
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lines: list[Any] = []
        try:
            self._start()
            self.about = self._answers()[0]
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        address = str(Path(self.folder.name) / "socket")
        script = [str(HERE / "rank.py"), self.system, address]
        options, extra = settings(self.system, self.ranks)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **extra, **self.pages}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(self.ranks)
            server.settimeout(1.0)
            if self.system in MPIS:
                bin_folder = environment_of(self.system) / "bin"
                self._spawn([bin_folder / "mpirun", *options, bin_folder / "python", *script], env)
            else:
                env |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.ranks)}
                for rank in range(self.ranks):
                    self._spawn([sys.executable, *script], {**env, "RANK": str(rank)})
            deadline = time.monotonic() + PATIENCE_S
            while len(self.lines) < self.ranks:
                try:
                    link, _ = server.accept()
                except TimeoutError:
                    if time.monotonic() > deadline or any(p.poll() for p in self.processes):
                        self._fail()
                else:
                    link.settimeout(PATIENCE_S)
                    self.lines.append(link.makefile("rw"))

    def _spawn(self, command: list[Any], env: dict[str, str]) -> None:
        self.processes.append(
            subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log
            )
        )

    def ask(self, order: str, **arguments: object) -> list[Any]:
        """Give every rank an order and return what each answers."""
        for lines in self.lines:
            lines.write(json.dumps([order, arguments]) + "\n")
            lines.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            answers = [lines.readline() for lines in self.lines]
        except TimeoutError:
            self._fail()
        if not all(answers):
            self._fail()
        return [json.loads(answer) for answer in answers]

    def _fail(self) -> None:
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        raise SystemExit(f"the {self.ranks} ranks of {self.system} do not answer:\n{text[-4000:]}")

    def _end(self) -> None:
        for lines in self.lines:
            lines.close()  # a rank that waits for an order ends by itself, and tidies up
        for process in self.processes:
            for end in (lambda: None, process.terminate, process.kill):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
                    break
        self.log.close()
        self.folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.ask("close")
            for process in self.processes:
                process.wait(PATIENCE_S)
        self._end()
