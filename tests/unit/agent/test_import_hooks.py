"""The agent's changes to a module at its import, and an error of ours in them."""

from __future__ import annotations

from types import ModuleType

from hegmd.agent.import_hooks import _guarded


def test_an_imported_module_is_passed_on_and_our_errors_are_recorded() -> None:
    met: list[ModuleType] = []
    module = ModuleType("torch.optim.optimizer")

    def fails(_module: ModuleType) -> None:
        raise AttributeError("it has no step")

    _guarded(met.append, module)
    _guarded(fails, module)
    assert met == [module]
