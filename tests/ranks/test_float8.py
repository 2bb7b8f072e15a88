"""8-bit floats: the native conversions are torch's, for every value and at every edge."""

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
