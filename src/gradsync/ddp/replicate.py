"""``replicate``: data-parallel training installed on a module itself, without a wrapper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from gradsync.ddp.options import DDPOptions, bucket_limits
from gradsync.ddp.replica import Replica
from gradsync.errors import UsageError
from gradsync.group.group import ProcessGroup
from gradsync.group.world import resolve

__all__ = ["replica_of", "replicate"]

Module = TypeVar("Module", bound=nn.Module)


def replicate(
    module: Module,
    process_group: ProcessGroup | None = None,
    *,
    bucket_cap_mb: float | None = None,
    ignored: Iterable[str] = (),
    init_sync: bool = True,
    forward_sync_buffers: bool = True,
    strict: bool = False,
) -> Module:
    """Average the gradients of ``module`` over the ranks from now on, and return it.

    It stays the object it was: same class, same names in its ``state_dict()``. Copies of it are
    ordinary modules. ``replica_of(module)`` has ``no_sync()``, ``accumulate()`` and ``weight()``.

    >>> import torch, gradsync
    >>> gradsync.init_process_group()
    >>> model = gradsync.replicate(torch.nn.Linear(2, 1))
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    >>> gradsync.destroy_process_group()
    """
    if getattr(module, "_replica", None) is not None:
        raise UsageError("this module is replicated already")
    options = DDPOptions(
        limits=bucket_limits(bucket_cap_mb),
        init_sync=init_sync,
        forward_sync_buffers=forward_sync_buffers,
        strict=strict,
    )
    # Not by setattr(): what torch.compile() returns passes that on to the module inside.
    module.__dict__["_replica"] = Replica(module, resolve(process_group), options, ignored)
    module.register_forward_pre_hook(_before_forward)
    module.register_forward_hook(_after_forward)
    return module


def replica_of(module: nn.Module) -> Replica:
    """Return the machinery behind a replicated module or a ``DistributedDataParallel``."""
    replica = getattr(module, "_replica", None)
    if not isinstance(replica, Replica):
        raise UsageError(f"this {type(module).__name__} is not replicated")
    return replica


# A copy of the module has these hooks too, but no replica: they must do nothing then.


def _before_forward(module: nn.Module, _: Any) -> None:
    replica = module.__dict__.get("_replica")
    if replica is not None:
        replica.before_forward()


def _after_forward(module: nn.Module, _: Any, output: Any) -> None:
    replica = module.__dict__.get("_replica")
    if replica is not None:
        replica.after_forward(output)
