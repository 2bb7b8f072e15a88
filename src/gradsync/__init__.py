"""Data-parallel training for PyTorch: collectives through shared memory that never hang in silence.

``import gradsync as dist`` gives torch's names. Importing this package is quick and does not import
torch; names that need it are loaded when they are first used. ``__init__.pyi`` says the same to
type checkers.
"""

from __future__ import annotations

from gradsync import errors
from gradsync.base.lazy import lazy_names
from gradsync.torch_backend.register import register_when_possible

__version__ = "0.1.0"

_HOMES = {
    "backends.work": ("Work",),
    "backends.registry": ("Backend", "BackendConfig"),
    "base.dtypes": ("ReduceOp", "reduce_op"),
    "ddp.comm_hooks.hook": ("GradBucket",),
    "ddp.comm_hooks.register": ("BuiltinCommHookType",),
    "ddp.ddp": ("DistributedDataParallel",),
    "ddp.join": ("Join", "JoinHook", "Joinable"),
    "ddp.reducer": ("Reducer",),
    "ddp.replicate": ("replica_of", "replicate"),
    "device_mesh.mesh": ("DeviceMesh", "init_device_mesh"),
    "errors": tuple(errors.__all__),
    "group.coalesced": (
        "_broadcast_coalesced",
        "_coalescing_manager",
        "all_gather_coalesced",
        "all_reduce_coalesced",
        "coalescing_manager",
        "reduce_scatter_coalesced",
    ),
    "group.collectives": (
        "_all_gather_base",
        "_reduce_scatter_base",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    ),
    "group.group": ("ProcessGroup",),
    "group.messages": ("P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"),
    "group.monitored": ("monitored_barrier",),
    "group.profiling": ("record_comm",),
    "group.reductions": ("supports_complex",),
    "group.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "group.shared": ("shared_empty", "shared_like", "shared_zeros"),
    "launch.spawn": ("spawn",),
    "rendezvous.meeting": ("register_rendezvous_handler",),
    "session.breakpoint": ("breakpoint",),
    "session.debug": (
        "DebugLevel",
        "get_debug_level",
        "set_debug_level",
        "set_debug_level_from_env",
    ),
    "session.lifecycle": (
        "_abort_process_group",
        "_set_pg_timeout",
        "abort_process_group",
        "create_world",
        "default_pg_timeout",
        "destroy_process_group",
        "init_process_group",
    ),
    "session.queries": (
        "GroupMember",
        "GroupName",
        "RankType",
        "_get_default_group",
        "_get_default_store",
        "_rank_not_in_group",
        "get_backend",
        "get_backend_config",
        "get_default_backend_for_device",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "is_available",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
    ),
    "session.shrinking": ("shrink_group",),
    "session.subgroups": (
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    ),
    "stores.file": ("FileStore",),
    "stores.hash": ("HashStore",),
    "stores.prefix": ("PrefixStore",),
    "stores.store": ("Store",),
    "stores.tcp": ("TCPStore",),
}
"""Where each public name lives, by module of this package."""

_PACKAGES = ("ddp", "device_mesh", "group", "nn", "rendezvous")
"""Packages that are reached as attributes of this one."""

_names, __getattr__ = lazy_names(__name__, _HOMES, _PACKAGES)

__all__ = ["__version__", *_names]


def __dir__() -> list[str]:
    return sorted(__all__)


# torch.distributed.init_process_group("gradsync") works from here on.
register_when_possible()
