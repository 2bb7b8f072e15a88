"""Makes a group when torch asks for one: the ranks meet at the store that torch hands over."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from gradsync.backends.forming import Invitation
from gradsync.base.deadline import Deadline, limit_of
from gradsync.errors import DistError
from gradsync.group.members import Members
from gradsync.rendezvous.meeting import meet
from gradsync.session.ending import watch_for_the_end
from gradsync.session.lifecycle import form_group
from gradsync.stores.torch_store import from_torch
from gradsync.torch_backend.devices import add_other_devices
from gradsync.torch_backend.failures import torch_error
from gradsync.torch_backend.monitored import offer_monitored_barrier
from gradsync.torch_backend.process_group import TorchProcessGroup

__all__ = ["create"]


def create(options: Any, backend_options: Any, request: Mapping[str, Any]) -> TorchProcessGroup:
    """Form the group that torch describes; ``request`` holds the variables of torch's function."""
    try:
        made = _form(
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
            name=options.group_id,
            world_ranks=tuple(options.global_ranks_in_group),
        )
    except DistError as error:
        raise torch_error(error) from error
    add_other_devices(made, options, backend_options, request)
    offer_monitored_barrier()
    return made


def _form(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    name: str,
    world_ranks: tuple[int, ...] = (),
) -> TorchProcessGroup:
    limit_s = limit_of(timeout)
    deadline = Deadline(limit_s)
    # The store may have served an earlier group of this name: meeting finds the round that is ours.
    invitation = Invitation()
    meeting = meet(
        store=from_torch(store),
        rank=rank,
        world_size=size,
        timeout=limit_s,
        preparation=invitation,
    )
    members = Members(
        name=name,
        description="torch.distributed",
        ranks=world_ranks or tuple(range(size)),
        rank=rank,
        evidence=tuple(member.evidence for member in meeting.members),
        store=meeting.store,
    )
    # The store is left alone from here on, also at the end: whoever serves it may be gone by then.
    group = form_group(members, meeting.store, deadline, limit_s, invitation=invitation)
    watch_for_the_end(group)
    return TorchProcessGroup(group, store, timeout)
