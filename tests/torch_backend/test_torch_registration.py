"""torch knows the name "gradsync" through its entry point, or through ``import gradsync``."""

import importlib.metadata
import os
import subprocess
import sys

import torch.distributed as dist

from gradsync.torch_backend.register import register


def test_torch_finds_the_entry_point():
    (found,) = importlib.metadata.entry_points(group="torch.backends", name="gradsync")
    assert found.load() is register
    register()  # once more does no harm
    assert dist.Backend.GRADSYNC == "gradsync"
    assert dist.is_backend_available("gradsync")


def test_import_of_gradsync_registers_when_torch_comes_later():
    code = (
        "import sys, gradsync; assert 'torch' not in sys.modules;"
        "import torch.distributed as dist; print(dist.is_backend_available('gradsync'))"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "True"
