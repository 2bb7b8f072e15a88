"""``DeviceMesh``: a grid of ranks with a group for each of its lines, under torch's names.

A mesh that is sliced or flattened from another shares its groups: all of them are kept by the root.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from gradsync.device_mesh.grid import Grid
from gradsync.device_mesh.layout import Dims, Layout
from gradsync.device_mesh.lines import (
    backends_of,
    checked_names,
    form_line,
    form_lines,
    group_named,
    layout_of,
)
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group, resolve
from gradsync.session.lifecycle import init_process_group

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh"]

_entered = threading.local()


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Lay the ranks 0, 1, 2, … out in a grid; every rank of the world calls this.

    The default group is initialised if it is not yet.

    >>> import gradsync
    >>> mesh = gradsync.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> mesh["tp"].get_group().size()
    1
    >>> gradsync.destroy_process_group()
    """
    shape = tuple(mesh_shape)
    if not all(isinstance(length, int) and length > 0 for length in shape):
        raise UsageError(f"mesh_shape is made of numbers above 0, got {mesh_shape!r}")
    ranks = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    return DeviceMesh(
        device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backend_override
    )


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` around the caller."""
    stack = getattr(_entered, "stack", None)
    if not stack:
        raise UsageError("there is no mesh around this: use `with mesh:`")
    found: DeviceMesh = stack[-1]
    return found


class DeviceMesh(Grid):
    """Ranks in a grid, with a group along each dimension.

    Args:
        device_type: ``"cpu"``; the kind of device that the tensors are on.
        mesh: ranks of the world as a tensor or nested lists. Ranks in a group are in this order.
        mesh_dim_names: a name for each dimension.
        backend_override: a backend for some of the dimensions, by name or number.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> None:
        layout = layout_of(mesh)
        names = checked_names(layout, mesh_dim_names)
        if default_group() is None:
            init_process_group()
        world = resolve(None)
        if len(layout.ranks) > world.size() or max(layout.ranks) >= world.size():
            raise UsageError(
                f"a mesh of the ranks {list(layout.ranks)} does not fit into a world of "
                f"{world.size()}"
            )
        backends = backends_of(len(layout.shape), names, backend_override)
        self._become(device_type, layout, tuple((d,) for d in range(len(layout.shape))), names)
        for dim in range(len(layout.shape)):
            about = f"mesh_{names[dim]}" if names else f"mesh_dim_{dim}"
            self._groups[(dim,)] = form_lines(layout.lines((dim,)), about, backends.get(dim))

    def _become(
        self,
        device_type: str,
        layout: Layout,
        dims: tuple[Dims, ...],
        names: tuple[str, ...] | None,
        root: DeviceMesh | None = None,
    ) -> None:
        if ":" in device_type:
            raise UsageError(f"device_type is a kind of device without a number, got {device_type}")
        self.device_type = device_type
        self.mesh_dim_names = names
        self._dims = dims
        """Each dimension as dimensions of the root's layout."""
        self._rank = resolve(None).rank()
        self._root = self if root is None else root
        self._groups: dict[Dims, ProcessGroup | str | None] = {} if root is None else root._groups
        """None where the caller is in none; a name after pickling, until it is asked for."""
        self._flattened: dict[str, Dims] = {} if root is None else root._flattened
        self._layout = layout
        """What this mesh itself looks like."""

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Make a mesh of groups that exist: one, or one for each dimension of ``mesh``."""
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if not groups:
            raise UsageError("from_group needs at least one group")
        if not isinstance(group, ProcessGroup) and (mesh is None or mesh_dim_names is None):
            raise UsageError("from_group needs mesh and mesh_dim_names for a list of groups")
        layout = layout_of(list(groups[0].members.ranks) if mesh is None else mesh)
        if len(layout.shape) != len(groups):
            raise UsageError(f"{len(groups)} groups for a mesh of {len(layout.shape)} dimensions")
        made = cls.__new__(cls)
        names = checked_names(layout, mesh_dim_names)
        made._become(device_type, layout, tuple((d,) for d in range(len(groups))), names)
        for dim, each in enumerate(groups):
            mine = [line for line in layout.lines((dim,)) if made._rank in line]
            if mine != [list(each.members.ranks)]:
                raise UsageError(
                    f"dimension {dim} of the mesh has the ranks {mine} where the group has "
                    f"{list(each.members.ranks)}"
                )
            made._groups[(dim,)] = each
        return made

    # -- what it looks like -----------------------------------------------------------------------

    @property
    def root(self) -> DeviceMesh:
        """The mesh that this one was sliced or flattened from; itself for one that was not."""
        return self._root

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the caller's place along a dimension, which is its rank in the group too."""
        at = self._index("get_local_rank", mesh_dim)
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise self._outside()
        return coordinate[at]

    # -- groups -----------------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the caller's group along a dimension; a mesh of one needs no name for it."""
        dims = self._dims[self._index("get_group", mesh_dim)]
        found = self._groups[dims]
        if found is None:
            raise self._outside()
        if isinstance(found, str):
            found = self._groups[dims] = group_named(found)
        return found

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the caller's group along each dimension."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    # -- other views ------------------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the part of the mesh around the caller that has the named dimensions."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self.mesh_dim_names is None:
            raise UsageError("a mesh without mesh_dim_names cannot be sliced")
        if names == self.mesh_dim_names:
            return self
        known = dict(zip(self.mesh_dim_names, self._dims, strict=True))
        if self._root is self:
            known |= self._flattened
        for name in names:
            if name not in known:
                raise KeyError(f"the mesh has no dimension {name!r}; it has {list(known)}")
        dims = tuple(known[name] for name in names)
        every = [dim for each in dims for dim in each]
        if len(set(every)) != len(every):
            raise UsageError(f"the dimensions {names} overlap")
        long = [dim for dim in every if self._root.shape[dim] > 1]
        if long != sorted(long):
            raise KeyError(f"dimensions are sliced in the order of the mesh, got {names}")
        return self._view(dims, names)

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return a mesh with all dimensions taken as one; every rank of the world calls this.

        Its name, by default the names joined by ``_``, is from now on one of the root's dimensions.
        """
        if self.mesh_dim_names is None:
            raise UsageError("a mesh without mesh_dim_names cannot be flattened")
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        if name in (self._root.mesh_dim_names or ()):
            raise UsageError(f"the mesh has a dimension {name!r} already; give another name")
        dims = tuple(dim for each in self._dims for dim in each)
        if self._flattened.get(name, dims) != dims:
            raise UsageError(f"{name!r} is another flattened mesh already; give another name")
        if dims not in self._groups:
            self._groups[dims] = form_lines(self._root._layout.lines(dims), f"mesh_{name}", None)
        self._flattened[name] = dims
        return self._view((dims,), (name,))

    _flatten = flatten

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> DeviceMesh:
        """Return a mesh with one dimension cut into several; every rank of this mesh calls this.

        The groups along the other dimensions are shared. The result is a mesh of its own: the names
        of its new dimensions are not known to this one.
        """
        if self.mesh_dim_names is None:
            raise UsageError("a mesh without mesh_dim_names cannot be unflattened")
        if isinstance(dim, str) and dim not in self.mesh_dim_names:
            raise UsageError(f"no dimension {dim!r}; there are {self.mesh_dim_names}")
        if isinstance(dim, int) and not -self.ndim <= dim < self.ndim:
            raise UsageError(f"no dimension {dim} in a mesh with {self.ndim}")
        at = self._index("unflatten", dim)
        if prod(mesh_sizes) != self.shape[at]:
            raise UsageError(f"{tuple(mesh_sizes)} do not make a dimension of {self.shape[at]}")
        inner = checked_names(
            Layout(tuple(mesh_sizes), tuple(range(self.shape[at]))), mesh_dim_names
        )
        backends = backends_of(len(mesh_sizes), inner, backend_override)
        shape = (*self.shape[:at], *mesh_sizes, *self.shape[at + 1 :])
        layout = Layout(shape, self._layout.ranks)
        names = (*self.mesh_dim_names[:at], *(inner or ()), *self.mesh_dim_names[at + 1 :])
        made = DeviceMesh.__new__(DeviceMesh)
        dims = tuple((each,) for each in range(len(shape)))
        made._become(self.device_type, layout, dims, checked_names(layout, names))
        kept = [self._groups[each] for each in self._dims]
        formed = [
            form_line(line, f"mesh_{names[each]}", backends.get(each - at))
            for each in range(at, at + len(mesh_sizes))
            for line in layout.lines((each,))
            if self._rank in line
        ]
        new = formed or [None] * len(mesh_sizes)
        made._groups.update(zip(dims, [*kept[:at], *new, *kept[at + 1 :]], strict=True))
        return made

    _unflatten = unflatten

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return a mesh with the dimensions of several parts of one mesh, in their order."""
        meshes = list(device_mesh_list)
        if not meshes or any(mesh._root is not meshes[0]._root for mesh in meshes):
            raise UsageError("meshes to be joined must be parts of the same one")
        dims = tuple(dim for mesh in meshes for dim in mesh._dims)
        names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
        every = [dim for each in dims for dim in each]
        if len(set(every)) != len(every):
            raise UsageError(f"the dimensions {names} overlap")
        return meshes[0]._view(dims, names)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return every line along a dimension as a mesh; only the caller's own has its group."""
        at = self._index("_get_all_submeshes", mesh_dim_name)
        found = []
        for line in self._layout.lines((at,)):
            made = DeviceMesh.__new__(DeviceMesh)
            made._become(
                self.device_type, Layout((len(line),), tuple(line)), ((0,),), (mesh_dim_name,)
            )
            made._groups[(0,)] = self._groups[self._dims[at]] if self._rank in line else None
            found.append(made)
        return found

    def _get_root_mesh(self) -> DeviceMesh:
        return self._root

    def _view(self, dims: tuple[Dims, ...], names: tuple[str, ...]) -> DeviceMesh:
        root = self._root
        coordinate = root.get_coordinate()
        if coordinate is None:
            raise self._outside()
        made = DeviceMesh.__new__(DeviceMesh)
        made._become(self.device_type, root._layout.around(coordinate, dims), dims, names, root)
        return made

    def _index(self, what: str, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim != 1:
                raise UsageError(f"{what} of a mesh with {self.ndim} dimensions needs mesh_dim")
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise KeyError(f"no dimension {mesh_dim!r}; there are {self.mesh_dim_names}")
            return (self.mesh_dim_names or ()).index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"no dimension {mesh_dim} in a mesh with {self.ndim}")
        return mesh_dim % self.ndim

    def _outside(self) -> UsageError:
        return UsageError(f"rank {self._rank} is not in {self._root!r}")

    # -- as an object -----------------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        return self._layout, self.device_type, self.mesh_dim_names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __enter__(self) -> DeviceMesh:
        """Make this the ``current_mesh`` of the calling thread."""
        if not hasattr(_entered, "stack"):
            _entered.stack = []
        _entered.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        """Go back to the one before."""
        _entered.stack.pop()

    def __repr__(self) -> str:
        lengths = [str(length) for length in self.shape]
        if self.mesh_dim_names is not None:
            lengths = [f"{n}={s}" for n, s in zip(self.mesh_dim_names, self.shape, strict=True)]
        return f"DeviceMesh(({', '.join(lengths)}), {self.device_type!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: groups go by their names, and a part with its root."""
        state = dict(vars(self))
        if self._root is not self:
            del state["_groups"], state["_flattened"]
            return state
        state["_groups"] = {
            dims: group.group_name if isinstance(group, ProcessGroup) else group
            for dims, group in self._groups.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become what was pickled, on the rank that this is now."""
        self.__dict__.update(state)
        if self._root is not self:
            self._groups, self._flattened = self._root._groups, self._root._flattened
        if (world := default_group()) is not None:
            self._rank = world.rank()
