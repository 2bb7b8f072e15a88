"""A ``TestCase`` whose ``assertEqual`` knows tensors, wherever in a value they are."""

# ruff: noqa: PT009 - this is where unittest's assertions are made

from __future__ import annotations

import unittest
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

__unittest = True  # unittest leaves frames of such modules out of tracebacks

__all__ = ["TestCase"]


# Those that assert_close documents, as (relative, absolute).
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


class TestCase(unittest.TestCase):
    """``unittest.TestCase`` with comparisons for tensors and for floating-point numbers."""

    def assertEqual(  # noqa: N802 - unittest's name
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
        exact_layout: bool = False,
        exact_stride: bool = False,
    ) -> None:
        """Compare like ``torch.testing.assert_close``, inside lists, tuples and mappings too.

        Tensors may be compared with numbers and lists. Floats are equal up to rounding; everything
        that is no number is compared as ``unittest`` does.
        """
        if (atol is None) != (rtol is None):
            atol, rtol = atol or 0.0, rtol or 0.0
        self._compare(
            first,
            second,
            msg,
            "",
            {
                "atol": atol,
                "rtol": rtol,
                "equal_nan": equal_nan,
                "check_dtype": exact_dtype,
                "check_device": exact_device,
                "check_layout": exact_layout,
                "check_stride": exact_stride,
            },
        )

    def assertNotEqual(  # noqa: N802 - unittest's name
        self, first: Any, second: Any, msg: Any = None, **options: Any
    ) -> None:
        """Fail when ``assertEqual`` would not."""
        try:
            self.assertEqual(first, second, **options)
        except AssertionError:
            return
        self.fail(self._formatMessage(msg, f"{first!r} equals {second!r}"))

    def _compare(self, x: Any, y: Any, msg: Any, at: str, how: dict[str, Any]) -> None:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            self._compare_tensors(x, y, msg, at, how)
        elif _are_numbers(x, y) and (_is_inexact(x) or _is_inexact(y) or how["atol"] is not None):
            self._close(x, y, msg, at, how | {"check_dtype": False})
        elif isinstance(x, Mapping) and isinstance(y, Mapping):
            super().assertEqual(set(x), set(y), self._said(msg, f"keys{_place(at)} differ"))
            for key in x:
                self._compare(x[key], y[key], msg, f"{at}[{key!r}]", how)
        elif isinstance(x, list | tuple) and isinstance(y, list | tuple):
            length = self._said(msg, f"lengths{_place(at)} differ")
            super().assertEqual(len(x), len(y), length)
            for index, (left, right) in enumerate(zip(x, y, strict=True)):
                self._compare(left, right, msg, f"{at}[{index}]", how)
        else:
            super().assertEqual(x, y, self._said(msg, f"different{_place(at)}") if at else msg)

    def _compare_tensors(self, x: Any, y: Any, msg: Any, at: str, how: dict[str, Any]) -> None:
        if not isinstance(x, torch.Tensor):
            x, how = _like(x, y), how | {"check_dtype": False}
        elif not isinstance(y, torch.Tensor):
            y, how = _like(y, x), how | {"check_dtype": False}
        self._close(x, y, msg, at, how)

    def _close(self, x: Any, y: Any, msg: Any, at: str, how: dict[str, Any]) -> None:
        if not _are_plainly_close(x, y, how):
            torch.testing.assert_close(
                x, y, msg=lambda text: self._said(msg, f"{text}{_place(at)}"), **how
            )

    def _said(self, msg: Any, text: str) -> str:
        return text if msg is None else f"{text}: {msg}"


def _are_numbers(x: object, y: object) -> bool:
    return isinstance(x, Number) and isinstance(y, Number)


def _are_plainly_close(x: Any, y: Any, how: dict[str, Any]) -> bool:
    """Return whether two values are close, without a doubt.

    ``assert_close`` would say the same and has the words for everything else, but its first call
    in a process takes half a second for imports, and every rank is a new process.
    """
    if _are_numbers(x, y):
        kind = torch.complex128 if isinstance(x, complex) or isinstance(y, complex) else None
        x, y = (torch.tensor(v, dtype=kind or torch.float64) for v in (x, y))
    alike = x.layout == y.layout == torch.strided and (x.shape, x.dtype, x.device) == (
        y.shape,
        y.dtype,
        y.device,
    )
    if not alike or how["check_stride"]:
        return False
    rtol, atol = _TOLERANCES.get(x.dtype, (0.0, 0.0))
    if how["atol"] is not None:
        rtol, atol = how["rtol"], how["atol"]
    return bool(torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=how["equal_nan"]))


def _is_inexact(value: object) -> bool:
    return isinstance(value, float | complex)


def _place(at: str) -> str:
    return f" at {at}" if at else ""


def _like(value: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a number or a list as a tensor that can be compared with ``tensor``."""
    try:
        made = torch.as_tensor(value, device=tensor.device)
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{value!r} cannot be compared with a tensor") from None
    return made.expand(tensor.shape) if made.dim() == 0 else made
