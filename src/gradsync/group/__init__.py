"""PLACEHOLDER group."""
