"""Optimizers whose global hooks are called after each step, as in PyTorch."""

from collections.abc import Callable

_hooks: list[Callable[[object, object, object], None]] = []


def register_optimizer_step_post_hook(hook: Callable[[object, object, object], None]) -> None:
    """Call it after each step of any optimizer."""
    _hooks.append(hook)


class Optimizer:
    """Does nothing in a step but call the hooks."""

    def step(self) -> None:
        for hook in _hooks:
            hook(self, (), {})
