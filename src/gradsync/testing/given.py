"""What was given to pytest on its command line and matters in a rank before options are read."""

from __future__ import annotations

import pytest

__all__ = ["arguments"]

# Their work is the controller's.
_CONTROLLERS = ("xdist", "pytest_timeout", "pytest_cov", "timeout", "cacheprovider")


def arguments(config: pytest.Config) -> list[str]:
    """Return the plugins, ini overrides, warning filters and capture method as arguments."""
    option = config.option
    args = []
    for plugin in option.plugins or ():
        if not plugin.removeprefix("no:").startswith(_CONTROLLERS):
            args += ["-p", plugin]
    for override in option.override_ini or ():
        if not override.startswith("addopts="):
            args += ["-o", override]
    for warning in option.pythonwarnings or ():
        args += ["-W", warning]
    if hasattr(option, "capture"):
        args.append(f"--capture={option.capture}")
    return args
