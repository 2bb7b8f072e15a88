"""What a mesh is made from: a checked grid, names, and a group for each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradsync.device_mesh.layout import Layout
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve
from gradsync.session.subgroups import new_group

__all__ = [
    "backends_of",
    "checked_names",
    "form_line",
    "form_lines",
    "group_named",
    "layout_of",
]


def layout_of(mesh: Any) -> Layout:
    """Return the grid of ranks that a tensor or nested lists describe."""
    ranks = torch.as_tensor(mesh)
    if ranks.is_floating_point() or ranks.is_complex() or ranks.dtype is torch.bool:
        raise UsageError(f"a mesh is made of ranks, got {mesh!r}")
    if ranks.numel() and int(ranks.min()) < 0:
        raise UsageError(f"a mesh is made of ranks, which are not negative, got {mesh!r}")
    return Layout(tuple(ranks.shape), tuple(ranks.flatten().tolist()))


def checked_names(layout: Layout, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the dimensions of a grid, one for each."""
    if names is None:
        return None
    if isinstance(names, str) or len(names) != len(layout.shape):
        raise UsageError(f"mesh_dim_names {names!r} do not fit the shape {layout.shape}")
    if len(set(names)) != len(names):
        raise UsageError(f"every dimension needs a name of its own, got {names!r}")
    return tuple(names)


def backends_of(
    count: int, names: tuple[str, ...] | None, override: Mapping[int | str, Any] | None
) -> dict[int, str]:
    """Return the backends that were asked for, by dimension."""
    found = {}
    for key, value in (override or {}).items():
        dim = names.index(key) if names and isinstance(key, str) and key in names else key
        if not isinstance(dim, int) or not 0 <= dim < count or dim in found:
            raise UsageError(
                f"backend_override has {key!r}; dimensions are {list(range(count))}"
                + (f" or {list(names)}" if names else "")
            )
        backend = value[0] if isinstance(value, tuple) else value
        if not isinstance(backend, str):
            raise UsageError(f"backend_override takes names of backends, got {value!r}")
        found[dim] = backend
    return found


def form_lines(lines: list[list[int]], about: str, backend: str | None) -> ProcessGroup | None:
    """Form a group for each line and return the caller's; the world is one already."""
    world = resolve(None)
    if backend is None and lines == [list(range(world.size()))]:
        return world
    mine = None
    for ranks in lines:
        group = new_group(ranks, backend=backend, group_desc=about, sort_ranks=False)
        if isinstance(group, ProcessGroup):
            mine = group
    return mine


def form_line(ranks: list[int], about: str, backend: str | None) -> ProcessGroup | None:
    """Form a group of one line, among its own ranks."""
    world = resolve(None)
    if backend is None and ranks == list(range(world.size())):
        return world
    group = new_group(
        ranks, backend=backend, group_desc=about, sort_ranks=False, use_local_synchronization=True
    )
    return group if isinstance(group, ProcessGroup) else None


def group_named(name: str) -> ProcessGroup:
    """Return a group of the present world by its name, for a mesh that was pickled or copied."""
    world = resolve(None)
    for group in (world, *world.children):
        if group.group_name == name:
            return group
    raise UsageError(f"a mesh has a group {name!r} along a dimension, which is not there any more")
