"""What a model calls: collectives with gradients, in ``gradsync.nn.functional``."""

from gradsync.nn import functional

__all__ = ["functional"]
