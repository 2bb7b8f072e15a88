"""``Grid``: what a mesh looks like, seen from one rank."""

from __future__ import annotations

from math import prod

import torch

from gradsync.device_mesh.layout import Layout

__all__ = ["Grid"]


class Grid:
    """Ranks in a grid, and the place of one of them in it."""

    _layout: Layout
    _rank: int

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as a tensor."""
        return torch.tensor(self._layout.ranks, dtype=torch.int32).reshape(self._layout.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return self._layout.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._layout.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, along one dimension or of all."""
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """Return the caller's rank in the world."""
        return self._rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return where the caller is in the mesh, None when it is not in it."""
        return self._layout.coordinate(self._rank)
