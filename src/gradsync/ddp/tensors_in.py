"""Finding tensors in whatever a module takes or returns: containers, dataclasses, nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, looking into containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with each tensor in it changed; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(
            change(value.data), value.batch_sizes, value.sorted_indices, value.unsorted_indices
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(change, item)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(change, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value
