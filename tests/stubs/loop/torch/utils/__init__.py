"""As in PyTorch, the package of the data loaders, in the module that the agent hooks."""

from . import data

__all__ = ["data"]
