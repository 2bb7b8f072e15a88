"""PLACEHOLDER cli."""
