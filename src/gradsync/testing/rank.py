"""One rank in one test: its environment, store, group and faults, put up and taken down."""

from __future__ import annotations

import os
import random
import sys
from typing import ClassVar

import torch

from gradsync import _native
from gradsync.group.group import ProcessGroup
from gradsync.group.world import default_group
from gradsync.session.lifecycle import destroy_process_group, init_process_group
from gradsync.stores.prefix import PrefixStore
from gradsync.stores.unix import UnixStore
from gradsync.testing.calls import CallLog
from gradsync.testing.inject import Injector
from gradsync.testing.messages import RankContext

__all__ = ["ActiveRank"]

SEED = 0


class ActiveRank:
    """What a test on this rank stands on; a process has at most one at a time."""

    _connections: ClassVar[dict[str, UnixStore]] = {}
    """One connection to each store's server, kept from test to test."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self._reset_process()
        if context.store_name not in self._connections:
            self._connections[context.store_name] = UnixStore(
                context.store_name, token=context.store_token
            )
        self._connection = self._connections[context.store_name]
        self._connection.set_timeout(context.timeout_s)
        self.store = PrefixStore(context.prefix, self._connection)
        self.group: ProcessGroup | None = None
        self.log: CallLog | None = None
        self.injector: Injector | None = None

    def _reset_process(self) -> None:
        """Every test begins alike: the controller's environment, one seed, its share of cores."""
        context = self.context
        os.environ.clear()
        os.environ.update(context.env)
        os.environ.update(
            RANK=str(context.rank),
            WORLD_SIZE=str(context.world_size),
            LOCAL_RANK=str(context.rank),
            LOCAL_WORLD_SIZE=str(context.world_size),
        )
        os.chdir(context.cwd)
        random.seed(SEED)
        torch.manual_seed(SEED)
        torch.set_num_threads(max(1, _native.usable_cores() // context.world_size))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(SEED)

    def open_group(self) -> None:
        """Form the default group of the test."""
        context = self.context
        if not context.with_group:
            return
        init_process_group(
            context.backend,
            store=PrefixStore("group", self.store),
            rank=context.rank,
            world_size=context.world_size,
            # Longer than the test: its own deadline shows every rank, this would show one.
            timeout=2 * context.timeout_s + 5,
        )
        self.group = default_group()
        assert self.group is not None
        self.log = CallLog(self.group)
        if context.faults:
            self.injector = Injector(context.faults, context.rank, self._connection)
            self.group.hooks.add_before(self.injector, may_raise=True)

    def release_others(self, why: str) -> None:
        """Let nobody wait for this rank any more: its test has failed."""
        group = default_group()
        if group is not None:
            group.leave(why)

    def close_group(self) -> None:
        """Leave the group that is there, the kit's or one that the test made."""
        if default_group() is not None:
            destroy_process_group()
        self.group = None

    def describe(self) -> str:
        """Say what the rank is doing, for the report of a test that hangs."""
        if self.group is None:
            return "no group"
        calls = self.log.lines() if self.log else []
        lines = ["last calls:", *calls] if calls else []
        states = getattr(self.group.backend, "states", None)
        if states is not None:
            lines.append("the group as this rank sees it:")
            lines += [
                f"  rank {s.rank} (pid {s.pid}) {s.presence}: #{s.sequence} {s.doing}"
                for s in states()
            ]
        return "\n".join(lines)
