"""Small files, small functions: a size that everyone can see."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "native").rglob("*.[hc]*")])
BANNED = {"utils", "helpers", "common", "misc", "core", "manager"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_small(path):
    assert len(path.read_text().splitlines()) <= 400
    if path.suffix != ".py":
        return
    assert path.stem not in BANNED
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60 or node.name == "init_process_group", (
                node.name
            )


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: p.name)
def test_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_two_test_files_have_the_same_name():
    # pytest imports them by their base name.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
