"""The short way for synchronous calls on plain tensors, where a backend has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync import _native
from gradsync.backends.backend import Backend

__all__ = ["CLOSED_LANE", "Lane", "open_lane"]

Lane = _native.Lane

CLOSED_LANE = Lane()
"""Carries nothing out, so that every call takes the ordinary way."""


def open_lane(
    backend: Backend,
    timeout_s: float,
    hooks: tuple[list[Any], list[Any]],
    adopt: Callable[[Any, bool], bool],
    tensor_type: type,
) -> Lane:
    """Return a lane for tensors of exactly ``tensor_type``, closed while there are hooks.

    ``adopt`` gets tensors that are reduced again and again, and whether they have to fill their
    storage; it returns False to get them later.

    Without native sessions below, or with a torch that does not say through DLPack's table of C
    functions what a tensor is made of, it stays closed.
    """
    session = getattr(backend, "session", None)
    table = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if session is None or table is None:
        return CLOSED_LANE
    return Lane(session, timeout_s, *hooks, adopt, tensor_type, table)
