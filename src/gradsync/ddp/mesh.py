"""Which ranks gradients are averaged over: a group, all ranks, or one dimension of a mesh."""

from __future__ import annotations

from typing import Any

from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, resolve

__all__ = ["choose_group"]


def choose_group(group: ProcessGroup | None, mesh: Any) -> ProcessGroup:
    """Return the group that the user means."""
    if mesh is None:
        return resolve(group)
    if group is not None:
        raise UsageError("give process_group or device_mesh, not both")
    if mesh.ndim != 1:
        raise UsageError(f"device_mesh has one dimension here, got {mesh.ndim}: slice it by name")
    found = mesh.get_group(0)
    if isinstance(found, ProcessGroup):
        return found
    inner = getattr(found, "group", None)  # torch's group on the backend "gradsync" has one of ours
    if isinstance(inner, ProcessGroup):
        return inner
    # A mesh of torch's has torch's groups: find ours with the same ranks.
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    world = default_group()
    known = [] if world is None else [world, *world.children]
    for candidate in known:
        if candidate.members.ranks == ranks:
            return candidate
    raise UsageError(
        f"there is no group of gradsync's with the mesh's ranks {ranks}; make it first, on all "
        f"ranks, with gradsync.new_group({list(ranks)})"
    )
