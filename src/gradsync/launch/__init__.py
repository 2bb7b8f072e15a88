"""PLACEHOLDER launch."""
