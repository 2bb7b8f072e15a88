"""Torch's own test kit, to compare ours with."""

import functools
import importlib
import sys
import types
import unittest
import warnings

import pytest


@functools.cache
def load():
    """Import torch's kit, which takes seconds; skip the test if this torch has none."""
    if importlib.util.find_spec("expecttest") is None:
        # It only wants a base class from there.
        sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch.testing._internal.common_distributed")
    except ImportError as error:
        pytest.skip(f"torch's own kit cannot be imported: {error}")
    finally:
        if isinstance(sys.modules.get("expecttest"), types.SimpleNamespace):
            del sys.modules["expecttest"]
