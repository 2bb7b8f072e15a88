"""Ranks in a grid with named dimensions, and the groups along them."""

from gradsync.device_mesh.mesh import DeviceMesh, current_mesh, init_device_mesh

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh"]
