"""What a replica can say of itself, under the names of torch's DDP logging data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradsync.config import environment
from gradsync.ddp.replica import Replica

__all__ = ["logging_data"]

_VARIABLES = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}


def logging_data(replica: Replica, **choices: Any) -> dict[str, Any]:
    """Return sizes, choices and times as one flat table; ``choices`` come from the wrapper."""
    reducer, group, options = replica.reducer, replica.group, replica.options
    params = reducer.params
    env = environment()
    data: dict[str, Any] = {
        "module_name": type(replica.module).__name__,
        "world_size": group.size(),
        "rank": group.rank(),
        "backend_name": group.name(),
        "broadcast_buffers": int(options.forward_sync_buffers),
        "bucket_cap_bytes": options.cap_bytes,
        "bucket_sizes": _listed(bucket.nbytes for bucket in reducer.buckets),
        "dtypes": _listed(sorted({str(p.dtype).removeprefix("torch.") for p in params})),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "has_sync_bn": int(
            any(isinstance(part, nn.SyncBatchNorm) for part in replica.module.modules())
        ),
        "is_multi_device_module": int(len({p.device for p in params}) > 1),
        "iteration": reducer.passes,
        "comm_hook": replica.comm_hook_name or "",
        "torch_version": torch.__version__,
        **{name: env.get(variable, "N/A") for name, variable in _VARIABLES.items()},
        **choices,
    }
    if reducer.passes:
        data |= {
            "has_rebuilt_buckets": int(reducer.has_rebuilt),
            "num_buckets_reduced": len(reducer.plan),
            "rebuilt_bucket_sizes": data["bucket_sizes"] if reducer.has_rebuilt else "",
            "rebuilt_per_bucket_param_indices": "; ".join(_listed(b, " ") for b in reducer.plan),
            "prev_iteration_grad_ready_order_indices": _listed(reducer.arrivals.order),
            "unused_parameters": _listed(reducer.unused),
            "unused_parameter_size": _bytes_of(reducer.unused, reducer.names, params),
            "can_set_static_graph": int(not reducer.unused_changed),
            **reducer.timing.figures(),
        }
    if reducer.error is not None:
        data |= {"has_error": 1, "error": reducer.error}
    return data


def _listed(values: Any, separator: str = ", ") -> str:
    return separator.join(str(value) for value in values)


def _bytes_of(unused: tuple[str, ...], names: list[str], params: list[nn.Parameter]) -> int:
    sizes = {n: p.numel() * p.element_size() for n, p in zip(names, params, strict=True)}
    return sum(sizes[name] for name in unused)
