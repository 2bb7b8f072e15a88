"""``import gradsync`` is quick, leaves torch alone, and offers exactly what it lists."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import gradsync

STUB = Path(gradsync.__file__).with_suffix(".pyi")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_leaves_torch_alone():
    modules = "import sys, gradsync; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(modules) == "False False"


def test_import_takes_under_50_ms():
    # Of processor time, by its median, so that a busy machine does not fail it.
    code = (
        "import time; start = time.process_time(); import gradsync; "
        "print(time.process_time() - start)"
    )
    assert statistics.median(float(run(code)) for _ in range(7)) < 0.05


def test_names_that_need_torch_load_it_on_first_use():
    code = "import sys, gradsync; gradsync.all_reduce; print('torch' in sys.modules)"
    assert run(code) == "True"


def test_every_listed_name_is_there():
    for name in gradsync.__all__:
        assert getattr(gradsync, name) is not None
    assert dir(gradsync) == sorted(gradsync.__all__)


def test_type_checkers_see_the_same_names():
    typed = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(STUB.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradsync")
        for alias in node.names
    }
    assert typed == set(gradsync.__all__) - {"__version__"}


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(gradsync, "no_such_name")
