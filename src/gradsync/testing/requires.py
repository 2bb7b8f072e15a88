"""What a test needs to be there when it is defined: ordinary unittest skips."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gradsync.testing.skips import Decorator, at_least_x_gpu, rocm_version

__all__ = [
    "ACCELERATOR_DIST_BACKENDS",
    "require_world_size",
    "requires_accelerator_dist_backend",
    "requires_gloo",
    "requires_mpi",
    "requires_nccl",
    "requires_nccl_version",
    "requires_ucc",
    "requires_world_size",
    "requires_xccl",
    "skip_but_pass_in_sandcastle",
    "skip_but_pass_in_sandcastle_if",
    "skip_if_rocm_ver_lessthan_multiprocess",
    "skip_if_win32",
    "sm_is_or_higher_than",
]

F = TypeVar("F", bound=Callable[..., Any])
ACCELERATOR_DIST_BACKENDS = ["nccl", "xccl", "hccl"]


def _torch_has(backend: str) -> bool:
    """Return whether torch's own package offers a backend."""
    import torch.distributed as distributed

    if not distributed.is_available():
        return False
    ask = getattr(distributed, f"is_{backend}_available", None)
    # One that is not torch's own (hccl) registers itself by name.
    return bool(ask()) if ask is not None else distributed.is_backend_available(backend)


def _requires(backend: str) -> Decorator:
    return unittest.skipUnless(_torch_has(backend), f"torch was built without {backend}")


def requires_gloo() -> Decorator:
    """Skip the test when torch has no Gloo."""
    return _requires("gloo")


def requires_nccl() -> Decorator:
    """Skip the test when torch has no NCCL."""
    return _requires("nccl")


def requires_ucc() -> Decorator:
    """Skip the test when torch has no UCC."""
    return _requires("ucc")


def requires_mpi() -> Decorator:
    """Skip the test when torch has no MPI."""
    return _requires("mpi")


def requires_xccl() -> Decorator:
    """Skip the test when torch has no XCCL."""
    return _requires("xccl")


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Decorator:
    """Skip the test when NCCL is older than ``version``; without CUDA this decides nothing."""
    import torch

    if not torch.cuda.is_available():
        return lambda function: function
    if not _torch_has("nccl"):
        return _requires("nccl")
    found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return unittest.skipIf(
        found < version, f"needs NCCL {'.'.join(map(str, version))} or later: {msg}"
    )


def requires_accelerator_dist_backend(backends: Sequence[str] | None = None) -> Decorator:
    """Skip the test unless one of the accelerators' backends is there (any, or one of these)."""
    wanted = [b for b in ACCELERATOR_DIST_BACKENDS if backends is None or b in backends]
    return unittest.skipUnless(
        any(map(_torch_has, wanted)), f"torch was built without {' and '.join(wanted)}"
    )


def requires_world_size(n: int) -> Decorator:
    """Note that a test wants ``n`` ranks, and skip it when there are fewer devices than that.

    ``get_required_world_size`` reads the note.
    """

    def decorate(function: F) -> F:
        function._required_world_size = n  # type: ignore[attr-defined]
        return unittest.skipUnless(at_least_x_gpu(n), f"needs {n} devices")(function)

    return decorate


require_world_size = requires_world_size


def skip_if_rocm_ver_lessthan_multiprocess(version: tuple[int, ...] | None = None) -> Decorator:
    """Skip the test on a ROCm that is older than ``version``."""
    built = rocm_version()
    found = tuple(int(part) for part in built.split("-")[0].split(".") if part.isdigit())
    return unittest.skipIf(
        bool(built) and version is not None and found < tuple(version),
        f"needs ROCm {version}, found {built}",
    )


def skip_if_win32() -> Decorator:
    """Skip the test on Windows."""
    return unittest.skipIf(sys.platform == "win32", "does not work on Windows")


def skip_but_pass_in_sandcastle(reason: str) -> Decorator:
    """Skip the test; the name is that of torch's decorator, which also knows an internal CI."""
    return unittest.skip(reason)


def skip_but_pass_in_sandcastle_if(condition: object, reason: str) -> Decorator:
    """Skip the test if ``condition`` is true."""
    return unittest.skipIf(bool(condition), reason)


def sm_is_or_higher_than(device: Any, major: int, minor: int) -> bool:
    """Return whether ``device`` is a CUDA device of at least this compute capability."""
    import torch

    if torch.device(device).type != "cuda" or rocm_version():
        return False
    return torch.cuda.get_device_capability(device) >= (major, minor)
