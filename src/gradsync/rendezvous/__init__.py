"""How the processes of a job find each other; ``meet`` is the way in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from gradsync.rendezvous.meeting import Meeting, meet, register_rendezvous_handler, rendezvous
from gradsync.rendezvous.member import Member

__all__ = [
    "Meeting",
    "Member",
    "meet",
    "register_rendezvous_handler",
    "rendezvous",
]


class _CallableModule(ModuleType):
    def __call__(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
    ) -> Iterator[Any]:
        return rendezvous(url, rank, world_size, **kwargs)


# `gradsync.rendezvous` is this package from its first import on, and torch's users call it.
sys.modules[__name__].__class__ = _CallableModule
