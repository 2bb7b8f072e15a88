"""The bucket plan, against torch's own assignment and by its laws."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from gradsync.ddp.planner import TensorSpec, assign, plan_arrival, plan_initial

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@st.composite
def cases(draw):
    count = draw(st.integers(1, 12))
    tensors = [
        torch.empty(draw(st.integers(0, 60)), dtype=DTYPES[draw(st.sampled_from(sorted(DTYPES)))])
        for _ in range(count)
    ]
    sparse = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    limits = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    order = draw(st.permutations(range(count)))
    return tensors, sparse, limits, order


def specs(tensors, sparse):
    return [
        TensorSpec(t.nbytes, str(t.dtype), sparse=s) for t, s in zip(tensors, sparse, strict=True)
    ]


def kinds(buckets, limits):
    """Leftover buckets of several dtypes come in an order that torch does not promise."""
    return sorted((tuple(b), limit) for b, limit in zip(buckets, limits, strict=True))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_assignment_is_torchs(case):
    tensors, sparse, limits, order = case
    ours = assign(specs(tensors, sparse), limits)
    assert ours == tuple(_compute_bucket_assignment_by_size(tensors, limits, sparse))
    # torch takes the tensors themselves in arrival order, with their numbers beside them.
    arrived = [tensors[n] for n in order]
    theirs = _compute_bucket_assignment_by_size(arrived, limits, sparse, list(order))
    assert kinds(*assign(specs(tensors, sparse), limits, order)) == kinds(*theirs)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_every_tensor_is_in_one_bucket_and_kinds_do_not_mix(case):
    tensors, sparse, limits, order = case
    known = specs(tensors, sparse)
    for plan in (
        plan_initial(known, limits),
        plan_arrival(known, limits, order),
        plan_arrival(known, limits, order[: len(order) // 2]),
    ):
        assert sorted(n for bucket in plan for n in bucket) == list(range(len(tensors)))
        for bucket in plan:
            assert len({known[n].dtype for n in bucket}) == 1
            assert len(bucket) == 1 or not any(known[n].sparse for n in bucket)
            # A bucket overshoots by its last tensor only.
            assert sum(known[n].nbytes for n in bucket[:-1]) < max(1, *limits)


def test_six_layers_of_a_mebibyte():
    layers = [TensorSpec(2**20, "float32")] * 6
    mib = 2**20
    arrived = [5, 4, 3, 2, 1, 0]
    assert plan_arrival(layers, [mib, 25 * mib], arrived) == ((5,), (4, 3, 2, 1, 0))
    assert plan_arrival(layers, [mib], arrived) == ((5,), (4,), (3,), (2,), (1,), (0,))
    assert plan_arrival(layers, [0], arrived) == ((5,), (4,), (3,), (2,), (1,), (0,))
