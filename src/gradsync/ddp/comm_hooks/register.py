"""Hooks by name, as torch users choose them."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from gradsync.ddp.comm_hooks.allreduce import allreduce_hook, noop_hook
from gradsync.ddp.comm_hooks.cast import bf16_compress_hook, fp16_compress_hook
from gradsync.ddp.comm_hooks.hook import CommHook

__all__ = ["BuiltinCommHookType", "DDPCommHookType", "builtin_hook", "register_ddp_comm_hook"]


class DDPCommHookType(Enum):
    """The hooks that ``register_ddp_comm_hook`` knows."""

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16"
    BF16_COMPRESS = "bf16"
    NOOP = "noop"


class BuiltinCommHookType(Enum):
    """The hooks that torch has in C++."""

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16"


_HOOKS: dict[str, CommHook] = {
    "ALLREDUCE": allreduce_hook,
    "FP16_COMPRESS": fp16_compress_hook,
    "BF16_COMPRESS": bf16_compress_hook,
    "NOOP": noop_hook,
}


class _TakesHooks(Protocol):
    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Use ``hook`` from now on."""


def builtin_hook(kind: Any) -> CommHook:
    """Return the hook of a name; torch's enumerations are understood too."""
    name = str(getattr(kind, "name", kind))
    if name not in _HOOKS:
        raise ValueError(f"there is no communication hook {name!r}; there are {', '.join(_HOOKS)}")
    return _HOOKS[name]


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: _TakesHooks, state: Any = None
) -> None:
    """Register a hook by name; ``state`` is a process group, or None for the default one."""
    model.register_comm_hook(state, builtin_hook(comm_hook_type))
