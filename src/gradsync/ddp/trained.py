"""``Trained``: which parameters train, and in which types; looked at before each forward.

Users freeze layers and change types between steps. All ranks must do so together: buckets are
planned anew from what is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from gradsync.base.dtypes import ReduceOp
from gradsync.ddp.agreement import explaining
from gradsync.ddp.bucket import gradient_dtype
from gradsync.ddp.init_sync import verify_same
from gradsync.group.group import ProcessGroup

__all__ = ["Trained"]

_TYPES = ("dtype", "grad_dtype") if hasattr(torch.Tensor, "grad_dtype") else ("dtype",)
_state = attrgetter("requires_grad", *_TYPES)


class Trained:
    """The parameters that take part in a pass."""

    def __init__(self, named: Sequence[tuple[str, Any]]) -> None:
        self._named = named
        self._params = [param for _, param in named]
        self._seen: list[Any] = []
        self._left: list[int] = []
        self.numbers: list[int] = []
        """The parameters that train, and frozen ones with a gradient that is still to be sent."""
        self.dtypes: list[torch.dtype] = []
        """The types of all parameters' gradients."""

    def has_changed(self) -> bool:
        """Return whether buckets must be planned anew."""
        return bool(self._left) or self._seen != list(map(_state, self._params))

    def look(self) -> None:
        """Take note of what trains now."""
        params, left = self._params, set(self._left)
        self._seen = list(map(_state, params))
        self.numbers = [n for n, p in enumerate(params) if p.requires_grad or n in left]
        self.dtypes = list(map(gradient_dtype, params))

    def agree(self, group: ProcessGroup, dirty: Sequence[int]) -> None:
        """Raise unless the others have made the same changes; see which gradients are left.

        A gradient that was accumulated on this rank alone before its parameter was frozen is
        marked in ``dirty``. If any rank has one, all average it in the next pass.
        """
        if not self._seen:
            return  # the ranks have only just compared their models
        with explaining(
            "This rank is planning its buckets anew, as requires_grad or the type has changed "
            f"here of: {self._changed()}. Freeze, unfreeze and convert parameters on all ranks."
        ):
            verify_same(self._named, {}, group)
        params = self._params
        frozen = [n for n in self.numbers if not params[n].requires_grad]
        self._left = []
        if frozen:
            flags = [bool(dirty[n]) and params[n].grad is not None for n in frozen]
            found = torch.tensor(flags, dtype=torch.uint8)
            group.all_reduce(found, ReduceOp.MAX)
            self._left = [n for n, is_left in zip(frozen, found.tolist(), strict=True) if is_left]

    def _changed(self) -> str:
        states = zip(self._named, self._seen, strict=True)
        return ", ".join(name for (name, param), seen in states if _state(param) != seen)
