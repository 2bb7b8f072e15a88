"""Imports point one way: the table below is the law, lazy and type-only imports included."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "gradsync"
NATIVE = Path(__file__).parents[2] / "native"

BASE = {"errors", "config", "base"}

MAY_IMPORT = {
    "errors": set(),
    "_native": set(),
    "config": {"errors", "_native"},
    "base": {"errors", "config"},
    "stores": BASE | {"_native"},
    "rendezvous": BASE | {"stores"},
    "backends": BASE | {"stores", "_native"},
    "group": BASE | {"backends", "stores"},
    "ddp": BASE | {"group"},
    "nn": BASE | {"group"},
    "session": BASE | {"stores", "rendezvous", "backends", "group"},
    "device_mesh": BASE | {"group", "session"},
    "launch": BASE | {"stores", "rendezvous", "_native"},
    "cli": BASE | {"launch"},
    "__main__": {"cli"},
    # gradsync as a backend of torch.distributed.
    "torch_backend": BASE | {"stores", "rendezvous", "backends", "group", "session"},
    "testing": BASE | {"stores", "rendezvous", "backends", "group", "session", "launch", "_native"},
    # The package's front door names everything and imports it on first use.
    "__init__": BASE
    | {"stores", "rendezvous", "backends", "group", "nn", "ddp", "session", "device_mesh"}
    | {"launch", "torch_backend"},
}

MAY_IMPORT_TORCH = {"ddp", "device_mesh", "group", "nn", "session", "testing", "torch_backend"}
# Adapters to torch's own stores import it when they are called.
TORCH_INSIDE_FUNCTIONS = {"stores/torch_store.py", "rendezvous/resolve.py"}


def layer_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """Return (module, at top level) of every import in a file."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            found += [(alias.name, top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            if node.module == "gradsync":
                found += [(f"gradsync.{alias.name}", top) for alias in node.names]
            else:
                found.append((node.module, top))
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_follow_the_table(path):
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"{layer} is not in the table: where does it belong?"
    for module, top in imported_modules(path):
        if module.startswith("gradsync"):
            parts = module.split(".")
            target = parts[1] if len(parts) > 1 else "__init__"
            if target == "__version__":
                continue
            assert target == layer or target in MAY_IMPORT[layer], f"{path}: {layer} -> {target}"
        if module.split(".")[0] == "torch" and layer not in MAY_IMPORT_TORCH:
            allowed = str(path.relative_to(SOURCE)) in TORCH_INSIDE_FUNCTIONS
            assert allowed, f"{path} imports torch"
            assert not top, f"{path} imports torch at its top"


def test_only_config_the_launcher_and_the_test_kit_touch_the_environment():
    for path in FILES:
        if layer_of(path) in ("config", "launch", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                assert name not in ("os.environ", "os.getenv"), f"{path} reads {name}"


def test_table_has_no_cycles():
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [n for n in MAY_IMPORT if n not in order and MAY_IMPORT[n] <= set(order)]
        assert free, f"cycle among {set(MAY_IMPORT) - set(order)}"
        order += free


NATIVE_MAY_INCLUDE = {
    "common": set(),
    "memory": {"common"},
    "sync": {"common"},
    "reduce": {"common"},
    "algo": {"common", "memory", "sync", "reduce"},
    "p2p": {"common", "memory", "sync", "reduce"},
    "session": {"common", "memory", "sync", "reduce", "algo", "p2p", "store"},
    "store": {"common"},
    "bindings": {"common", "reduce", "p2p", "session", "store"},
    "tests": {"common", "memory", "sync", "reduce", "algo", "p2p", "session", "store"},
}


CXX_FILES = sorted([*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")])


@pytest.mark.parametrize("path", CXX_FILES, ids=lambda p: str(p.relative_to(NATIVE)))
def test_includes_follow_the_table(path):
    layer = path.relative_to(NATIVE).parts[0]
    for line in path.read_text().splitlines():
        if line.startswith('#include "'):
            target = line.split('"')[1].split("/")[0]
            allowed = target == layer or target in NATIVE_MAY_INCLUDE[layer]
            assert allowed, f"{path}: {layer} includes {target}"
