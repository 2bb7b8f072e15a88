"""What a user may choose, checked before anything is sent to anyone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.errors import UsageError

__all__ = ["DEFAULT_CAP_BYTES", "DDPOptions", "bucket_limits", "buffer_choices", "check_devices"]

DEFAULT_CAP_BYTES = 25 << 20


@dataclass(frozen=True)
class DDPOptions:
    """The choices that shape how a module is replicated."""

    limits: tuple[int, ...] | None = None
    """Bytes of the first, second, ... bucket; None: what suits the engine."""
    init_sync: bool = True
    init_sync_buffers: bool = True
    forward_sync_buffers: bool = True
    strict: bool = False
    device: torch.device | None = None
    """Where inputs are moved to, for a module on one accelerator."""

    @property
    def cap_bytes(self) -> int:
        """The largest limit."""
        return max(self.limits or (DEFAULT_CAP_BYTES,))


def bucket_limits(
    cap_mb: float | None, caps_mb: Sequence[float] | None = None
) -> tuple[int, ...] | None:
    """Return the limits of buckets in bytes, None unless the user gives some.

    >>> bucket_limits(0.5), bucket_limits(None, [1, 4])
    ((524288,), (1048576, 4194304))
    """
    caps = list(caps_mb or ([] if cap_mb is None else [cap_mb]))
    if any(cap < 0 for cap in caps):
        raise UsageError(f"a bucket has a number of MiB, got {caps_mb or cap_mb}")
    return tuple(int(cap * (1 << 20)) for cap in caps) or None


def buffer_choices(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether buffers are synchronised at first and in each forward."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "broadcast_buffers is ignored: forward_sync_buffers was given too",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    both = True if broadcast_buffers is None else broadcast_buffers
    return both, both


def check_devices(
    params: Sequence[torch.nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Return where inputs go and where outputs come from; both None for CPUs or many devices."""
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(f"device_ids names one device or none, got {list(device_ids)}")
    kinds = {param.device.type for param in params}
    if len(kinds) > 1:
        raise UsageError(f"all parameters must be on one type of device, found {sorted(kinds)}")
    devices = {param.device for param in params}
    if not device_ids or kinds == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            raise UsageError(
                "device_ids and output_device are for modules on one accelerator; leave them out: "
                f"got {device_ids} and {output_device} with parameters on {devices}"
            )
        return None, None
    kind = next(iter(kinds))

    def place(which: Any) -> torch.device:
        return torch.device(kind, which) if isinstance(which, int) else torch.device(which)

    target = place(device_ids[0])
    return [target], target if output_device is None else place(output_device)
