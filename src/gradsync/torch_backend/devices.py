"""The backends of other devices in a group like "cpu:gradsync,cuda:nccl".

torch makes them one after the other, and drops what it has when one of them is a whole process
group, as ours is. So ours takes over what torch made before it, and makes what would have come
after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from gradsync.errors import BackendUnavailable
from gradsync.torch_backend.register import NAME

if TYPE_CHECKING:
    from gradsync.torch_backend.process_group import TorchProcessGroup

__all__ = ["add_other_devices"]


def add_other_devices(
    group: TorchProcessGroup, options: Any, backend_options: Any, request: Mapping[str, Any]
) -> None:
    """Give ``group`` the backends of the other devices that its user asked for."""
    config = request.get("backend_config")
    devices = {} if config is None else config.get_device_backend_map()
    made_by_torch = True
    for device, name in devices.items():
        if name == NAME:
            made_by_torch = False
            continue
        kind = dist.Backend.backend_type_map.get(name, c10d.ProcessGroup.BackendType.CUSTOM)
        if made_by_torch:
            backend = request["pg"]._get_backend(torch.device(device))
        else:
            # Where torch would have put it: next to ours, under the name of its device.
            store = c10d.PrefixStore(f"{device}/", request["prefix_store"])
            backend = _make(name, store, options, backend_options)
        group.add_device(device, kind, backend)


def _make(name: str, store: Any, options: Any, backend_options: Any) -> Any:
    who = store, options.group_rank, options.group_size
    if name == dist.Backend.GLOO:
        return c10d.ProcessGroupGloo(*who, timeout=options.timeout)
    for known in (dist.Backend.NCCL, dist.Backend.XCCL):
        engine = getattr(c10d, f"ProcessGroup{known.upper()}", None)
        if name == known and engine is not None:
            chosen = backend_options or engine.Options()
            chosen._timeout = options.timeout
            chosen.global_ranks_in_group = options.global_ranks_in_group
            chosen.group_name = options.group_id
            backend = engine(*who, chosen)
            backend._set_sequence_number_for_group()
            return backend
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise BackendUnavailable(f"this torch has no backend {name!r} to work next to gradsync")
    if not plugin.extended_api:
        return plugin.creator_fn(*who, options.timeout)
    there = _DistributedBackendOptions()
    there.store = store
    for field in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
        setattr(there, field, getattr(options, field))
    return plugin.creator_fn(there, backend_options)
