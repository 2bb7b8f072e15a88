"""That all ranks of a call with several tensors have the same ones, compared before any is filled.

Tensors that travel side by side are one tensor to the backend, which compares how large that is and
not what it is made of. So their sizes go ahead of them, in a call of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b

import torch

from gradsync.backends.waits import present_site
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.errors import MismatchError
from gradsync.group.gathering import Gathering

__all__ = ["Layouts"]

_DIGEST_BYTES = 8
_TEXT_BYTES = 248


class Layouts(Work):
    """The call that compares them; it fails on every rank if they differ."""

    def __init__(
        self,
        group: Gathering,
        name: str,
        tensors: Sequence[torch.Tensor],
        timeout: Timeout | None = None,
    ) -> None:
        sizes = [f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in tensors]
        said = f"{len(sizes)} tensors: {', '.join(sizes)}"
        digest = blake2b(f"{name} of {said}".encode(), digest_size=_DIGEST_BYTES).digest()
        site = f" at {present_site()}"
        room = max(0, _TEXT_BYTES - len(site.encode()) - 2)
        fitted = said if len(said) <= room else said[: max(0, room - 1)] + "…"
        text = (fitted + site).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        row = torch.frombuffer(bytearray(digest + text), dtype=torch.uint8)
        self._group, self._name = group, name
        self._rows = torch.empty(group._size, row.numel(), dtype=torch.uint8)
        self._work = group.all_gather_single_async(self._rows.view(-1), row, timeout)

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until all have said theirs; raise if they differ."""
        self._work.wait(timeout)
        if self._difference is not None:
            raise self._difference
        return True

    def is_completed(self) -> bool:
        """Return whether all have said theirs."""
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        """Return the error of the call, or that the ranks differ, once that is known."""
        error = self._work.exception()
        if error is not None or not self._work.is_completed():
            return error
        return self._difference

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when all have said theirs, or now."""
        self._work.on_done(callback)

    @cached_property
    def _difference(self) -> MismatchError | None:
        if (self._rows[:, :_DIGEST_BYTES] == self._rows[0, :_DIGEST_BYTES]).all():
            return None
        texts = [bytes(row[_DIGEST_BYTES:].numpy()) for row in self._rows]
        lines = [
            f"  rank {rank}: {text.decode(errors='replace').rstrip()}"
            for rank, text in enumerate(texts)
        ]
        return MismatchError(
            f"{self._name}: the ranks' tensors do not fit together, so those that travel side by "
            "side were left as they are:\n" + "\n".join(lines),
            op=self._name,
            rank=self._group._rank,
            ranks=tuple(range(self._group._size)),
        )
