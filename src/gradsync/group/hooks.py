"""Hooks at the waist: observers see every call without wrapping anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from gradsync.backends.call import Call

__all__ = ["Hook", "HookHandle", "Hooks"]

Hook: TypeAlias = Callable[[Call], None]

_log = logging.getLogger(__name__)


class HookHandle:
    """Takes its hook away again."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks = hooks
        self._hook = hook

    def remove(self) -> None:
        """Remove the hook; harmless when it is gone already."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class Hooks:
    """Hooks that run before and after each call of a group.

    A hook that raises is logged and removed: an observer must not stop the training it observes.
    Only one that was added with ``may_raise`` may, and its exception goes to the caller.
    """

    def __init__(self) -> None:
        self.before: list[Hook] = []
        self.after: list[Hook] = []

    def add_before(self, hook: Hook, *, may_raise: bool = False) -> HookHandle:
        """Run ``hook(call)`` before each call is submitted."""
        return _add(self.before, hook, may_raise)

    def add_after(self, hook: Hook) -> HookHandle:
        """Run ``hook(call)`` after each call that was carried out."""
        return _add(self.after, hook, may_raise=False)

    @staticmethod
    def run(hooks: list[Hook], call: Call) -> None:
        """Run every hook of a list on ``call``."""
        for hook in tuple(hooks):
            hook(call)


def _add(hooks: list[Hook], hook: Hook, may_raise: bool) -> HookHandle:
    def guarded(call: Call) -> None:
        try:
            hook(call)
        except Exception:
            _log.exception("hook %r raised on %s and was removed", hook, call.op.name)
            handle.remove()

    added = hook if may_raise else guarded
    handle = HookHandle(hooks, added)
    hooks.append(added)
    return handle
