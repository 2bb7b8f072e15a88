"""Tensors of more than 2 GiB, where 32-bit counts would end."""

from __future__ import annotations

import psutil
import pytest
import torch

import gradsync as dist

BYTES = 2**31 + 12_345


@pytest.mark.skipif(
    psutil.virtual_memory().available < 4 * BYTES, reason="needs 8 GiB of free memory"
)
@pytest.mark.ranks(2, timeout=300)
def test_more_than_two_gibibytes_are_reduced_to_the_last_element() -> None:
    tensor = torch.full((BYTES,), dist.get_rank() + 1, dtype=torch.uint8)
    tensor[-1] = 10
    dist.all_reduce(tensor)
    assert int(tensor[0]) == 3
    assert int(tensor[2**31]) == 3
    assert int(tensor[-1]) == 20
    if dist.get_rank() == 0:
        tensor[-2] = 77
    dist.broadcast(tensor, 0)
    assert int(tensor[-2]) == 77
