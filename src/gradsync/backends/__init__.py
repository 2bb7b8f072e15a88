"""PLACEHOLDER backends."""
