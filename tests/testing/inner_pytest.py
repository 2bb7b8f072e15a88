"""Running pytest in a process of its own, on files that a test has written."""

import os


def environment(**more):
    """Return what an inner pytest starts with: nothing of the one that runs it.

    hypothesis is left out. Its plugin imports all of it at the end of every run, which takes a
    second and a half.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV"))}
    return env | {"PYTEST_ADDOPTS": "-p no:hypothesispytest"} | more
