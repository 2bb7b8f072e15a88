"""Makes a group when torch asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

from gradsync.errors import DistError
from gradsync.group.group import ProcessGroup
from gradsync.torch_backend.devices import add_other_devices
from gradsync.torch_backend.failures import torch_error
from gradsync.torch_backend.forming import form
from gradsync.torch_backend.monitored import offer_monitored_barrier
from gradsync.torch_backend.process_group import TorchProcessGroup

__all__ = ["create"]


def create(options: Any, backend_options: Any, request: Mapping[str, Any]) -> TorchProcessGroup:
    """Form the group that torch describes; ``request`` holds the variables of torch's function."""
    try:
        group = form(
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
            name=options.group_id,
            world_ranks=tuple(options.global_ranks_in_group),
            parent=_world(),
        )
    except DistError as error:
        raise torch_error(error) from error
    made = TorchProcessGroup(group, options.store, options.timeout)
    add_other_devices(made, options, backend_options, request)
    offer_monitored_barrier()
    return made


def _world() -> ProcessGroup | None:
    """Return torch's default group, if that is ours."""
    there = c10d.GroupMember.WORLD
    return there.group if isinstance(there, TorchProcessGroup) else None
