"""What torch's process groups answer to besides, where it means something here."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.group.caller import Caller
from gradsync.group.members import Members
from gradsync.stores.store import Store

__all__ = ["TorchNames"]


class TorchNames(Caller):
    """Questions about a group under torch's names."""

    members: Members

    @property
    def bound_device_id(self) -> None:
        """None: gradsync binds no device."""
        return None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Store | None:
        """Return the store that the world's ranks met at."""
        return self.members.store

    def _get_backend_name(self) -> str:
        return self.backend.name

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun; 0 on backends that do not count."""
        session: Any = getattr(self.backend, "session", None)
        return 0 if session is None else int(session.sequence)
