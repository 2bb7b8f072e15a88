"""Keeps torch.compile out of the backend's own code.

Where a compiled program leaves the graph to make a call, the compiler looks at every Python
function on the way. torch's own it knows; ours it would trace, down to the objects of C++ that it
cannot see into.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

__all__ = ["keep_compiler_out"]

_frames: Any = torch._C._dynamo.eval_frame


def keep_compiler_out(*classes: type) -> None:
    """Let the methods of ``classes``, and all that they call, run as they are."""
    if not hasattr(_frames, "set_code_exec_strategy"):
        return  # older versions
    action = _frames._FrameAction
    as_it_is = _frames._FrameExecStrategy(action.SKIP, action.SKIP)
    for one in classes:
        for method in vars(one).values():
            if isinstance(method, FunctionType):
                _frames.set_code_exec_strategy(method.__code__, as_it_is)
