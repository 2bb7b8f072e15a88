"""Communication hooks: what they are given, what they return, and how they are composed."""

import pytest
import torch
from models import ROWS, batch, make

import gradsync as dist
from gradsync.ddp.comm_hooks import (
    BuiltinCommHookType,
    DDPCommHookType,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    register_ddp_comm_hook,
)
from gradsync.testing import assert_same_on_all_ranks


def gradients(ddp, rank, steps=3):
    """Return the gradients of the last of some steps, and those of one process."""
    name = "unused" if hasattr(ddp.module, "never") else "plain"
    whole = make(name)
    x = batch(0, 2 * ROWS)
    whole(x).square().mean().backward()
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x[rank * ROWS :][:ROWS]).square().mean().backward()
    return [p.grad for p in ddp.parameters()], [p.grad for p in whole.parameters()]


HOOKS = {
    "allreduce": (allreduce_hook, 0.0),
    "fp16": (fp16_compress_hook, 1e-2),
    "bf16": (bf16_compress_hook, 5e-2),
    "fp16(allreduce)": (fp16_compress_wrapper(allreduce_hook), 1e-2),
    "bf16(allreduce)": (bf16_compress_wrapper(allreduce_hook), 5e-2),
}


@pytest.mark.ranks(2)
def test_built_in_hooks_average(rank):
    for name, (hook, tolerance) in HOOKS.items():
        for model in ("plain", "unused"):
            ddp = dist.DistributedDataParallel(make(model), bucket_cap_mb=0.0002)
            ddp.register_comm_hook(None, hook)
            ours, theirs = gradients(ddp, rank)
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None), name
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=tolerance or 1e-5, atol=tolerance or 1e-6)
                    assert_same_on_all_ranks(a)
    ddp = dist.DistributedDataParallel(make("plain"))
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    ours, theirs = gradients(ddp, rank)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    ddp = dist.DistributedDataParallel(make("plain"))
    register_ddp_comm_hook(DDPCommHookType.NOOP, ddp)
    ours, theirs = gradients(ddp, rank)
    alone = make("plain")
    alone(batch(0, 2 * ROWS)[rank * ROWS :][:ROWS]).square().mean().backward()
    torch.testing.assert_close(ours, [p.grad for p in alone.parameters()])


@pytest.mark.ranks(2)
def test_a_hook_sees_the_buckets_in_order_and_replaces_the_division(rank):
    ddp = dist.DistributedDataParallel(make("plain"), bucket_cap_mb=0)
    seen = []

    def hook(state, bucket: "dist.GradBucket"):
        state.append((bucket.index(), bucket.is_last()))
        assert bucket.buffer().dim() == 1
        for grad, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert grad.shape == param.shape
            assert grad.data_ptr() == bucket.buffer().data_ptr()  # alone in its bucket
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    ddp.register_comm_hook(seen, hook)
    assert ddp._replica.comm_hook_name.endswith("hook")
    ours, theirs = gradients(ddp, rank, steps=2)
    torch.testing.assert_close(ours, [2 * grad for grad in theirs])
    assert seen == [(k, k == 5) for k in range(6)] * 2
    with pytest.raises(RuntimeError, match="registered already"):
        ddp.register_comm_hook(None, noop_hook)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.ranks(2)
def test_weights_reach_hooks_and_mistakes_are_named(rank):
    ddp = dist.DistributedDataParallel(make("plain"))
    ddp.register_comm_hook(None, allreduce_hook)
    whole = make("plain")
    x = batch(0, 8)
    whole(x).square().mean().backward()
    rows = slice(0, 2) if rank == 0 else slice(2, 8)
    ddp.weight(rows.stop - rows.start)
    ddp(x[rows]).square().mean().backward()
    torch.testing.assert_close(
        [p.grad for p in ddp.parameters()], [p.grad for p in whole.parameters()]
    )

    def wrong_annotation(state, bucket: int):
        return bucket

    with pytest.raises(TypeError, match="is a function"):
        dist.DistributedDataParallel(make("plain")).register_comm_hook(None, 3)
    with pytest.raises(ValueError, match="is a GradBucket"):
        dist.DistributedDataParallel(make("plain")).register_comm_hook(None, wrong_annotation)

    def raises(state, bucket):
        raise ZeroDivisionError("mine")

    for hook, kind, match in [
        (lambda state, bucket: bucket.buffer(), RuntimeError, "returns a torch.futures.Future"),
        (lambda state, bucket: done([1, 2]), RuntimeError, "holds a tensor"),
        (lambda state, bucket: done(torch.ones(3)), RuntimeError, "as many elements"),
        (raises, ZeroDivisionError, "mine"),
    ]:
        ddp = dist.DistributedDataParallel(make("plain"))
        ddp.register_comm_hook(None, hook)
        with pytest.raises(kind, match=match):
            ddp(x).sum().backward()
