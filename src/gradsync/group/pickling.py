"""Collectives of Python objects: pickled, exchanged as bytes, unpickled.

Only ranks of one's own job are in a group: they have proved it when it was formed. An object that
cannot be pickled is an error on every rank, and nobody waits for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from gradsync.base.deadline import Timeout
from gradsync.errors import UsageError
from gradsync.group.gathering import Gathering
from gradsync.group.point_to_point import PointToPoint

__all__ = ["Pickling"]

_FINE, _FAILED = b"+", b"-"


class Pickling(Gathering, PointToPoint):
    """Objects in place of tensors; ranks are ranks of the group."""

    def all_gather_object(self, obj: Any, timeout: Timeout | None = None) -> list[Any]:
        """Return the ranks' objects, in rank order.

        >>> import gradsync
        >>> world = gradsync.create_world()
        >>> world.all_gather_object({"loss": 0.5})
        [{'loss': 0.5}]
        >>> world.close()
        """
        return [pickle.loads(data) for data in self._gather_pickles(obj, timeout)]

    def gather_object(
        self, obj: Any, root: int, timeout: Timeout | None = None
    ) -> list[Any] | None:
        """Return the ranks' objects on rank ``root``, None on the others."""
        self._check_root("gather_object", root)
        # All ranks get all of it, also for one root: each must learn that somebody's object failed.
        found = self._gather_pickles(obj, timeout)
        return [pickle.loads(data) for data in found] if self._rank == root else None

    def broadcast_object(self, obj: Any, root: int, timeout: Timeout | None = None) -> Any:
        """Return the object of rank ``root``; those of the others do not matter."""
        self._check_root("broadcast_object", root)
        data = self._broadcast_pickle(obj, root, timeout)
        return obj if self._rank == root else pickle.loads(data)

    def broadcast_object_list(
        self, objects: list[Any], root: int, timeout: Timeout | None = None
    ) -> None:
        """Overwrite the entries of ``objects`` with those of rank ``root``, as many everywhere."""
        self._check_root("broadcast_object_list", root)
        if not isinstance(objects, list):
            raise TypeError(
                f"broadcast_object_list needs a list, got {type(objects).__name__}: {objects!r}"
            )
        data = self._broadcast_pickle(objects, root, timeout, entries=len(objects))
        if self._rank != root:
            objects[:] = pickle.loads(data)

    def scatter_object(
        self, objects: Sequence[Any] | None, root: int, timeout: Timeout | None = None
    ) -> Any:
        """Return this rank's entry of the ``objects`` of rank ``root``; the others give none."""
        self._check_root("scatter_object", root)
        if self._belongs_to_root("scatter_object", "objects", objects, root):
            assert objects is not None
            if len(objects) != self._size:
                raise UsageError(
                    f"scatter_object needs an object for each of the {self._size} ranks, got "
                    f"{len(objects)}"
                )
        # Everybody gets everything and keeps its own: on one host that is a copy in shared memory.
        # Each is pickled on its own, since only the rank that it is for need be able to load it.
        pickles = pickle.loads(
            self._broadcast_pickle([_pickled(each) for each in objects or ()], root, timeout)
        )
        plain = [_plain(each, f"the object for rank {at}") for at, each in enumerate(pickles)]
        return pickle.loads(plain[self._rank])

    def send_object(self, obj: Any, dst: int, tag: int = 0, timeout: Timeout | None = None) -> None:
        """Send an object to rank ``dst``, which receives it with ``recv_object``."""
        data = _pickled(obj)
        self.send(torch.tensor([len(data)]), dst, tag, timeout)
        self.send(_tensor(data), dst, tag, timeout)
        _plain(data, "an object")

    def recv_object(
        self, src: int | None = None, tag: int = 0, timeout: Timeout | None = None
    ) -> Any:
        """Return what rank ``src``, or any rank, has sent with ``send_object``."""
        length = torch.empty(1, dtype=torch.int64)
        source = self.recv(length, src, tag, timeout)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.recv(data, source, tag, timeout)
        return pickle.loads(_plain(bytes(data.numpy()), "an object"))

    # -- bytes ------------------------------------------------------------------------------------

    def _gather_pickles(self, obj: Any, timeout: Timeout | None) -> list[bytes]:
        """Return every rank's pickle."""
        data = _pickled(obj)
        lengths = torch.empty(self._size, dtype=torch.int64)
        self.all_gather_single(lengths, torch.tensor([len(data)]), timeout)
        longest = int(lengths.max())
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(data)] = _tensor(data)
        rows = torch.empty(self._size, longest, dtype=torch.uint8)
        self.all_gather_single(rows.view(-1), row, timeout)
        return [
            _plain(bytes(rows[rank, :length].numpy()), f"the object of rank {rank}")
            for rank, length in enumerate(lengths.tolist())
        ]

    def _broadcast_pickle(
        self, value: Any, root: int, timeout: Timeout | None, entries: int = 0
    ) -> bytes:
        data = _pickled(value) if self._rank == root else b""
        # A byte more for each entry: lists that differ in length are a mismatch on all ranks.
        said = _tensor(len(data).to_bytes(8, "little") + bytes(entries))
        self.broadcast(said, root, timeout)
        length = int.from_bytes(bytes(said[:8].numpy()), "little")
        buffer = _tensor(data) if data else torch.empty(length, dtype=torch.uint8)
        self.broadcast(buffer, root, timeout)
        return _plain(bytes(buffer.numpy()), f"the object of rank {root}")


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
