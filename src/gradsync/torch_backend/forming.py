"""Forms groups for torch: the ranks meet at the store that torch hands over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gradsync.backends.invitation import Invitation
from gradsync.base.deadline import Deadline, limit_of
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.rendezvous.meeting import meet
from gradsync.rendezvous.member import Party
from gradsync.session.ending import watch_for_the_end
from gradsync.session.lifecycle import form_group
from gradsync.stores.torch_store import from_torch

__all__ = ["form"]


def form(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    name: str,
    world_ranks: tuple[int, ...] = (),
    parent: ProcessGroup | None = None,
) -> ProcessGroup:
    """Return a group of gradsync of all who call this with the same store of torch.

    ``parent`` is a group of ours that all of them are in, if there is one: it knows where they are.
    """
    limit_s = limit_of(timeout)
    deadline = Deadline(limit_s)
    # The store may have served an earlier group of this name: meeting finds the round that is ours.
    invitation = Invitation()
    party = Party() if parent is None else _part_of(parent, name, world_ranks)
    meeting = meet(
        store=from_torch(store),
        rank=rank,
        world_size=size,
        timeout=limit_s,
        preparation=invitation,
        party=party,
    )
    members = Members(
        name=name,
        description="torch.distributed",
        ranks=world_ranks or tuple(range(size)),
        rank=rank,
        evidence=meeting.evidence,
        store=meeting.store,
    )
    # The store is left alone from here on, also at the end: whoever serves it may be gone by then.
    group = form_group(members, meeting.store, deadline, limit_s, invitation=invitation)
    watch_for_the_end(group)
    return group


def _part_of(parent: ProcessGroup, name: str, world_ranks: tuple[int, ...]) -> Party:
    members = parent.members
    evidence = [members.evidence[members.group_rank(rank)] for rank in world_ranks]
    return Party(f"the group {name!r}", world_ranks, evidence)
