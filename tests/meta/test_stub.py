"""The stub of the extension says what the extension has."""

import ast
from pathlib import Path

from gradsync import _native, errors

STUB = Path(errors.__file__).with_name("_native.pyi")


def names_in_stub() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
    return found


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_stub_and_extension_agree():
    stub = names_in_stub()
    assert set(stub) == public(_native)
    for name, members in stub.items():
        if name != "StatusError" and isinstance(getattr(_native, name), type):
            assert {m for m in members if m != "__init__"} == public(getattr(_native, name)), name
