"""What a rank that has run out of inputs does for a replica: zeros where others send gradients."""

from __future__ import annotations

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.ddp.buffers import BufferHookLocation
from gradsync.ddp.compiling import outside_of_compiler
from gradsync.ddp.join import JoinHook
from gradsync.ddp.replica import Replica

__all__ = ["ReplicaJoinHook", "announce_iteration"]


def _agree(replica: Replica, *values: int) -> list[int]:
    flags = torch.tensor(values)
    replica.group.all_reduce(flags, ReduceOp.MAX)
    return [int(flag) for flag in flags]


@outside_of_compiler
def announce_iteration(replica: Replica) -> int:
    """On an active rank: tell the shadows what will follow; return whose buffers count."""
    syncs = replica.sync_gradients and torch.is_grad_enabled()
    rank = replica.group.rank()
    return _agree(replica, int(syncs), int(replica.buffers_are_due()), rank)[2]


class ReplicaJoinHook(JoinHook):
    """Shadows a replica's forward and backward."""

    def __init__(self, replica: Replica, divide_by_initial_world_size: bool) -> None:
        self._replica = replica
        # With weights, those without inputs weigh nothing; without, they count as ranks.
        replica.reducer.weight.default = None if divide_by_initial_world_size else 1.0

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        replica = self._replica
        syncs, buffers, root = _agree(replica, 0, 0, -1)
        if buffers:
            replica.buffer_sync.run(BufferHookLocation.PRE_FORWARD, root)
        if syncs:
            replica.prepare()
            replica.reducer.shadow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give everybody the model of the last to join, by the highest rank among those."""
        replica = self._replica
        replica.reducer.weight.default = None
        root = _agree(replica, replica.group.rank() if is_last_joiner else -1)[0]
        replica.broadcast_state(buffers=replica.options.forward_sync_buffers, root=root)
