"""Types of few bits: conversions are torch's for every value; what has no sum is carried."""

import pytest
import torch

import gradsync as dist

NAMES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_values_is_added_as_torch_does(rank, name):
    dtype = getattr(torch, name)
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = codes.repeat_interleave(256), codes.repeat(256)
    wide = pairs[0].view(dtype).float() + pairs[1].view(dtype).float()
    for reduce, expected in (
        (dist.ReduceOp.SUM, wide),
        (dist.ReduceOp.AVG, wide / 2),
        (dist.ReduceOp.PRODUCT, pairs[0].view(dtype).float() * pairs[1].view(dtype).float()),
    ):
        tensor = pairs[rank].view(dtype).clone()
        dist.all_reduce(tensor, reduce)
        expect_same(tensor, expected.to(dtype))


def expect_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    a, b = ours.float(), theirs.float()
    assert torch.equal(a.isnan(), b.isnan())
    number = ~a.isnan()  # the sign of NaN means nothing
    assert torch.equal(ours.view(torch.uint8)[number], theirs.view(torch.uint8)[number])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_value_survives(name):
    tensor = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    before = tensor.clone()
    dist.all_reduce(tensor)
    expect_same(tensor, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_types_without_sums_are_carried(rank, name):
    dtype = getattr(torch, name)
    codes = torch.arange(256, dtype=torch.uint8)
    tensors = [(codes + rank).view(dtype), (codes + 2 * rank).view(dtype)]
    with pytest.raises(dist.UsageError, match=f"SUM of {name}"):
        dist.all_reduce(tensors[0])
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 10_000, 1)
    assert torch.equal(tensors[0].view(torch.uint8), codes + 1)
    assert torch.equal(tensors[1].view(torch.uint8), codes + 2)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_complex_halves_are_added_and_odd_types_refused_with_a_way_out(rank):
    parts = torch.tensor([[1.0, 2.0], [256.0, -3.0]]).half() + rank
    sums, means = [[3, 5], [513, -5]], [[1.5, 2.5], [256.5, -2.5]]
    for op, expected in ((dist.ReduceOp.SUM, sums), (dist.ReduceOp.AVG, means)):
        tensor = torch.view_as_complex(parts.clone())
        dist.all_reduce(tensor, op)
        assert torch.equal(torch.view_as_real(tensor), torch.tensor(expected).half())
    with pytest.raises(dist.UsageError, match="PRODUCT of complex32"):
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    with pytest.raises(
        dist.UsageError, match=r"does not know torch.bits8; .*\.view\(torch.uint8\)"
    ):
        dist.broadcast(torch.zeros(2, dtype=torch.uint8).view(torch.bits8), 0)
