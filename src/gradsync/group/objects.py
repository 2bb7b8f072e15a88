"""Collectives of Python objects: pickled, exchanged as bytes, unpickled.

Only ranks of one's own job are in a group: they have proved it when it was formed. An object that
cannot be pickled is an error on every rank, and nobody waits for it.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from gradsync.errors import UsageError
from gradsync.group.collectives import Group, member_group, root_in_group
from gradsync.group.compiling import keep_compiler_out
from gradsync.group.group import ProcessGroup

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
    for rank, data in enumerate(_gather(where, [obj], None)):
        object_list[rank] = pickle.loads(data)[0]


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
    for rank, data in enumerate(_gather(where, [obj], root)):
        assert object_gather_list is not None
        object_gather_list[rank] = pickle.loads(data)[0]


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
    _check_list("broadcast_object_list", object_list)
    root = root_in_group("broadcast_object_list", where, src, group_src, otherwise=0)
    objects = pickle.loads(_broadcast(where, object_list, root, entries=len(object_list)))
    if where.rank() != root:
        object_list[:] = objects


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
    # Everybody gets everything and keeps its own: on one host that is a copy in shared memory. Each
    # is pickled on its own, since only the rank that it is for need be able to load it.
    pickles = pickle.loads(_broadcast(where, [_pickled([o]) for o in inputs or ()], root))
    objects = [_plain(each, f"the object for rank {at}") for at, each in enumerate(pickles)]
    outputs[0] = pickle.loads(objects[where.rank()])[0]


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
    data = _pickled(list(object_list))
    where.send(torch.tensor([len(data)]), peer)
    where.send(_tensor(data), peer)
    _plain(data, "an object")


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
    _check_list("recv_object_list", object_list)
    peer = root_in_group("recv_object_list", where, src, group_src)
    length = torch.empty(1, dtype=torch.int64)
    where.recv(length, peer)
    data = torch.empty(int(length), dtype=torch.uint8)
    where.recv(data, peer)
    objects = pickle.loads(_plain(bytes(data.numpy()), "an object"))
    if len(objects) != len(object_list):
        raise UsageError(
            f"recv_object_list: rank {peer} of the group sent {len(objects)} objects, this rank "
            f"has room for {len(object_list)}"
        )
    object_list[:] = objects
    return where.members.world_rank(peer)


# -- bytes ----------------------------------------------------------------------------------------


def _check_list(name: str, objects: Any) -> None:
    if not isinstance(objects, list):
        raise TypeError(f"{name} needs a list, got {type(objects).__name__}: {objects!r}")


def _check_room(name: str, objects: list[Any] | None, size: int) -> None:
    # Of a list that is longer the rest stays as it is, as in torch.
    _check_length(name, objects[:size] if isinstance(objects, list) else objects, size)


def _check_length(name: str, objects: list[Any] | None, size: int) -> None:
    if not isinstance(objects, list) or len(objects) != size:
        has = f"{len(objects)}" if isinstance(objects, list) else f"{objects!r}"
        raise UsageError(f"{name} needs a list with an entry for each of {size} ranks, got {has}")


_FINE, _FAILED = b"+", b"-"


def _pickled(value: Any) -> bytes:
    """Return a pickle, or the words of the error that it raised: the others must not wait."""
    try:
        return _FINE + pickle.dumps(value)
    except Exception as error:
        return _FAILED + f"{type(error).__name__}: {error}".encode()


def _plain(data: bytes, what: str) -> bytes:
    """Return the pickle that ``_pickled`` made, or raise the error that it met."""
    if data[:1] == _FAILED:
        raise UsageError(f"{what} could not be pickled: {data[1:].decode()}")
    return data[1:]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _gather(group: ProcessGroup, value: Any, root: int | None) -> list[bytes]:
    """Bring every rank's pickle to ``root``, or to all; an empty list where none are due."""
    data = _pickled(value)
    lengths = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(lengths, torch.tensor([len(data)]))
    longest = int(lengths.max())
    row = torch.zeros(longest, dtype=torch.uint8)
    row[: len(data)] = _tensor(data)
    rows = torch.empty(group.size(), longest, dtype=torch.uint8)
    # All ranks get all of it, also for one root: each must learn that somebody's object failed.
    group.all_gather_single(rows.view(-1), row)
    found = []
    for rank in range(group.size()):
        raw = bytes(rows[rank, : int(lengths[rank])].numpy())
        found.append(_plain(raw, f"the object of rank {rank}"))
    return found if root is None or root == group.rank() else []


def _broadcast(group: ProcessGroup, value: Any, root: int, entries: int = 0) -> bytes:
    data = _pickled(value) if group.rank() == root else b""
    # An element more for each entry: lists that differ in length are a mismatch on all ranks.
    lengths = torch.full((1 + entries,), len(data))
    group.broadcast(lengths, root)
    length = int(lengths[0])
    buffer = _tensor(data) if group.rank() == root else torch.empty(length, dtype=torch.uint8)
    group.broadcast(buffer, root)
    return _plain(bytes(buffer.numpy()), f"the object of rank {root}")


keep_compiler_out(globals())
