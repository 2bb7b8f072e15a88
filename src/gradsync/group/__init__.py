"""Process groups and the collectives on them; ``group.WORLD`` is the default group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsync.group.group import ProcessGroup

    WORLD: ProcessGroup | None


def __getattr__(name: str) -> Any:
    # A name of torch's (`dist.group.WORLD`), looked up anew each time: the group comes and goes.
    if name == "WORLD":
        from gradsync.group.world import default_group

        return default_group()
    raise AttributeError(f"module 'gradsync.group' has no attribute {name!r}")
