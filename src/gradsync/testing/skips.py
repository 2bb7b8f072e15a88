"""Skipping on a rank: every reason has an exit code, which the parent turns into a skip again.

The codes, names and time limits are those that tests of torch's distributed package know.
"""

from __future__ import annotations

import functools
import importlib
import sys
import unittest
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar, cast
from unittest import mock

from gradsync.config import environment

__all__ = [
    "DEFAULT_WORLD_SIZE",
    "TEST_SKIPS",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "DistTestCases",
    "SkipExit",
    "TestSkip",
    "at_least_x_gpu",
    "get_required_world_size",
    "get_timeout",
    "import_transformers_or_skip",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_odd_worldsize",
    "skip_if_rocm_arch_multiprocess",
    "skip_if_rocm_multiprocess",
    "skip_if_small_worldsize",
    "skip_reason_of",
    "with_dist_debug_levels",
    "with_nccl_blocking_wait",
]

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """Takes a test and returns one of the same type."""

    def __call__(self, function: F, /) -> F: ...


class TestSkip(NamedTuple):
    """A reason to skip, and the exit code that carries it from a rank to its parent."""

    exit_code: int
    message: str


# pytest takes every class Test* for tests; a NamedTuple's body cannot say otherwise.
TestSkip.__test__ = False  # type: ignore[attr-defined]

TEST_SKIPS = {
    "backend_unavailable": TestSkip(72, "the distributed backend is not available"),
    "small_worldsize": TestSkip(73, "needs a larger world"),
    "odd_worldsize": TestSkip(87, "needs an even world size"),
    "no_cuda": TestSkip(74, "needs CUDA"),
    "no_accelerator": TestSkip(89, "needs an accelerator"),
    "multi-gpu-1": TestSkip(75, "needs at least 1 GPU"),
    "multi-gpu-2": TestSkip(77, "needs at least 2 GPUs"),
    "multi-gpu-3": TestSkip(80, "needs at least 3 GPUs"),
    "multi-gpu-4": TestSkip(81, "needs at least 4 GPUs"),
    "multi-gpu-5": TestSkip(82, "needs at least 5 GPUs"),
    "multi-gpu-6": TestSkip(83, "needs at least 6 GPUs"),
    "multi-gpu-7": TestSkip(84, "needs at least 7 GPUs"),
    "multi-gpu-8": TestSkip(85, "needs at least 8 GPUs"),
    "nccl": TestSkip(76, "torch was built without NCCL"),
    "skipIfRocm": TestSkip(78, "does not work on ROCm"),
    "no_peer_access": TestSkip(79, "the GPUs cannot reach each other's memory"),
    "generic": TestSkip(86, "skipped on a rank"),
    "importerror": TestSkip(88, "a package is missing"),
}
"""Every reason that has an exit code of its own."""

_BY_CODE = {skip.exit_code: skip for skip in TEST_SKIPS.values()}

DEFAULT_WORLD_SIZE = 4
TIMEOUT_DEFAULT = float(environment().get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300"))
"""Seconds that a test may take."""
TIMEOUT_OVERRIDE: dict[str, float] = {
    "test_ddp_uneven_inputs": 400,
    "test_DistributedDataParallel": 500,
}
"""Seconds for tests that need other limits, by the name of the method."""


def get_timeout(test_id: str) -> float:
    """Return how many seconds the test with this id may take.

    >>> get_timeout("tests.test_ddp.TestDdp.test_ddp_uneven_inputs")
    400
    """
    return TIMEOUT_OVERRIDE.get(test_id.rsplit(".", 1)[-1], TIMEOUT_DEFAULT)


class SkipExit(SystemExit, unittest.SkipTest):
    """Ends a rank with a skip's exit code; in a test without ranks it is an ordinary skip."""

    def __init__(self, skip: TestSkip) -> None:
        super().__init__(skip.message)
        self.code = skip.exit_code


def skip_reason_of(exit_code: object) -> str | None:
    """Return the reason that an exit code stands for, None when it stands for none.

    >>> skip_reason_of(74), skip_reason_of(3)
    ('needs CUDA', None)
    """
    skip = _BY_CODE.get(exit_code) if isinstance(exit_code, int) else None
    return skip.message if skip is not None else None


def _leave(key: str) -> NoReturn:
    raise SkipExit(TEST_SKIPS[key])


# -- devices --------------------------------------------------------------------------------------


def device_counts() -> dict[str, int]:
    """Return how many devices of each kind of accelerator are here, without those that are not."""
    import torch

    kinds = {kind: getattr(torch, kind, None) for kind in ("cuda", "hpu", "xpu")}
    counts = {k: m.device_count() for k, m in kinds.items() if m is not None and m.is_available()}
    return {kind: count for kind, count in counts.items() if count}


def at_least_x_gpu(x: int) -> bool:
    """Return whether some kind of accelerator is here at least ``x`` times."""
    return any(count >= x for count in device_counts().values())


def _gpus(count: int) -> str:
    return f"multi-gpu-{min(max(count, 1), 8)}"  # there is no code beyond eight


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Decorator:
    """Skip the test with fewer than ``x`` devices; with ``allow_cpu``, run it where there is none.

    A test whose class has ``_handle_test_skip(message)`` is skipped by that.
    """

    def may_run() -> bool:
        return at_least_x_gpu(x) or (allow_cpu and not device_counts())

    return _unless(may_run, _gpus(x), ask_the_test=True)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Decorator:
    """Like ``skip_if_lt_x_gpu``, for the backend ``"nccl"`` only."""

    def may_run() -> bool:
        return backend != "nccl" or at_least_x_gpu(x)

    return _unless(may_run, _gpus(x), ask_the_test=True)


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Decorator:
    """Skip the test of the backend ``"nccl"`` with fewer than ``n`` devices, by exit code only."""
    return _unless(lambda: backend != "nccl" or at_least_x_gpu(n), _gpus(n))


def _unless(may_run: Callable[[], bool], key: str, *, ask_the_test: bool = False) -> Decorator:
    """Return a decorator that asks when the test runs, which is on a rank, not on import."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not may_run():
                hook = getattr(args[0], "_handle_test_skip", None) if args else None
                if not ask_the_test or hook is None:
                    _leave(key)
                return hook(TEST_SKIPS[key].message)
            return function(*args, **kwargs)

        return cast(F, wrapper)

    return decorate


def skip_if_no_gpu(function: F) -> F:
    """Skip the test without an accelerator for each rank of the environment's ``WORLD_SIZE``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not device_counts():
            _leave("no_cuda")
        size = int(environment().get("WORLD_SIZE", "1"))
        if not at_least_x_gpu(size):
            _leave(_gpus(size))
        return function(*args, **kwargs)

    return cast(F, wrapper)


# -- world sizes ----------------------------------------------------------------------------------


def _world_is(good: Callable[[int], bool]) -> bool:
    """Return whether the environment's world is good; that of mpirun is not ours to judge."""
    env = environment()
    return env.get("BACKEND") == "mpi" or good(int(env.get("WORLD_SIZE", "1")))


def skip_if_small_worldsize(function: F) -> F:
    """Skip the test when the environment's ``WORLD_SIZE`` is below 8."""
    return _unless(lambda: _world_is(lambda size: size >= 8), "small_worldsize")(function)


def skip_if_odd_worldsize(function: F) -> F:
    """Skip the test when the environment's ``WORLD_SIZE`` is odd."""
    return _unless(lambda: _world_is(lambda size: size % 2 == 0), "odd_worldsize")(function)


def get_required_world_size(obj: Any, default: int) -> int:
    """Return what ``requires_world_size`` says of the test that ``obj`` runs, else ``default``."""
    name = getattr(obj, "_testMethodName", "")
    return int(getattr(getattr(obj, name, None), "_required_world_size", default))


# -- other needs ----------------------------------------------------------------------------------


def import_transformers_or_skip() -> Decorator:
    """Skip the test when ``transformers`` cannot be imported."""

    def can_import() -> bool:
        try:
            importlib.import_module("transformers")
        except ImportError:
            return False
        return True

    return _unless(can_import, "importerror")


def skip_if_rocm_multiprocess(function: F) -> F:
    """Skip the test when torch is built for ROCm."""
    return _unless(lambda: not rocm_version(), "skipIfRocm")(function)


def skip_if_rocm_arch_multiprocess(arch: Sequence[str]) -> Decorator:
    """Skip the test on ROCm devices whose architecture begins with one of ``arch``."""

    def is_another() -> bool:
        import torch

        if not rocm_version() or not torch.cuda.is_available():
            return True
        return not torch.cuda.get_device_properties(0).gcnArchName.startswith(tuple(arch))

    return _unless(is_another, "skipIfRocm")


def rocm_version() -> str:
    """Return the version of ROCm that torch is built for, empty if it is not."""
    import torch

    return getattr(torch.version, "hip", None) or ""


# -- tests run under other settings ---------------------------------------------------------------


def with_nccl_blocking_wait(function: F) -> F:
    """Run the test with ``TORCH_NCCL_BLOCKING_WAIT=1`` and without asynchronous error handling."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.dict("os.environ", {"TORCH_NCCL_BLOCKING_WAIT": "1"}) as env:
            env.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
            return function(*args, **kwargs)

    return cast(F, wrapper)


def with_dist_debug_levels(levels: Sequence[str]) -> Decorator:
    """Run the test once for each level of ``TORCH_DISTRIBUTED_DEBUG``, with a barrier after each.

    The last run's result is returned.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            try:
                for level in levels:
                    with mock.patch.dict("os.environ", {"TORCH_DISTRIBUTED_DEBUG": level}):
                        _reread_debug_level()
                        result = function(*args, **kwargs)
                        barrier_of_all()
            finally:
                _reread_debug_level()
            return result

        return cast(F, wrapper)

    return decorate


def _reread_debug_level() -> None:
    # Only a loaded torch.distributed has a level that could be out of date.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        distributed.set_debug_level_from_env()


def barrier_of_all() -> None:
    """Wait for all ranks in whichever default group there is, gradsync's or torch's; else don't."""
    from gradsync.group.world import default_group

    group = default_group()
    if group is not None:
        group.barrier()
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()


class DistTestCases:
    """What torch's backends can and cannot do, as tests that are run for each of them ask."""

    skip_collective: ClassVar[dict[str, set[str]]] = {
        "allgather_coalesced": {"nccl", "mpi", "ucc", "xccl"},
        "reduce": set(),
        "sendrecv anysource": {"nccl", "ucc", "xccl"},
        "cpu barrier": {"nccl", "ucc", "xccl"},
    }
    backend_feature: ClassVar[dict[str, set[str]]] = {
        "gpu": {"nccl", "gloo", "ucc"},
        "cuda": {"nccl", "gloo", "ucc"},
        "ddp": {"nccl", "gloo", "ucc"},
        "subgroup": {"nccl", "gloo", "ucc"},
        "plugin": set(),
        "hpu": {"hccl"},
        "xpu": {"xccl"},
    }
