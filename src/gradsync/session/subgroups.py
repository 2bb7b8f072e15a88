"""Groups of some of the world's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple

from gradsync.backends.registry import BackendConfig, engine_of
from gradsync.base.deadline import Deadline, Timeout, limit_of
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.members import Members
from gradsync.group.world import NON_GROUP_MEMBER, resolve
from gradsync.session.lifecycle import (
    DEFAULT_GROUP_TIMEOUT,
    check_device,
    form_group,
    report_failure,
)
from gradsync.stores.store import Store

__all__ = [
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "unused_name",
]


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    """Form a group of some ranks of the world.

    Every rank of the world calls this, in the same order, members or not; with
    ``use_local_synchronization`` only the members do. Returns the group, or
    ``GroupMember.NON_GROUP_MEMBER`` (None with local synchronization) to a rank that is not in it.

    Args:
        ranks: world ranks; all of them when None.
        timeout: limit of its calls; 30 minutes, zero for none.
        backend: None for the world's, or a name as for ``init_process_group``.
        pg_options: handed to a registered backend of the extended kind.
        use_local_synchronization: only members call.
        group_desc: what the group is for.
        device_id: for torch's sake; there is nothing to bind.
        sort_ranks: rank in the group by rank in the world; otherwise in the order given.
    """
    check_device(device_id)
    wish = _Wish(timeout, backend, pg_options, group_desc)
    return _form(resolve(None), ranks, wish, use_local_synchronization, sort_ranks)


class _Wish(NamedTuple):
    """What a sub-group shall be like."""

    timeout: Timeout | None
    backend: str | None
    pg_options: Any
    group_desc: str | None


def _form(
    world: ProcessGroup,
    ranks: Sequence[int] | None,
    wish: _Wish,
    members_only: bool = False,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    store = world.members.store
    if store is None:
        raise UsageError(f"{world!r} was made without a store, so it has no sub-groups")
    config = BackendConfig(world.backend_config if wish.backend is None else wish.backend)
    engine_of(config, world.backend)  # a mistake here shall be one on all ranks, members or not
    chosen = _check(world, ranks)
    if sort_ranks:
        chosen = sorted(chosen)
    name = unused_name(world, tuple(chosen) if members_only else ())
    if not members_only:
        _agree(world, store, name, chosen)
    if world.rank() not in chosen:
        return None if members_only else NON_GROUP_MEMBER
    limit_s = limit_of(DEFAULT_GROUP_TIMEOUT if wish.timeout is None else wish.timeout)
    group = form_group(
        Members(
            name=name,
            description=wish.group_desc or "undefined",
            ranks=tuple(chosen),
            rank=chosen.index(world.rank()),
            evidence=tuple(world.members.evidence[rank] for rank in chosen),
            store=store,
        ),
        store,
        Deadline(limit_s),
        limit_s,
        world=world,
        config=config,
        options=wish.pg_options,
    )
    world.children.append(group)
    return group


def _agree(world: ProcessGroup, store: Store, name: str, chosen: list[int]) -> None:
    """Raise unless this rank, member or not, asks for the same group as the first that came here.

    Otherwise those who share a member would wait for it, or form a group with a wrong one.
    """
    mine = ",".join(map(str, chosen))
    first = store.compare_set(f"ranks/{name}", "", mine).decode()
    if first == mine:
        # The last to come leaves no trace: a program may make groups as long as it runs.
        if store.add(f"agree/{name}", 1) == world.size():
            store.delete_key(f"ranks/{name}")
            store.delete_key(f"agree/{name}")
        return
    wanted = [int(rank) for rank in first.split(",")]
    why = (
        f"the ranks asked for different groups: rank {world.rank()} for one of the ranks {chosen}, "
        f"another for one of {wanted} (sub-group {name} of the world). Every rank of the world "
        f"calls new_group in the same order and with the same ranks"
    )
    if world.rank() in wanted:
        report_failure(store, name, wanted.index(world.rank()), UsageError(why))
    raise UsageError(why)


def _world_of(group: ProcessGroup) -> ProcessGroup:
    world = None if group.parent is None else group.parent()
    return group if world is None else world


def _check(world: ProcessGroup, ranks: Sequence[int] | None) -> list[int]:
    chosen = list(range(world.size())) if ranks is None else _as_ranks(ranks)
    if not chosen:
        raise UsageError("a group needs at least one rank, got an empty list")
    wrong = [rank for rank in chosen if not 0 <= rank < world.size()]
    if wrong:
        raise UsageError(f"no rank {wrong[0]} in a world of {world.size()} (ranks={chosen})")
    if any(a == b for a, b in pairwise(sorted(chosen))):
        raise UsageError(f"a rank can be in a group only once, got ranks={chosen}")
    return chosen


def _as_ranks(ranks: Sequence[int]) -> list[int]:
    try:
        return [index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"ranks is a list of numbers, got {ranks!r}") from None


def unused_name(world: ProcessGroup, known_to: tuple[int, ...]) -> str:
    """Return a name that was never used on this store and on which all who call agree.

    What only its members know of is counted by its ranks: they agree on that without the others.
    """
    world.made[known_to] += 1
    number = world.made[known_to]
    return f"{number} of {','.join(map(str, known_to))}" if known_to else str(number)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | int | None, list[ProcessGroup | int | None]]:
    """Cut a group (the world unless given) into groups of ``group_size`` consecutive ranks.

    Returns the caller's group and all of them in order.
    """
    parent = resolve(group)
    if group_size is None or not 0 < group_size <= parent.size() or parent.size() % group_size:
        raise UsageError(
            f"group_size must divide the {parent.size()} ranks of {parent.group_name!r}, got "
            f"{group_size}"
        )
    ranks = parent.members.ranks
    lists = [list(ranks[at : at + group_size]) for at in range(0, len(ranks), group_size)]
    return _each(_world_of(parent), lists, _Wish(timeout, backend, pg_options, group_desc))


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | int | None, list[ProcessGroup | int | None]]:
    """Form one group for each list of world ranks; no rank may be in two.

    Returns the caller's group (None when it is in no list) and all of them in order.
    """
    lists = [_as_ranks(ranks) for ranks in ranks_per_subgroup_list]
    return _each(resolve(None), lists, _Wish(timeout, backend, pg_options, group_desc))


def _each(
    world: ProcessGroup, lists: list[list[int]], wish: _Wish
) -> tuple[ProcessGroup | int | None, list[ProcessGroup | int | None]]:
    if not lists:
        raise UsageError("new_subgroups_by_enumeration needs at least one list of ranks")
    _check_apart(lists, "sub-group")  # before any group is made
    groups = [_form(world, ranks, wish) for ranks in lists]
    mine = next((g for g in groups if isinstance(g, ProcessGroup)), None)
    return mine, groups


def _check_apart(lists: list[list[int]], what: str) -> None:
    everyone = sorted(rank for ranks in lists for rank in ranks)
    twice = [a for a, b in pairwise(everyone) if a == b]
    if twice:
        raise UsageError(f"rank {twice[0]} is in more than one {what}: {lists}")


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Split a group by lists of *its* ranks; only its members call. None to who is in no list."""
    parent = resolve(parent_pg)
    if not split_ranks:
        raise UsageError("split_group needs split_ranks, a list of lists of the parent's ranks")
    # All of it is looked at on all ranks: nobody shall wait for one that found a mistake alone.
    parts = [_as_ranks(ranks) for ranks in split_ranks]
    _check_apart(parts, "part")
    in_world = [[parent.members.world_rank(rank) for rank in part] for part in parts]
    ranks = next((part for part in in_world if _world_of(parent).rank() in part), None)
    if ranks is None:
        return None
    wish = _Wish(timeout, backend, pg_options, group_desc)
    group = _form(_world_of(parent), ranks, wish, members_only=True)
    return group if isinstance(group, ProcessGroup) else None
