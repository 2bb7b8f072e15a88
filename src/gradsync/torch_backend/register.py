"""Makes the name "gradsync" known to torch, now or when torch arrives; imports torch itself never.

torch calls ``register`` when it is imported (it is an entry point of the group ``torch.backends``),
and ``import gradsync`` calls ``register_when_possible``, which works where entry points do not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["NAME", "register", "register_when_possible"]

NAME = "gradsync"

_HOME = "torch.distributed.distributed_c10d"


def register_when_possible() -> None:
    """Register at once if torch's module of backends is there, else as soon as it is imported."""
    if _HOME in sys.modules:
        register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def register() -> None:
    """Tell torch how to make a group of this name; harmless when it knows already."""
    home = sys.modules.get(_HOME)
    if home is None:  # torch is not built with distributed, or has not got there yet
        register_when_possible()
        return
    if not hasattr(home.Backend, NAME.upper()):
        home.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from gradsync.torch_backend.creation import create

    # torch says which device this is for, and what serves the others, nowhere but in the variables
    # of the function that calls us.
    return create(options, backend_options, sys._getframe(1).f_locals)


class _Watcher:
    """Registers right after torch's module of backends has been imported, and goes.

    A finder of modules in all but name: the class that says so takes 20 ms to import.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
