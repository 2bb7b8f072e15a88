"""Helpers and data, and that the data are torch's; equality of everything a test may compare."""

# ruff: noqa: PT009

import os
import random
import socket
import subprocess
import sys
import time
import unittest
from unittest import mock

import pytest
import torch
import torch_kit

import gradsync.testing as kit
from gradsync.errors import DistNetworkError, UsageError


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("world_size", "num_inputs"), [(1, 1), (3, 1), (2, 2)])
def test_sparse_cases_are_torchs(world_size, num_inputs):
    for rank in range(world_size):
        ours = kit.simple_sparse_reduce_tests(rank, world_size, num_inputs)
        theirs = torch_kit.load().simple_sparse_reduce_tests(rank, world_size, num_inputs)
        assert len(ours) == len(theirs) == 6
        for our, their in zip(ours, theirs, strict=True):
            assert [len(part) for part in our] == [len(part) for part in their]
            pairs = zip([*our[0], *our[1]], [*their[0], *their[1]], strict=True)
            for mine, other in pairs:
                assert mine.is_sparse
                assert mine.sparse_dim() == other.sparse_dim()
                assert mine.shape == other.shape
                assert torch.equal(mine.to_dense(), other.to_dense())


def test_tcp_store_on_a_port_of_its_own():
    first, second = kit.create_tcp_store(), kit.create_tcp_store()
    assert first.port != second.port
    assert first.add("key", 2) == 2
    with pytest.raises(UsageError, match="TCPStore"):
        kit.create_tcp_store(is_master=False)


def test_free_port_is_free():
    with socket.socket() as probe:
        probe.bind(("localhost", kit.find_free_port()))


def test_retry_repeats_what_is_about_connections_only():
    calls = []

    @kit.retry_on_connect_failures
    def in_use():
        calls.append(1)
        if len(calls) < 3:
            raise DistNetworkError("bind: Address already in use")
        return "there"

    assert in_use() == "there"

    @kit.retry_on_connect_failures(connect_errors="busy")
    def wrong():
        calls.append(1)
        raise RuntimeError("Address already in use")  # all letters of "busy" are in here

    calls.clear()
    with pytest.raises(RuntimeError, match="already"):
        wrong()
    assert len(calls) == 1


def test_retry_gives_up():
    calls = []

    @kit.retry_on_connect_failures
    def refused():
        calls.append(1)
        raise ConnectionRefusedError("Connection refused")

    with mock.patch.object(time, "sleep"), pytest.raises(ConnectionRefusedError):
        refused()
    assert len(calls) == 10


def test_captured_output():
    with kit.captured_output() as (out, err):
        sys.stdout.write("one\n")
        sys.stderr.write("two")
    assert (out.getvalue(), err.getvalue()) == ("one\n", "two")


def test_temp_directories_come_and_go():
    with mock.patch.dict(os.environ):
        kit.initialize_temp_directories()
        folder = os.environ["TEMP_DIR"]
        assert sorted(os.listdir(folder)) == ["barrier", "init_dir", "test_dir"]
        assert os.environ["INIT_METHOD"] == f"file://{folder}/init_dir/shared_init_file"
        kit.initialize_temp_directories("tcp://localhost:1")
        assert not os.path.exists(folder), "the second takes the place of the first"
        folder = os.environ["TEMP_DIR"]
        assert os.environ["INIT_METHOD"] == "tcp://localhost:1"
        kit.cleanup_temp_dir()
        assert not os.path.exists(folder)
        assert "TEMP_DIR" not in os.environ


def test_gpus_of_ranks():
    assert kit.init_multigpu_helper(2, "gloo") == torch_kit.load().init_multigpu_helper(2, "gloo")
    with mock.patch("gradsync.testing.reference.device_counts", return_value={"cuda": 4}):
        assert kit.init_multigpu_helper(2, "nccl") == {0: [0], 1: [1]}
        assert kit.init_multigpu_helper(8, "nccl")[7] == []


def test_subtests_are_all_combinations_and_ranks_stay_in_step():
    seen = []

    def body(me):
        case = unittest.TestCase()
        calls = []
        kit.run_subtests(
            case,
            {"a": [1, 2], "b": "xy"},
            lambda first, *, c, a, b: calls.append((first, a, b, c)),
            0,
            c=3,
        )
        seen.append(calls)
        return me.log.lines()

    ranks = kit.run_threads(2, body)
    assert seen[0] == [(0, 1, "x", 3), (0, 1, "y", 3), (0, 2, "x", 3), (0, 2, "y", 3)]
    assert all(sum("barrier" in line for line in me.result) == 4 for me in ranks)


def test_seed():
    kit.set_rng_seed(5)
    first = torch.rand(1).item(), random.random()
    kit.set_rng_seed(5)
    assert (torch.rand(1).item(), random.random()) == first


@pytest.mark.parametrize("casting", [False, True])
def test_models_note_their_inputs(casting):
    inputs = {}
    model = kit.SaveForwardInputsModel(inputs, casting)
    x = torch.ones(2, 100, dtype=torch.float64 if casting else torch.float32)
    assert model(x).shape == (2, 100)
    assert inputs[model] is x
    assert inputs[model.c1] is x
    assert inputs[model.c2].dtype == torch.float32
    theirs = torch_kit.load().SaveForwardInputsModel({}, casting)
    assert list(dict(model.named_parameters())) == list(dict(theirs.named_parameters()))


# -- equality -------------------------------------------------------------------------------------

ONES = torch.ones(2, 2)
CASE = kit.TestCase()

EQUAL = {
    "tensors": (ONES, ONES.clone()),
    "rounded tensors": (ONES, ONES * (1 + 1e-6)),
    "tensor and number": (ONES, 1),
    "tensor and list": (torch.arange(3), [0, 1, 2]),
    "NaN": (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
    "sparse": (ONES.to_sparse(), ONES.to_sparse()),
    "inside": ({"a": [ONES, "text", None]}, {"a": [ONES + 1e-7, "text", None]}),
    "rounded numbers": (0.1 + 0.2, 0.3),
    "complex": (1j, 1j + 1e-9),
    "list and tuple": ([1, 2], (1, 2)),
    "size": (torch.Size([2, 2]), [2, 2]),
    "text": ("a", "a"),
    "bool and float": (True, 1.0),
}
DIFFERENT = {
    "tensors": (ONES, ONES + 1, "Tensor-likes are not close"),
    "dtypes": (ONES, ONES.double(), "dtype"),
    "shapes": (ONES, torch.ones(2), "shape"),
    "tensor and number": (ONES, 2, "not close"),
    "tensor and text": (ONES, "x", "cannot be compared"),
    "tensor and None": (ONES, None, "cannot be compared"),
    "inside": ({"a": [ONES]}, {"a": [ONES + 1]}, r"at \['a'\]\[0\]"),
    "numbers": (0.1, 0.2, "not close"),
    "integers": (1, 2, "1 != 2"),
    "lengths": ([1], [1, 2], "lengths differ"),
    "keys": ({"a": 1}, {"b": 1}, "keys differ"),
    "text inside": (["a"], ["b"], r"different at \[0\]"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name):
    left, right = EQUAL[name]
    CASE.assertEqual(left, right)
    CASE.assertEqual(right, left)
    with pytest.raises(AssertionError, match="mine"):
        CASE.assertNotEqual(left, right, "mine")


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name):
    left, right, message = DIFFERENT[name]
    with pytest.raises(AssertionError, match=message):
        CASE.assertEqual(left, right)
    with pytest.raises(AssertionError, match="mine"):
        CASE.assertEqual(left, right, "mine") if "cannot" not in message else CASE.fail("mine")
    CASE.assertNotEqual(left, right)


def test_tolerances():
    CASE.assertEqual(ONES, ONES + 0.5, atol=0.6, rtol=0)
    CASE.assertEqual(3, 4, atol=1)
    CASE.assertEqual(ONES, ONES.double(), exact_dtype=False)
    with pytest.raises(AssertionError):
        CASE.assertEqual(ONES, ONES + 0.5, atol=0.4, rtol=0)
    with pytest.raises(AssertionError):
        CASE.assertEqual(torch.ones(2, 3), torch.ones(3, 2).t(), exact_stride=True)
    with pytest.raises(AssertionError):
        CASE.assertEqual(torch.tensor([float("nan")]), float("nan"), equal_nan=False)


# -- the front door -------------------------------------------------------------------------------


def test_importing_the_kit_imports_neither_torch_nor_pytest():
    code = (
        "import sys, gradsync.testing; from gradsync.testing import faults, TEST_SKIPS;"
        "gradsync.testing.requires_gloo, gradsync.testing.VirtualClock;"
        "print([m for m in ('torch', 'pytest') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_listed_name_is_there_and_typed():
    import ast
    from pathlib import Path

    for name in kit.__all__:
        assert getattr(kit, name) is not None
    stub = Path(kit.__file__).with_suffix(".pyi")
    typed = {
        alias.name
        for node in ast.walk(ast.parse(stub.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(kit.__all__)
    assert not hasattr(kit, "no_such_name")
