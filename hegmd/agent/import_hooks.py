"""The agent in a Python that may never train: two import finders, and nothing else until they are needed.

`mount` runs at the start of every Python under `hegmctl run`, so this module imports only `sys`, starts no thread and
opens no file. The agent starts when the job imports PyTorch's data loader or optimizer, or the name `hegm`. Import
hooks are used instead of a patched `__import__`, because they are an interface of Python. The finder for PyTorch
removes itself once it has done its work.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FACE = "hegm"


def mount() -> None:
    """Take the agent's place in this Python."""
    hooks = {
        "torch.utils.data.dataloader": _on_loader_import,
        "torch.optim.optimizer": _on_optimizer_import,
        "torch.distributed.elastic.rendezvous.registry": _on_launcher_import,
        "torch.nn.parallel.distributed": _on_data_parallel_import,
    }
    finder = FrameworkFinder(hooks)
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(FaceFinder())
    from os import environ

    if environ.get("HEGM_READY_FD"):
        from . import standby

        standby.wait_for_turn(finder)
    if environ.get("HEGM_LAUNCHER"):
        from . import hegm_signal

        hegm_signal.take()


class FrameworkFinder:
    """Calls an action after the import of each wanted module; finds no module itself.

    Another finder finds the module, which keeps its loader: only the one call that runs its code is replaced.
    """

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = dict(hooks)
        self._held: list[tuple[Callable[[ModuleType], None], ModuleType]] | None = None

    def hold(self) -> None:
        """Call no action before `run_deferred`: the script has imported none of these."""
        self._held = []

    def run_deferred(self) -> None:
        """Call the deferred actions in the order of their imports, and defer none from now on."""
        held, self._held = self._held or [], None
        for action, module in held:
            _guarded(action, module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec, with our action after its loading; None for modules that are not wanted."""
        if name not in self._wanted:
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self._follow(name, spec.loader)
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        # The finders after this one: another of our kind before it would ask this one again.
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            find = getattr(finder, "find_spec", None)
            if find is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _follow(self, name: str, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if "exec_module" in vars(loader):  # otherwise another finder of our kind was first
                del loader.exec_module  # restores the loader
            run(module)
            action = self._wanted.pop(name, None)
            if not self._wanted and self in sys.meta_path:
                sys.meta_path.remove(self)
            if action is not None and self._held is not None:
                self._held.append((action, module))
            elif action is not None:
                _guarded(action, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader that takes no attributes: no hook for this module
            self._wanted.pop(name, None)


class FaceFinder:
    """Gives scripts `import hegm` where no package of that name is installed: it comes last, so a real one is found."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the spec of the package beside this one; None for all other names."""
        if name != FACE:
            return None
        from _frozen_importlib_external import PathFinder

        beside = __file__.rpartition("/agent/")[0].rpartition("/")[0]
        found: ModuleSpec | None = PathFinder.find_spec(name, [beside])
        return found


def _on_loader_import(module: ModuleType) -> None:
    from . import boundary, lifecycle
    from .state import session

    boundary.watch_loaders(module, lifecycle.start())
    session.on_loader_import(module)


def _on_optimizer_import(module: ModuleType) -> None:
    from . import boundary, lifecycle
    from .state import session

    boundary.watch_optimizers(module, lifecycle.gate())
    session.on_optimizer_import(module)


def _on_launcher_import(module: ModuleType) -> None:
    from . import dumpable_launcher

    dumpable_launcher.choose_stores(module)
    dumpable_launcher.ask_in_children()


def _on_data_parallel_import(module: ModuleType) -> None:
    from . import messages, reducer_buckets

    reducer_buckets.watch(module)
    messages.watch(getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None))


def _guarded(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:  # noqa: BLE001 - the import continues as it would without us
        from .notes import note
        from .state import save_and_exit
        from .state.values import inherited

        note(f"no hooks in {module.__name__}: {error!r}")
        if inherited.is_there():  # without them the script would start over unnoticed
            save_and_exit.end_unrestored([f"{module.__name__} is not one that the agent can follow: {error!r}"])
