"""That all ranks say the same of what they are about to do, compared before anything is done.

The backend compares its own calls. What is made of several of them, or put side by side in one, is
something else to the ranks than to it.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch

from gradsync.backends.waits import present_site
from gradsync.backends.work import Work
from gradsync.base.deadline import Timeout
from gradsync.errors import MismatchError
from gradsync.group.gathering import Gathering

__all__ = ["Alike", "check_alike"]

_DIGEST_BYTES = 8
"""As many as travel with the announcement of a call."""
_TEXT_BYTES = 248


def check_alike(group: Gathering, name: str, said: str, timeout: Timeout | None) -> None:
    """Raise on every rank, with what each says and its line, unless all say the same of ``name``.

    One small call, and another when they differ.
    """
    if group._size == 1:
        return
    mine = int.from_bytes(_digest(name, said), "little", signed=True)
    digests = torch.empty(group._size, dtype=torch.int64)
    group.all_gather_single(digests, torch.tensor([mine]), timeout)
    if digests.tolist() == [mine] * group._size:
        return
    rows = torch.empty(group._size, _TEXT_BYTES, dtype=torch.uint8)
    group.all_gather_single(rows, _bytes_in(_text(said)), timeout)
    raise _mismatch(group, name, rows, "nothing was done")


class Alike(Work):
    """The same as a call in flight; it fails if they differ, what is behind it may go well."""

    def __init__(self, group: Gathering, name: str, said: str, timeout: Timeout | None) -> None:
        row = _bytes_in(_digest(name, said) + _text(said))
        self._group, self._name = group, name
        self._rows = torch.empty(group._size, row.numel(), dtype=torch.uint8)
        self._work = group.all_gather_single_async(self._rows.view(-1), row, timeout)

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until all have said theirs; raise if they differ."""
        self._work.wait(timeout)
        error = self._difference()
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """Return whether all have said theirs."""
        return self._work.is_completed()

    def exception(self) -> BaseException | None:
        """Return the error of the call, or that the ranks differ, once that is known."""
        error = self._work.exception()
        if error is not None or not self._work.is_completed():
            return error
        return self._difference()

    def on_done(self, callback: Callable[[], object]) -> None:
        """Run ``callback()`` when all have said theirs, or now."""
        self._work.on_done(callback)

    def _difference(self) -> MismatchError | None:
        digests, texts = self._rows.split_with_sizes([_DIGEST_BYTES, _TEXT_BYTES], dim=1)
        if (digests == digests[0]).all():
            return None
        spared = "those that travel side by side were left as they are"
        return _mismatch(self._group, self._name, texts, spared)


def _digest(name: str, said: str) -> bytes:
    return blake2b(f"{name} of {said}".encode(), digest_size=_DIGEST_BYTES).digest()


def _text(said: str) -> bytes:
    """Return what is shown to the others: what is said, cut if it is long, and the line."""
    site = f" at {present_site()}"
    room = max(0, _TEXT_BYTES - len(site.encode()) - 2)
    fitted = said if len(said) <= room else said[: max(0, room - 1)] + "…"
    return (fitted + site).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)


def _bytes_in(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _mismatch(group: Gathering, name: str, texts: torch.Tensor, spared: str) -> MismatchError:
    lines = [
        f"  rank {rank}: {bytes(text.numpy()).decode(errors='replace').rstrip()}"
        for rank, text in enumerate(texts.contiguous())
    ]
    return MismatchError(
        f"{name}: the ranks' tensors do not fit together, so {spared}:\n" + "\n".join(lines),
        op=name,
        rank=group._rank,
        ranks=tuple(range(group._size)),
    )
