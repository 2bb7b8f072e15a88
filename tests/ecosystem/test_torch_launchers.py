"""torch's own launchers start ranks on gradsync as they do on Gloo."""

import pytest
from backends import TORCHRUN, check_weights_equal_those_on_gloo

CASES = [
    ("torchrun", "plain", TORCHRUN),
    ("mp.spawn", "spawn", ()),
]


@pytest.mark.parametrize(
    ("training", "launcher"), [pytest.param(*case, id=name) for name, *case in CASES]
)
def test_weights_equal_those_on_gloo(tmp_path, training, launcher):
    check_weights_equal_those_on_gloo(tmp_path, training, launcher)
