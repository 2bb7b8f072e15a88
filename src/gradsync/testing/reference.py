"""Data and helpers that tests of distributed code share: stores, ports, folders, sparse sums."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from gradsync.base.deadline import Timeout
from gradsync.errors import UsageError
from gradsync.stores.store import DEFAULT_TIMEOUT
from gradsync.stores.tcp import TCPStore
from gradsync.testing.skips import barrier_of_all, device_counts

__all__ = [
    "SEED",
    "SaveForwardInputsModel",
    "SaveForwardInputsModule",
    "captured_output",
    "cleanup_temp_dir",
    "create_tcp_store",
    "find_free_port",
    "init_multigpu_helper",
    "initialize_temp_directories",
    "retry_on_connect_failures",
    "run_subtests",
    "set_rng_seed",
    "simple_sparse_reduce_tests",
]

F = TypeVar("F", bound=Callable[..., Any])

SEED = 1234

_CONNECT_ERRORS = ("Address already in use", "Connection refused", "Connection reset by peer")
_TRIES = 10


def set_rng_seed(seed: int | None = None) -> None:
    """Seed torch's, Python's and, where it is loaded, numpy's random numbers."""
    chosen = SEED if seed is None else seed
    torch.manual_seed(chosen)
    random.seed(chosen)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(chosen)


# -- stores and ports -----------------------------------------------------------------------------


def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> TCPStore:
    """Start a store on a port of the system's choice, which nobody can take in between.

    ``jit_class`` and ``use_libuv`` are accepted and mean nothing here.
    """
    if not is_master:
        raise UsageError(
            "create_tcp_store starts a store; connect to one with TCPStore(addr, store.port)"
        )
    return TCPStore(
        addr, 0, world_size, True, timeout, wait_for_workers=wait_for_workers, use_libuv=use_libuv
    )


def find_free_port() -> int:
    """Return a TCP port that was free a moment ago; whoever can should bind port 0 instead."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def retry_on_connect_failures(
    func: F | None = None, connect_errors: str | Sequence[str] = _CONNECT_ERRORS
) -> Any:
    """Call again, up to ten times in all, when the error's text holds one of ``connect_errors``.

    Between the calls it sleeps a random time, because others may be trying the same.
    """
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    texts = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)
    # Ranks are seeded alike, and those that sleep alike meet again.
    jitter = secrets.SystemRandom()

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for number in range(1, _TRIES + 1):
            try:
                return func(*args, **kwargs)
            except (RuntimeError, OSError) as error:
                if number == _TRIES or not any(text in str(error) for text in texts):
                    raise
                time.sleep(jitter.uniform(0, min(1.0, 0.02 * 2**number)))
        return None

    return wrapper


# -- output and folders ---------------------------------------------------------------------------


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    r"""Collect what Python code prints: yields stdout and stderr.

    >>> with captured_output() as (out, err):
    ...     print("hello")
    >>> out.getvalue()
    'hello\n'
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Make a folder for a test and export it as ``TEMP_DIR``, with ``INIT_METHOD`` beside it.

    It holds ``barrier``, ``test_dir`` and ``init_dir``; ranks meet at a file in the last unless
    ``init_method`` says where. ``cleanup_temp_dir`` takes all of it back.
    """
    cleanup_temp_dir()
    folder = Path(tempfile.mkdtemp(prefix="gradsync-test-"))
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["INIT_METHOD"] = init_method or f"file://{folder}/init_dir/shared_init_file"
    _folders.append(str(folder))


def cleanup_temp_dir() -> None:
    """Remove the folder of ``initialize_temp_directories`` and its variables, if there is one."""
    while _folders:
        folder = _folders.pop()
        shutil.rmtree(folder, ignore_errors=True)
        if os.environ.get("TEMP_DIR") == folder:
            del os.environ["TEMP_DIR"]
            os.environ.pop("INIT_METHOD", None)


# A TEMP_DIR that someone else has set is not ours to remove.
_folders: list[str] = []


# -- data -----------------------------------------------------------------------------------------


def simple_sparse_reduce_tests(
    rank: int, world_size: int, num_inputs: int = 1
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return six cases of this rank's sparse tensors and the sums over all ranks.

    Three with 1, 2 and 3 sparse dimensions, three with 1, 2 and 3 dense ones beside a sparse one.
    """
    everyone = num_inputs * world_size
    shapes = [(sparse, 0) for sparse in (1, 2, 3)] + [(1, dense) for dense in (1, 2, 3)]
    cases = []
    for sparse_dims, dense_dims in shapes:
        inputs = [
            _staircase(num_inputs * rank + i, everyone, sparse_dims, dense_dims)
            for i in range(num_inputs)
        ]
        addends = [_staircase(r, everyone, sparse_dims, dense_dims) for r in range(everyone)]
        total = functools.reduce(torch.add, addends)
        cases.append((inputs, [total] * num_inputs))
    return cases


def _staircase(rank: int, size: int, sparse_dims: int, dense_dims: int) -> torch.Tensor:
    """Return ones at 0..rank of the first dimension and at 0 of the other sparse ones."""
    indices = torch.zeros(sparse_dims, rank + 1, dtype=torch.int64)
    indices[0] = torch.arange(rank + 1)
    dense = [2] * dense_dims
    values = torch.ones([rank + 1, *dense])
    # Left open, torch warns that nothing is checked.
    return torch.sparse_coo_tensor(
        indices, values, [size] * sparse_dims + dense, check_invariants=True
    )


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Return the GPU of each rank, or none for anybody when there are fewer than ranks."""
    count = max(device_counts().values(), default=0)
    return {rank: [rank] if world_size <= count else [] for rank in range(world_size)}


# -- running a body many times --------------------------------------------------------------------


def run_subtests(
    cls_inst: unittest.TestCase,
    subtest_config: Mapping[str, Sequence[Any]],
    test_fn: Callable[..., Any],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call ``test_fn`` with every combination of the values, each as a subtest, ranks in step."""
    for values in itertools.product(*subtest_config.values()):
        chosen = dict(zip(subtest_config, values, strict=True))
        with cls_inst.subTest(**chosen):
            _reset_compiler()
            test_fn(*test_args, **test_kwargs, **chosen)
            _reset_compiler()
        barrier_of_all()


def _reset_compiler() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


Inputs = dict[torch.nn.Module, torch.Tensor]


class SaveForwardInputsModule(torch.nn.Module):
    """A linear layer that notes its input in a dictionary, for tests of casting and moving."""

    def __init__(self, forward_inputs: Inputs, cast_forward_inputs: bool = False) -> None:
        super().__init__()
        self.l = torch.nn.Linear(100, 100)
        self.cast_forward_inputs = cast_forward_inputs
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note ``x`` and apply the layer, to ``x`` in the layer's dtype if casting is on."""
        self.forward_inputs[self] = x
        if self.cast_forward_inputs:
            x = x.to(self.l.weight.dtype)
        return cast(torch.Tensor, self.l(x))


class SaveForwardInputsModel(torch.nn.Module):
    """Two ``SaveForwardInputsModule`` in a row, ``c1`` and ``c2``."""

    def __init__(self, forward_inputs: Inputs, cast_forward_inputs: bool = False) -> None:
        super().__init__()
        self.forward_inputs = forward_inputs
        for name in ("c1", "c2"):
            self.add_module(name, SaveForwardInputsModule(forward_inputs, cast_forward_inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note ``x`` and apply both."""
        self.forward_inputs[self] = x
        for layer in self.children():
            x = layer(x)
        return x
