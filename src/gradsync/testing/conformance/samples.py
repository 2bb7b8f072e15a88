"""Data for the checks of backends: what the ranks hold, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsync.base.dtypes import DTYPE_NAMES, ReduceOp

__all__ = ["DTYPES", "SIZES", "is_defined", "model", "same", "sample", "sizes_for"]

# Older versions of torch lack some; of one it warns whenever it is used.
DTYPES = tuple(name for name in DTYPE_NAMES if hasattr(torch, name) and name != "complex32")
SIZES = (0, 1, 7, 1000, 100_003)

_ONE_OF_EACH_WIDTH = {"complex128", "float64", "float32", "bfloat16", "int8"}

_FLOAT8 = {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
_FLOATS = {"float64", "float32", "float16", "bfloat16"} | _FLOAT8
_COMPLEX = {"complex128", "complex64"}
_ONLY_CARRIED = {"float8_e8m0fnu", "float4_e2m1fn_x2"}
_BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}


def sizes_for(dtype: str, reduce: ReduceOp = ReduceOp.SUM) -> tuple[int, ...]:
    """Return the sizes to try: a large one only where it can make a difference.

    How data is cut depends on the width of an element, not on what is in it.
    """
    return SIZES if dtype in _ONE_OF_EACH_WIDTH and reduce == ReduceOp.SUM else SIZES[:-1]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal; torch compares no small floats by itself."""
    if str(a.dtype).startswith(("torch.float8", "torch.float4")):
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b)


def is_defined(dtype: str, reduce: ReduceOp) -> bool:
    """Return whether the reduction has a meaning for elements of this type."""
    if reduce == ReduceOp.PREMUL_SUM or dtype in _ONLY_CARRIED:
        return False  # the former not without a factor
    if reduce in _BITWISE:
        return dtype not in _FLOATS | _COMPLEX
    if reduce == ReduceOp.AVG:
        return dtype in _FLOATS | _COMPLEX
    return dtype not in _COMPLEX or reduce == ReduceOp.SUM


def sample(rank: int, count: int, dtype: str, piece: int = 0) -> torch.Tensor:
    """Return what ``rank`` has for ``piece``: small whole numbers, exact in any type and order."""
    numbers = (torch.arange(count) * 7 + rank * 3 + piece * 5) % 4
    if dtype in _ONLY_CARRIED:
        return numbers.to(torch.uint8).view(getattr(torch, dtype))
    return numbers.to(getattr(torch, dtype))


def model(tensors: list[torch.Tensor], reduce: ReduceOp) -> torch.Tensor:
    """Reduce in one process, in a type that holds the exact result."""
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(tensors).to(torch.int64)
        wide = stacked if reduce != ReduceOp.SUM else stacked.bool().any(0, keepdim=True).long()
    else:
        wide = torch.stack(
            [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors]
        )
        if reduce in _BITWISE:
            wide = torch.stack(tensors).to(torch.int64)
    folds: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    result = wide[0]
    for other in wide[1:]:
        result = folds[reduce](result, other)
    if reduce == ReduceOp.AVG:  # part by part: torch rounds a complex quotient differently
        parts = torch.view_as_real(result) if result.is_complex() else result
        parts /= len(tensors)
    return result.to(dtype)
