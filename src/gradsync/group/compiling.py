"""Living with torch.compile: collectives run as they are, wherever they are called from.

Its tracer would follow them down to the native core, whose methods it calls without their object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

import torch

__all__ = ["keep_compiler_out", "skip_in_compiler"]

_frames: Any = torch._C._dynamo.eval_frame


def skip_in_compiler(function: Callable[..., Any], *, and_what_it_calls: bool = False) -> None:
    """Let the compiler run ``function`` as it is, and compile what it calls or not."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    code = getattr(function, "__code__", None)
    if hasattr(_frames, "set_code_exec_strategy"):
        action = _frames._FrameAction
        inside = action.SKIP if and_what_it_calls else action.DEFAULT
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, inside))
    elif hasattr(_frames, "skip_code"):  # older versions
        _frames.skip_code(code)


def keep_compiler_out(namespace: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Do that to all functions of a module or class, given what ``vars()`` says of it."""
    home = namespace.get("__module__") or namespace["__name__"]
    for name, each in namespace.items():
        # What is wrapped has the code of its wrapper, which may be everybody's.
        is_own = isinstance(each, FunctionType) and each.__module__ == home
        if is_own and not hasattr(each, "__wrapped__") and name not in but:
            skip_in_compiler(each, and_what_it_calls=True)
