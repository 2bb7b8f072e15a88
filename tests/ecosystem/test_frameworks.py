"""Frameworks on top of torch.distributed, unchanged, give on gradsync what they give on Gloo."""

import pytest
from backends import TORCHRUN, check_weights_equal_those_on_gloo

# Its launcher for GPUs starts ranks as torchrun does; the one for CPUs wants MPI.
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port={port}"),
)

CASES = [
    ("accelerate launch", "accelerate", ACCELERATE, "accelerate"),
    ("notebook_launcher", "notebook", (), "accelerate"),
    ("transformers.Trainer", "trainer", TORCHRUN, "transformers"),
    ("lightning.Fabric", "fabric", (), "lightning"),
    ("lightning.Trainer", "lightning", (), "lightning"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("training", "launcher", "library"), [pytest.param(*case, id=name) for name, *case in CASES]
)
def test_weights_equal_those_on_gloo(tmp_path, training, launcher, library):
    pytest.importorskip(library)
    check_weights_equal_those_on_gloo(tmp_path, training, launcher)
