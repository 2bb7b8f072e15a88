"""Groups that go on without some of their ranks."""

from __future__ import annotations

from typing import Any

from gradsync.backends.registry import BackendConfig
from gradsync.base.deadline import Deadline
from gradsync.errors import PeerLostError, RendezvousError, UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.group.world import default_group, replace_default_group, resolve
from gradsync.session.ending import watch_for_the_end
from gradsync.session.lifecycle import destroy_process_group, form_group
from gradsync.session.subgroups import split_group, unused_name
from gradsync.stores.prefix import PrefixStore

__all__ = ["SHRINK_ABORT", "SHRINK_DEFAULT", "shrink_group"]

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1
"""End what is in flight on the old group first, for all of its ranks."""


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Return a group (the default one unless given) without some of its ranks; the old one ends.

    Only those that stay call this, also when the others are dead and the group is broken. In place
    of the default group there is a new one then, with ranks from 0, and its sub-groups are gone.
    The store must still be there: it is gone with rank 0, unless a launcher serves it.

    Args:
        ranks_to_exclude: ranks in the group.
        group: the group to shrink.
        shrink_flags: ``SHRINK_ABORT`` lets calls in flight fail, on all ranks of the old group.
        pg_options: handed to a registered backend of the extended kind.

    >>> import gradsync
    >>> gradsync.init_process_group()
    >>> gradsync.shrink_group([0])
    Traceback (most recent call last):
    gradsync.errors.UsageError: a group cannot go on without all of its ranks
    >>> gradsync.destroy_process_group()
    """
    old = resolve(group)
    stay = _who_stays(old, ranks_to_exclude)
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise UsageError(f"shrink_flags is SHRINK_DEFAULT or SHRINK_ABORT, got {shrink_flags!r}")
    if shrink_flags == SHRINK_ABORT:
        for ending in (*old.children, old):
            ending.abort(f"rank {old.rank()} shrinks the group")
    if old is default_group():
        return _shrink_world(old, stay, pg_options)
    made = split_group(old, [stay], old.timeout_s, pg_options, old.group_desc, old.backend_config)
    assert made is not None
    destroy_process_group(old)
    return made


def _who_stays(old: ProcessGroup, leaving: list[int]) -> list[int]:
    if not isinstance(leaving, list) or any(type(rank) is not int for rank in leaving):
        raise TypeError(f"ranks_to_exclude is a list of ranks, got {leaving!r}")
    if not leaving or len(set(leaving)) != len(leaving):
        raise UsageError(f"ranks_to_exclude needs ranks, each of them once, got {leaving}")
    wrong = [rank for rank in leaving if not 0 <= rank < old.size()]
    if wrong:
        raise UsageError(f"no rank {wrong[0]} in a group of {old.size()}")
    stay = [rank for rank in range(old.size()) if rank not in leaving]
    if not stay:
        raise UsageError("a group cannot go on without all of its ranks")
    if old.rank() in leaving:
        raise UsageError(
            f"rank {old.rank()} is to be left out, so it has no part in shrinking the group"
        )
    return stay


def _shrink_world(old: ProcessGroup, stay: list[int], options: Any) -> ProcessGroup:
    store = old.members.store
    if store is None:
        raise UsageError(f"{old!r} was made without a store, so it cannot be shrunk")
    # An attempt that failed must not be in the way of the next.
    own = PrefixStore(f"without/{unused_name(old, tuple(stay))}", store)
    members = Members(
        name="world",
        description=old.group_desc,
        ranks=tuple(range(len(stay))),
        rank=stay.index(old.rank()),
        evidence=tuple(old.members.evidence[rank] for rank in stay),
        store=own,
    )
    try:
        made = form_group(
            members,
            own,
            Deadline(old.timeout_s),
            old.timeout_s,
            config=BackendConfig(old.backend_config),
            options=options,
        )
    except (PeerLostError, RendezvousError) as error:
        numbers = ", ".join(map(str, stay))
        error.args = (f"{error} (ranks from 0 of the smaller world were ranks {numbers})",)
        raise
    watch_for_the_end(made)
    replace_default_group(made)
    old.close()
    return made
