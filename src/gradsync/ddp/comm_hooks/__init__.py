"""Ways of averaging a bucket that users may choose or write themselves."""

from gradsync.ddp.comm_hooks.allreduce import allreduce_hook, noop_hook
from gradsync.ddp.comm_hooks.cast import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from gradsync.ddp.comm_hooks.hook import GradBucket
from gradsync.ddp.comm_hooks.register import (
    BuiltinCommHookType,
    DDPCommHookType,
    register_ddp_comm_hook,
)

__all__ = [
    "BuiltinCommHookType",
    "DDPCommHookType",
    "GradBucket",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "register_ddp_comm_hook",
]
