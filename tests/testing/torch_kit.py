"""Torch's own test kit, to compare ours with."""

import functools
import importlib
import warnings

import pytest


@functools.cache
def load():
    """Import torch's kit, which takes seconds; skip the test if this torch has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch.testing._internal.common_distributed")
    except ImportError as error:
        pytest.skip(f"torch's own kit cannot be imported: {error}")
