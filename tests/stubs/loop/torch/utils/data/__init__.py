"""As in PyTorch, the package of the loaders' iterators, in the module that the agent hooks."""

from . import dataloader

__all__ = ["dataloader"]
