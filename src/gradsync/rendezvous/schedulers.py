"""What Slurm and mpirun say about a process, read from their environment variables.

Pure functions over a mapping; nothing is asked of the scheduler itself, because ``scontrol`` and
friends are often missing inside containers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gradsync.errors import UsageError
from gradsync.rendezvous.place import Place, TcpPlace, UnixPlace

__all__ = ["Task", "expand_nodes", "find_task", "integer"]

# Ports below the range from which the kernel hands out ephemeral ones (32768 and up), so that an
# outgoing connection of some other program does not sit on the port that a job derives.
_FIRST_PORT, _PORTS = 10_000, 20_000


class Task(NamedTuple):
    """One process as its scheduler describes it.

    ``place`` is None when the scheduler gives no way to meet; ``advice`` then says what to set.
    """

    scheduler: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    place: Place | None
    advice: str = ""


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return ``env[name]`` as an integer; an absent one is ``default`` or an error naming it."""
    text = env.get(name, "")
    if not text:
        if default is not None:
            return default
        raise UsageError(f"environment variable {name} is needed to meet the other ranks; set it")
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment variable {name} must be an integer, got {text!r}") from None


def find_task(env: Mapping[str, str], parent: Callable[[], str]) -> Task | None:
    """Return what a scheduler says about this process, None when none is at work.

    ``parent`` names the parent process for good (pid and start time); it tells two runs of mpirun
    apart when they leave no other trace.
    """
    if "OMPI_COMM_WORLD_RANK" in env:
        return _open_mpi(env, parent)
    slurm = "SLURM_PROCID" in env
    if "PMI_RANK" in env:
        # srun sets PMI_* beside its own variables and they agree. mpirun inside an allocation
        # starts its proxies through srun, so that the SLURM_* ones describe a proxy, not a rank.
        agree = (env.get("SLURM_PROCID"), env.get("SLURM_NTASKS")) == (
            env["PMI_RANK"],
            env.get("PMI_SIZE"),
        )
        if not (slurm and agree and "MPI_LOCALRANKID" not in env):
            return _pmi(env, parent)
    return _slurm(env) if slurm else None


def _open_mpi(env: Mapping[str, str], parent: Callable[[], str]) -> Task:
    return _mpi(
        env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or parent(),
        rank=integer(env, "OMPI_COMM_WORLD_RANK"),
        world_size=integer(env, "OMPI_COMM_WORLD_SIZE"),
        local_rank=integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", -1),
        local_world_size=integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE", -1),
    )


def _pmi(env: Mapping[str, str], parent: Callable[[], str]) -> Task:
    return _mpi(
        env.get("PMI_JOBID") or parent(),
        rank=integer(env, "PMI_RANK"),
        world_size=integer(env, "PMI_SIZE"),
        local_rank=integer(env, "MPI_LOCALRANKID", -1),
        local_world_size=integer(env, "MPI_LOCALNRANKS", -1),
    )


def _mpi(job: str, *, rank: int, world_size: int, local_rank: int, local_world_size: int) -> Task:
    place, advice = None, ""
    if local_world_size == world_size:
        place = UnixPlace(f"mpi-{hashlib.sha256(job.encode()).hexdigest()[:24]}")
    else:
        here = f"{local_world_size} on this host" if local_world_size > 0 else "hosts unknown"
        advice = (
            f"mpirun started {world_size} ranks ({here}) and gives no address to meet at. Export "
            "MASTER_ADDR (the host of rank 0), MASTER_PORT and GRADSYNC_TOKEN to all ranks, e.g. "
            "mpirun -x MASTER_ADDR -x MASTER_PORT -x GRADSYNC_TOKEN."
        )
    return Task("mpirun", rank, world_size, local_rank, local_world_size, place, advice)


def _slurm(env: Mapping[str, str]) -> Task:
    rank = integer(env, "SLURM_PROCID")
    size_name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = integer(env, size_name)
    place: Place | None = None
    local_world_size, advice = -1, ""
    node_list = env.get("SLURM_STEP_NODELIST", "")
    # srun sets the step's node list; SLURM_JOB_NODELIST alone is also what the batch script sees,
    # which runs once, whatever SLURM_NTASKS says.
    if node_list:
        nodes = expand_nodes(node_list)
        job = integer(env, "SLURM_JOB_ID")
        step = env.get("SLURM_STEP_ID", "0")
        if len(nodes) == 1:
            local_world_size = world_size
            place = UnixPlace(f"slurm-{job}-{step}")
        else:
            offset = job * 7 + (int(step) if step.isdigit() else 0)
            place = TcpPlace(nodes[0], _FIRST_PORT + offset % _PORTS)
    else:
        advice = (
            f"Slurm says that there are {world_size} tasks, but SLURM_STEP_NODELIST is not set: "
            "was this process started without srun? Start it with srun, or with gradsync run, or "
            "set MASTER_ADDR and MASTER_PORT."
        )
    local_rank = integer(env, "SLURM_LOCALID", -1)
    return Task("Slurm", rank, world_size, local_rank, local_world_size, place, advice)


def expand_nodes(text: str) -> list[str]:
    """Expand a Slurm node list.

    >>> expand_nodes("login,gpu[08-10,12]")
    ['login', 'gpu08', 'gpu09', 'gpu10', 'gpu12']
    """
    return [node for word in _split(text) for node in _expand_word(word)]


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise UsageError(f"cannot read the Slurm node list {text!r}: brackets do not match")
    if text[start:]:
        yield text[start:]


def _expand_word(word: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", word)
    if not match:
        return [word]
    tails = _expand_word(word[match.end() :])
    head = word[: match.start()]
    numbers = [n for part in match[1].split(",") for n in _expand_range(part, word)]
    return [head + number + tail for number in numbers for tail in tails]


def _expand_range(part: str, word: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if not match:
        raise UsageError(f"cannot read {part!r} in the Slurm node list {word!r}")
    first, last = match[1], match[2] or match[1]
    if int(last) - int(first) > 1_000_000:
        raise UsageError(f"too many nodes in the Slurm node list {word!r}")
    # Leading zeros are part of a host's name: gpu08 is not gpu8.
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
