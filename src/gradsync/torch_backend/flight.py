"""A flight recorder: the last calls of each group, in the format of torch's own.

It records when ``TORCH_FR_BUFFER_SIZE``, torch's variable, says how many calls to keep. What
``dump_flight_record`` writes is read by torch's ``torchfrtrace``.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from gradsync.backends.work import Work
from gradsync.config import environment
from gradsync.group.group import ProcessGroup

__all__ = ["FlightRecorder", "dump_flight_record", "open_recorder"]

_VERSION = "2.10"
# torch's analyser knows a fixed list of libraries by name, and refuses others.
_LIBRARY = "gloo"
_MESSAGES = ("send", "recv")
# Of the calls of this name only, the analyser allows that ranks give parts of different sizes.
_NAMES = {"all_to_all_single": "all_to_all"}
_OUTPUT_FIRST = {
    *("all_gather", "all_gather_single", "scatter", "reduce_scatter", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single"),
}


def open_recorder(group: ProcessGroup) -> FlightRecorder | None:
    """Return a recorder for a group, or None when none is asked for."""
    text = environment().get("TORCH_FR_BUFFER_SIZE", "0")
    return FlightRecorder(group, int(text)) if text.isdigit() and int(text) else None


def dump_flight_record(prefix: str) -> str:
    """Write what this rank's groups did last to the file ``prefix`` + rank, and return its name.

    Bring the files of all ranks into one folder; ``torchfrtrace --prefix PREFIX FOLDER`` says where
    they part.
    """
    recorders = sorted(_recorders, key=lambda recorder: recorder.made_at)
    entries = [entry for recorder in recorders for entry in recorder.entries()]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    groups = {recorder.name: recorder.members() for recorder in recorders}
    status = {recorder.name: recorder.status() for recorder in recorders}
    record = {"version": _VERSION, "pg_config": groups, "pg_status": status, "entries": entries}
    path = f"{prefix}{recorders[0].world_rank if recorders else 0}"
    with open(path, "wb") as file:
        pickle.dump(record, file)
    return path


class FlightRecorder:
    """The last calls of one group."""

    def __init__(self, group: ProcessGroup, calls: int) -> None:
        self.made_at = time.time_ns()
        self.name = self.description = ""
        self.world_rank = group.members.ranks[group.rank()]
        self._rank = group.rank()
        self._ranks = group.members.ranks
        self._entries: deque[dict[str, Any]] = deque(maxlen=calls)
        self._counts = {"collective_seq_id": 0, "p2p_seq_id": 0}
        self._begun = 0
        _recorders.add(self)

    def begin(self, name: str, timeout_s: float, outputs: Any, arguments: Sequence[Any]) -> Any:
        """Note that a call begins, and return its entry."""
        is_message = name in _MESSAGES
        # Messages count down: next to a collective of the same number, torch's analyser would take
        # one for a part of it.
        self._counts["p2p_seq_id"] -= is_message
        self._counts["collective_seq_id"] += not is_message
        self._begun += 1
        given = _inputs(name, arguments) or list(outputs)
        entry = {
            "profiling_name": f"{_LIBRARY}:{_NAMES.get(name, name)}{self._route(name, arguments)}",
            "process_group": (self.name, self.description),
            "pg_id": 0,
            "op_id": self._begun,
            **self._counts,
            "is_p2p": is_message,
            "time_created_ns": time.time_ns(),
            "input_sizes": _sizes(given),
            "input_dtypes": [_type_name(tensor) for tensor in given],
            "output_sizes": _sizes(outputs),
            "output_dtypes": [_type_name(tensor) for tensor in outputs],
            "state": "started",
            "time_discovered_started_ns": time.time_ns(),
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": round(1000 * timeout_s),
            "frames": [],
        }
        self._entries.append(entry)
        return entry

    @staticmethod
    def end(entry: dict[str, Any]) -> None:
        """Note that a call is over."""
        entry["time_discovered_completed_ns"] = time.time_ns()
        entry["state"], entry["retired"] = "completed", True

    def end_well(self, entry: dict[str, Any], work: Work) -> None:
        """Note that a call in flight is over, unless it failed: then it never completed."""
        if not entry["retired"] and work.exception() is None:
            self.end(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return the calls, the oldest first."""
        return [dict(entry) for entry in self._entries]

    def members(self) -> dict[str, str]:
        """Return who is in the group, as torch writes it."""
        ranks = str(list(self._ranks))
        return {"name": self.name, "desc": self.description, "ranks": ranks}

    def status(self) -> dict[str, int]:
        """Return how far the group has come."""
        done = [e["op_id"] for e in self._entries if e["state"] == "completed"]
        return {
            "last_enqueued_collective": self._begun,
            "last_started_collective": self._begun,
            "last_completed_collective": max(done, default=-1),
        }

    def _route(self, name: str, arguments: Sequence[Any]) -> str:
        if name == "send":
            return f" {self._rank}->{arguments[1]}"
        return f" {self._rank}<-{arguments[1] or 0}" if name == "recv" else ""


_recorders: WeakSet[FlightRecorder] = WeakSet()


def _inputs(name: str, arguments: Sequence[Any]) -> list[torch.Tensor]:
    given = arguments[int(name in _OUTPUT_FIRST)] if arguments else None
    return [given] if isinstance(given, torch.Tensor) else list(given or ())


def _sizes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return shapes, of which the analyser looks at the first: the parts of a list are one."""
    if len(tensors) > 1:
        return [[sum(tensor.numel() for tensor in tensors)]]
    return [list(tensor.shape) for tensor in tensors]


def _type_name(tensor: torch.Tensor) -> str:
    names = {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long"}
    return names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
