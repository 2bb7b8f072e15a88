"""Questions about groups and backends, with torch's names."""

from __future__ import annotations

from typing import NewType, TypeAlias

from gradsync.backends.registry import Backend, BackendConfig, engine_of
from gradsync.config import environment
from gradsync.errors import BackendUnavailable, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import NON_GROUP_MEMBER, default_group, is_non_member, resolve
from gradsync.stores.store import Store

__all__ = [
    "GroupMember",
    "GroupName",
    "RankType",
    "_get_default_group",
    "_get_default_store",
    "_rank_not_in_group",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
]


GroupName = NewType("GroupName", str)
"""For annotations: the ``group_name`` of a group."""

RankType: TypeAlias = int
"""For annotations: a rank."""


class _LiveWorld(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802  (torch's name)
        return default_group()


class GroupMember(metaclass=_LiveWorld):
    """``GroupMember.WORLD`` is the default group; the other is what non-members get."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


def is_initialized() -> bool:
    """Return whether the default group exists."""
    return default_group() is not None


def get_rank(group: ProcessGroup | int | None = None) -> int:
    """Return the caller's rank in the group (the default one unless given), -1 if not in it."""
    return -1 if is_non_member(group) else resolve(group).rank()


def get_world_size(group: ProcessGroup | int | None = None) -> int:
    """Return the number of ranks in the group (the default one unless given), -1 if not in it."""
    return -1 if is_non_member(group) else resolve(group).size()


def get_backend(group: ProcessGroup | int | None = None) -> str:
    """Return the name of the group's backend."""
    return resolve(group).name()


def get_backend_config(group: ProcessGroup | int | None = None) -> str:
    """Return which backend of the group serves which kind of device.

    >>> import gradsync
    >>> gradsync.init_process_group("cpu:shm")
    >>> gradsync.get_backend_config(), gradsync.get_backend()
    ('cpu:shm', 'shm')
    >>> gradsync.destroy_process_group()
    """
    return resolve(group).backend_config


def get_default_backend_for_device(device: object) -> str:
    """Return the backend that groups use for tensors on a device.

    >>> get_default_backend_for_device("cpu")
    'shm'
    """
    kind = getattr(device, "type", str(device).partition(":")[0])
    if kind not in Backend.default_device_backend_map:
        there = ", ".join(map(repr, Backend.default_device_backend_map))
        raise UsageError(f"there is no backend for {device!r}; there is one for {there}")
    return Backend.default_device_backend_map[kind]


def _get_default_group() -> ProcessGroup:
    return resolve(None)


def _get_default_store() -> Store | None:
    return resolve(None).members.store


def _rank_not_in_group(group: ProcessGroup | int | None) -> bool:
    return is_non_member(group)


def get_process_group_ranks(group: ProcessGroup | int | None = None) -> list[int]:
    """Return the world ranks of the group's members, in the order of their ranks in it."""
    return list(resolve(group).members.ranks)


def get_group_rank(group: ProcessGroup | int | None, global_rank: int) -> int:
    """Return the rank in ``group`` of a rank of the world."""
    return resolve(group).members.group_rank(global_rank)


def get_global_rank(group: ProcessGroup | int | None, group_rank: int) -> int:
    """Return the rank in the world of a rank of ``group``."""
    return resolve(group).members.world_rank(group_rank)


def get_pg_count() -> int:
    """Return how many groups have been made, those without the caller included."""
    world = default_group()
    return 0 if world is None else 1 + sum(world.made.values())


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank on this host as the launcher set it, or the fallback."""
    text = environment().get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is None:
        raise UsageError("LOCAL_RANK is not set; start with gradsync run, or pass fallback_rank")
    return fallback_rank


def is_torchelastic_launched() -> bool:
    """Return whether a launcher of torchrun's kind started this process."""
    return "TORCHELASTIC_RUN_ID" in environment()


def is_available() -> bool:
    """Return True: gradsync works wherever it can be imported."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether gradsync can form groups on a backend.

    >>> is_backend_available("shm"), is_backend_available("cpu:shm"), is_backend_available("nccl")
    (True, True, False)
    """
    try:
        engine_of(BackendConfig(backend))
    except (BackendUnavailable, UsageError):
        return False
    return True


def is_gloo_available() -> bool:
    """Return whether groups can run on Gloo."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return whether groups can run on NCCL."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether groups can run on MPI."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether groups can run on UCC."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether groups can run on XCCL."""
    return is_backend_available("xccl")
