"""An init method and an environment, parsed into a ``Spec``: who am I, where do we meet.

Pure: no file, no socket, no ``os.environ``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from gradsync.errors import UsageError
from gradsync.rendezvous.place import AgentPlace, Alone, FilePlace, Place, TcpPlace, UnixPlace
from gradsync.rendezvous.schedulers import Task, find_task, integer

__all__ = ["Spec", "parse"]


class Spec(NamedTuple):
    """One rank's view of a meeting before anybody was spoken to.

    ``local_rank`` and ``local_world_size`` are -1 when nothing tells them.
    """

    rank: int
    world_size: int
    place: Place
    local_rank: int = -1
    local_world_size: int = -1
    token: str = ""

    def __repr__(self) -> str:
        """Show all but the token."""
        shown = ", ".join(f"{n}={v!r}" for n, v in zip(self._fields[:-1], self[:-1], strict=True))
        return f"Spec({shown})"


def parse(
    init_method: str | None,
    rank: int,
    world_size: int,
    env: Mapping[str, str],
    parent: Callable[[], str] = str,
) -> Spec:
    """Return the spec that an init method and an environment describe; -1 means "not given".

    Explicit arguments beat the environment. ``parent`` names the parent process for good; only a
    job under mpirun that leaves no other trace needs it.

    >>> parse("tcp://localhost:29500", 1, 2, {}).place
    TcpPlace(host='localhost', port=29500)
    >>> parse(None, -1, -1, {}).world_size
    1
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name} must be an integer, got {value!r}")
    if init_method is None:
        return _from_environment(rank, world_size, env, parent, bare=True)
    if not isinstance(init_method, str):
        raise UsageError(f"init_method must be a string, got {init_method!r}")
    url = urlsplit(init_method)
    rank, world_size = _merge_query(url, rank, world_size)
    if url.scheme == "env":
        return _from_environment(rank, world_size, env, parent, bare=False)
    if url.scheme == "tcp":
        return _from_tcp(url, rank, world_size, env)
    if url.scheme == "file":
        return _from_file(url, rank, world_size, env)
    raise UsageError(
        f"no rendezvous handler for {url.scheme}:// in init_method {init_method!r}; known are "
        "env://, tcp://, file:// and those added with register_rendezvous_handler"
    )


def _merge_query(url: SplitResult, rank: int, world_size: int) -> tuple[int, int]:
    """Fill in what the query says; the same thing twice is an error, as in torch."""
    values = {"rank": rank, "world_size": world_size}
    for name, text in parse_qsl(url.query, keep_blank_values=True):
        if name == "use_libuv":  # torch's choice between its two servers; here there is one
            continue
        if name not in values:
            raise UsageError(f"unknown parameter {name!r} in init_method {url.geturl()!r}")
        if values[name] != -1:
            raise UsageError(f"{name} is given twice: check the arguments and {url.geturl()!r}")
        try:
            values[name] = int(text)
        except ValueError:
            raise UsageError(
                f"{name} in init_method {url.geturl()!r} must be an integer, got {text!r}"
            ) from None
    return values["rank"], values["world_size"]


def _from_tcp(url: SplitResult, rank: int, world_size: int, env: Mapping[str, str]) -> Spec:
    try:
        port = url.port
    except ValueError:
        raise UsageError(f"the port of init_method {url.geturl()!r} is not in 0..65535") from None
    if not url.hostname or port is None:
        raise UsageError(f"init_method {url.geturl()!r} needs a host and a port: tcp://host:port")
    _need_both(url, rank, world_size)
    return _spec(rank, world_size, TcpPlace(url.hostname, port), env, None)


def _from_file(url: SplitResult, rank: int, world_size: int, env: Mapping[str, str]) -> Spec:
    # file://name/rest is a common slip for file:///name/rest, and torch takes it the same way.
    path = url.netloc + url.path
    if not path:
        raise UsageError(f"init_method {url.geturl()!r} needs a path: file:///shared/folder/name")
    _need_both(url, rank, world_size)
    return _spec(rank, world_size, FilePlace(path), env, None)


def _need_both(url: SplitResult, rank: int, world_size: int) -> None:
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value == -1:
            raise UsageError(
                f"init_method {url.geturl()!r} needs {name}: pass {name}= or append ?{name}=…"
            )


def _from_environment(
    rank: int, world_size: int, env: Mapping[str, str], parent: Callable[[], str], *, bare: bool
) -> Spec:
    if bare and world_size == 1:
        return _spec(max(rank, 0), 1, Alone(), {}, None)
    store = env.get("GRADSYNC_STORE", "")
    if world_size != -1 and world_size != integer(env, "WORLD_SIZE", world_size):
        store = ""  # a world other than the launcher's, over several hosts perhaps
    named = env.get("RANK") or env.get("WORLD_SIZE")
    task = None if store or named else find_task(env, parent)
    nothing = not (store or named or task or env.get("MASTER_ADDR") or env.get("MASTER_PORT"))
    if bare and nothing and rank == -1 and world_size == -1:
        return _spec(0, 1, Alone(), env, None)
    if rank == -1:
        rank = task.rank if task else integer(env, "RANK")
    if world_size == -1:
        world_size = task.world_size if task else integer(env, "WORLD_SIZE")
    place = _launched(store) if store else _meeting_place(env, task, world_size)
    if world_size == 1:
        place = Alone()
    return _spec(rank, world_size, place, env, task)


def _launched(store: str) -> UnixPlace:
    scheme, _, name = store.partition(":")
    if scheme != "unix" or not name:
        raise UsageError(
            f"GRADSYNC_STORE must look like unix:NAME, got {store!r}; the launcher sets it, so "
            "unset it to meet at MASTER_ADDR and MASTER_PORT"
        )
    return UnixPlace(name, launched=True)


def _meeting_place(env: Mapping[str, str], task: Task | None, world_size: int) -> Place:
    if task and not env.get("MASTER_ADDR") and not env.get("MASTER_PORT"):
        if world_size == 1:
            return Alone()
        if task.place is None:
            # Going on alone here is how N processes train N models and nobody notices.
            raise UsageError(task.advice)
        return task.place
    host = env.get("MASTER_ADDR", "")
    if not host:
        integer(env, "MASTER_ADDR")  # raises, naming it
    port = integer(env, "MASTER_PORT")
    if not 0 <= port <= 65535:
        raise UsageError(f"environment variable MASTER_PORT must be in 0..65535, got {port}")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        run = env.get("TORCHELASTIC_RUN_ID", "none")
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return AgentPlace(host, port, f"gradsync/{run}/{attempt}")
    return TcpPlace(host, port)


def _spec(
    rank: int, world_size: int, place: Place, env: Mapping[str, str], task: Task | None
) -> Spec:
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank must be in 0..{world_size - 1} for a world of {world_size}, got {rank}"
        )
    return Spec(
        rank,
        world_size,
        place,
        local_rank=task.local_rank if task else integer(env, "LOCAL_RANK", -1),
        local_world_size=task.local_world_size if task else integer(env, "LOCAL_WORLD_SIZE", -1),
        token=env.get("GRADSYNC_TOKEN", ""),
    )
