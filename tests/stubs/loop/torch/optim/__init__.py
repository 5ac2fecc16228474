"""As in PyTorch, the package of optimizers, in the module that the agent hooks."""

from . import optimizer

__all__ = ["optimizer"]
