"""One job on this host: its name and secret, the store that its launcher serves, its guardian.

Both launchers own exactly one ``Job`` for as long as any rank may live.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping

from gradsync import _native
from gradsync.errors import UsageError
from gradsync.launch import guardian
from gradsync.stores.unix import UnixStore

__all__ = ["Job", "one_for_each_core", "rank_environment"]


def one_for_each_core() -> int:
    """Return how many ranks have a core each: of those that mask and cgroup leave to us."""
    return max(1, _native.usable_cores())


def rank_environment(
    base: Mapping[str, str],
    rank: int,
    nprocs: int,
    *,
    store: str,
    token: str,
    master: tuple[str, str],
    threads: str,
) -> dict[str, str]:
    """Return the environment of one rank: torchrun's variables and the way to the job's store.

    >>> master = ("127.0.0.1", "4242")
    >>> env = rank_environment({}, 1, 2, store="unix:x", token="t", master=master, threads="3")
    >>> env["RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"]
    ('1', '2', '3')
    """
    env = dict(base)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_WORLD_SIZE=str(nprocs),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_RANK=str(rank),
        ROLE_NAME="default",
        ROLE_WORLD_SIZE=str(nprocs),
        MASTER_ADDR=master[0],
        MASTER_PORT=master[1],
        TORCHELASTIC_RUN_ID=store.rpartition(":")[2],
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        # torch's own init would take a "True" inherited from torchrun for a store on our port.
        TORCHELASTIC_USE_AGENT_STORE="False",
        OMP_NUM_THREADS=threads,
        GRADSYNC_STORE=store,
        GRADSYNC_TOKEN=token,
    )
    return env


class Job:
    """The launcher's side of a job; ``close`` it when the last rank has ended.

    ``master`` is for programs that read MASTER_ADDR and MASTER_PORT: an address that the caller
    chose, or by default a port of this host on which nothing listens yet.
    """

    def __init__(
        self,
        nprocs: int,
        base: Mapping[str, str],
        *,
        threads: int | None = None,
        master: tuple[str, str] | None = None,
    ) -> None:
        if not isinstance(nprocs, int) or nprocs < 1:
            raise UsageError(f"the number of processes must be at least 1, got {nprocs!r}")
        if threads is not None and threads < 1:
            raise UsageError(f"a rank needs at least one thread, got {threads}")
        self.nprocs = nprocs
        self._base = base
        self._name = f"gradsync-{secrets.token_hex(16)}"
        self._token = secrets.token_hex(32)
        self._master = master or ("127.0.0.1", str(_free_port()))
        self.threads = str(threads or "") or _usual_threads(nprocs, base)
        # The guardian comes first: from here on a SIGKILL of this process leaves nothing.
        self._guardian = self._start_guardian()
        try:
            self._store = UnixStore(self._name, is_master=True, token=self._token)
        except BaseException:
            self._dismiss_guardian()
            raise

    def environment(self, rank: int) -> dict[str, str]:
        """Return the whole environment for one rank."""
        return rank_environment(
            self._base,
            rank,
            self.nprocs,
            store=f"unix:{self._name}",
            token=self._token,
            master=self._master,
            threads=self.threads,
        )

    def started(self, pid: int) -> None:
        """Note a rank that leads, or will lead, a process group of its own."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """Note that a rank is gone, before its number is given back to the system."""
        self._tell(f"-{pid}\n")

    def end_strays(self) -> None:
        """Kill what is left of the job anywhere: children of ranks in sessions of their own."""
        guardian.end_everything(set(), self._mark)

    def close(self) -> None:
        """Stop serving and send the guardian home."""
        self._dismiss_guardian()
        del self._store

    @property
    def _mark(self) -> bytes:
        return b"GRADSYNC_STORE=unix:" + self._name.encode()

    def _start_guardian(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid()), self._mark.decode()],
            stdin=subprocess.PIPE,
            # Holding the launcher's output open would keep a reader of it waiting.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Away from the terminal's Ctrl-C and from a kill of the launcher's process group. The
            # empty environment hides it from the launcher above when jobs are nested.
            start_new_session=True,
            env={},
            cwd="/",
        )

    def _tell(self, text: str) -> None:
        pipe = self._guardian.stdin
        assert pipe is not None
        try:
            pipe.write(text.encode())
            pipe.flush()
        except OSError:
            pass  # somebody killed the guardian; the launcher still ends its ranks itself

    def _dismiss_guardian(self) -> None:
        self._tell("q\n")
        assert self._guardian.stdin is not None
        try:
            self._guardian.stdin.close()
        except OSError:
            pass
        self._guardian.wait()


def _usual_threads(nprocs: int, base: Mapping[str, str]) -> str:
    """An even share of the cores that the affinity mask and the cgroup leave to this process."""
    return base.get("OMP_NUM_THREADS") or str(max(1, _native.usable_cores() // nprocs))


def _free_port() -> int:
    """Return a port that is free now; nothing listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
