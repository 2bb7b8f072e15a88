"""Collectives of Python objects as functions on the default group, with torch's arguments.

Sugar over the methods of ``ProcessGroup``, which return what these put into lists.
"""

from __future__ import annotations

from typing import Any

from gradsync.errors import UsageError
from gradsync.group.collectives import Group, member_group, root_in_group
from gradsync.group.compiling import keep_compiler_out

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fill ``object_list[r]`` with the object of rank ``r``.

    >>> import gradsync
    >>> gradsync.init_process_group()
    >>> found = [None]
    >>> gradsync.all_gather_object(found, {"loss": 0.5})
    >>> found
    [{'loss': 0.5}]
    >>> gradsync.destroy_process_group()
    """
    where = member_group("all_gather_object", group)
    if where is None:
        return
    _check_room("all_gather_object", object_list, where.size())
    object_list[: where.size()] = where.all_gather_object(obj)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Fill ``object_gather_list[r]`` of rank ``dst`` (0 unless given) with the object of ``r``."""
    where = member_group("gather_object", group)
    if where is None:
        return
    root = root_in_group("gather_object", where, dst, group_dst, otherwise=0)
    if where.rank() == root:
        _check_room("gather_object", object_gather_list, where.size())
    elif object_gather_list is not None:
        raise UsageError(f"gather_object: only rank {root} of the group gives a list")
    found = where.gather_object(obj, root)
    if object_gather_list is not None and found is not None:
        object_gather_list[: where.size()] = found


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Overwrite the entries of ``object_list`` with those of rank ``src`` (0 unless given)."""
    where = member_group("broadcast_object_list", group)
    if where is None:
        return
    root = root_in_group("broadcast_object_list", where, src, group_src, otherwise=0)
    where.broadcast_object_list(object_list, root)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Put this rank's entry of the input list of rank ``src`` (0) into the output list's first."""
    where = member_group("scatter_object_list", group)
    if where is None:
        return
    root = root_in_group("scatter_object_list", where, src, group_src, otherwise=0)
    outputs, inputs = scatter_object_output_list, scatter_object_input_list
    if not isinstance(outputs, list) or not outputs:
        raise UsageError(f"scatter_object_list needs a list with room for one, got {outputs!r}")
    if where.rank() == root:
        _check_length("scatter_object_list", inputs, where.size())
    # Lists that others give are of no use, and allowed, as in torch.
    outputs[0] = where.scatter_object(inputs if where.rank() == root else None, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the entries of ``object_list`` to rank ``dst`` (or rank ``group_dst`` of the group)."""
    where = member_group("send_object_list", group)
    if where is None:
        return
    peer = root_in_group("send_object_list", where, dst, group_dst)
    where.send_object(list(object_list), peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Overwrite ``object_list`` with what rank ``src`` sent; return that rank, -1 for outsiders."""
    where = member_group("recv_object_list", group)
    if where is None:
        return -1
    if not isinstance(object_list, list):
        raise TypeError(
            f"recv_object_list needs a list, got {type(object_list).__name__}: {object_list!r}"
        )
    peer = root_in_group("recv_object_list", where, src, group_src)
    objects = where.recv_object(peer)
    if len(objects) != len(object_list):
        raise UsageError(
            f"recv_object_list: rank {peer} of the group sent {len(objects)} objects, this rank "
            f"has room for {len(object_list)}"
        )
    object_list[:] = objects
    return where.members.world_rank(peer)


def _check_room(name: str, objects: list[Any] | None, size: int) -> None:
    # Of a list that is longer the rest stays as it is, as in torch.
    _check_length(name, objects[:size] if isinstance(objects, list) else objects, size)


def _check_length(name: str, objects: list[Any] | None, size: int) -> None:
    if not isinstance(objects, list) or len(objects) != size:
        has = f"{len(objects)}" if isinstance(objects, list) else f"{objects!r}"
        raise UsageError(f"{name} needs a list with an entry for each of {size} ranks, got {has}")


keep_compiler_out(globals())
