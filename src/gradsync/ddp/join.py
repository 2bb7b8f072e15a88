"""Uneven inputs: ranks that have run out of batches shadow the calls of those that have not.

``with Join([ddp, ...]):`` around the training loop. Every iteration of an active rank begins with a
call that counts the active ones; a rank that has left its loop answers it, and does what each
``Joinable`` says, until nobody is active.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gradsync.errors import DistError, UsageError
from gradsync.group.group import ProcessGroup

__all__ = ["Join", "JoinConfig", "JoinHook", "Joinable"]

_WARN_AFTER = 1000


class JoinHook:
    """What a rank without inputs does for one joinable."""

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Bring the ranks together once all have joined."""


@dataclass(frozen=True)
class JoinConfig:
    """What a joinable has to know of the context it is in."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False


class Joinable(ABC):
    """Something that makes collective calls in each iteration, and can be shadowed."""

    def __init__(self) -> None:
        super().__init__()
        self._join_config = JoinConfig()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs is to do; gets the context's extra arguments."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where the tensors of the context's calls live."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The ranks."""


class Join:
    """Lets ranks have different numbers of batches.

    Args:
        joinables: everything in the loop that makes collective calls.
        enable: False switches it off, for loops that are known to be even.
        throw_on_early_termination: raise on every rank as soon as one runs out of inputs.
        kwargs: for the joinables, such as ``divide_by_initial_world_size``.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise UsageError("Join needs at least one joinable")
        groups = {id(joinable.join_process_group) for joinable in joinables}
        if len(groups) > 1:
            raise UsageError("all joinables of one Join must be on the same process group")
        self._joinables = list(joinables)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._group = joinables[0].join_process_group
        self._hooks = [j.join_hook(**kwargs) for j in joinables] if enable else []

    def __enter__(self) -> Join:
        for number, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(self._enable, self._throw, number == 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._enable and kind is None:
                self._shadow()
        finally:
            for joinable in self._joinables:
                joinable._join_config = JoinConfig()

    def _shadow(self) -> None:
        is_last, iterations = True, 0
        while _count_active(self._group, 0):
            if self._throw:
                _throw_everywhere(self._group, 1)
            is_last = False
            for hook in self._hooks:
                hook.main_hook()
            iterations += 1
            if iterations == _WARN_AFTER:
                warnings.warn(
                    f"rank {self._group.rank()} has had no inputs for {_WARN_AFTER} iterations of "
                    "the others; it would be quicker to distribute the data evenly",
                    stacklevel=3,
                )
        for hook in self._hooks:
            hook.post_hook(is_last)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> int | None:
        """Say that this rank is active, and return how many are; None where that is not due.

        To be called by every joinable before its collective calls of an iteration; the first one
        of a context speaks for all.
        """
        config = joinable._join_config
        if not (config.enable and config.is_first_joinable):
            return None
        active = _count_active(joinable.join_process_group, 1)
        if config.throw_on_early_termination and active < joinable.join_process_group.size():
            _throw_everywhere(joinable.join_process_group, 0)
        return active


def _count_active(group: ProcessGroup, own: int) -> int:
    count = torch.tensor([own])
    group.all_reduce(count)
    return int(count)


def _throw_everywhere(group: ProcessGroup, ran_out: int) -> None:
    flag = torch.tensor([ran_out])
    group.all_reduce(flag)
    raise DistError(
        f"{int(flag)} of {group.size()} ranks ran out of inputs "
        f"({'this one too' if ran_out else 'this one did not'}), and throw_on_early_termination "
        "is set; all ranks stop here"
    )
