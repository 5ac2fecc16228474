"""`range` and `enumerate` in the modules of a restarted script, until it is back at the saved loop position.

They return what Python's own return, except where a loop of the saved place is entered for the first time: there they
return the remaining iterations of that loop. They return a real `range` or `enumerate`, so the loop contains nothing of
ours. They are names in the script's modules, not in `builtins`; `isinstance` takes them for the types; and they are
removed at the place, before the first step.
"""

from __future__ import annotations

import sys

from .loops import loops_of
from .position import is_users, is_users_module, script_frames, step_of, step_text
from .value_stack import caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any


_TQDM_PREFIX = "tqdm."  # its trange calls range for the script


class PendingLoops:
    """The loops of a place that are still to be entered."""

    def __init__(self, place: Any, last_entered: Callable[[FrameType], None]) -> None:
        """`last_entered` is called as the innermost loop is entered, if that is a loop over numbers."""
        self._path = [tuple(step) for step in place["path"]]
        self._loops: list[dict[str, Any]] = [
            {"depth": loop["depth"], "line": loop["line"], "needs": [tuple(need) for need in loop["needs"]]}
            for loop in place["loops"]
        ]
        self._last = self._loops[-1] if self._loops and place["driver"] is None else None
        self._last_entered = last_entered

    def need(self, name: str, frame: FrameType | None) -> Any:
        """Return the value for a call of this name, if a loop of the place is entered there; otherwise None."""
        frames = script_frames(frame)
        if not frames:
            return None
        head = loops_of(frames[-1].f_code).head_after_call(frames[-1].f_lasti)
        depth = len(frames) - 1
        for loop in self._loops:
            if loop["depth"] != depth or not loop["needs"]:
                continue
            wanted, _value, line = loop["needs"][0]
            # A loop over `hegm.resumable` does not name `enumerate`: its count is made in the head all the same.
            is_here = frames[-1].f_lineno == line if head is None else head.line == loop["line"]
            if is_here and self._leads_to(frames):
                if wanted != name:
                    return None
                value = loop["needs"].pop(0)[1]
                if loop is self._last and not loop["needs"]:
                    self._last_entered(frames[-1])
                return value
        return None

    def left(self) -> list[str]:
        """Return the loops that have not been entered, in words."""
        return [step_text((*self._path[loop["depth"]][:3], loop["line"])) for loop in self._loops if loop["needs"]]

    def _leads_to(self, frames: list[FrameType]) -> bool:
        """Return True if these frames are the start of the path; the last one's line is its loop's."""
        here = [step_of(frame) for frame in frames]
        there = self._path[: len(here)]
        return here[:-1] == there[:-1] and here[-1][:3] == there[-1][:3]


class _Shadow(type):
    """A metaclass whose classes compare as `real`, also for isinstance."""

    real: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls.real or other is cls

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


class Shadows:
    """Both names, in every module of the script that is loaded now or later."""

    def __init__(self, needed: Callable[[str, FrameType], Any], end: Callable[[list[str]], None]) -> None:
        """`needed` returns the value for a call of a name, or None for the usual result. `end` ends the process."""
        self._modules: list[Any] = []
        self._needed = needed
        self._end = end
        self._sought: set[str] = set()
        self._names: dict[str, Any] = {
            "range": self._shadow_of(range, self._rest_of),
            "enumerate": self._shadow_of(enumerate, _continued_enumerate),
        }

    def install(self) -> None:
        """Install the shadows in all modules, and in those that are imported from now on."""
        for module in list(sys.modules.values()):
            self.install_in(module)
        sys.meta_path.insert(0, self)

    def install_in(self, module: Any) -> None:
        """Install the shadows in this module if it is the script's."""
        if module is None or module in self._modules or not (is_users_module(module) or _is_of_bars(module)):
            return
        self._modules.append(module)
        for name, shadow in self._names.items():
            module.__dict__.setdefault(name, shadow)

    def lift(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for module in self._modules:
            for name, shadow in self._names.items():
                if module.__dict__.get(name) is shadow:
                    del module.__dict__[name]
        self._modules = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' result, with the shadows installed before the module runs."""
        if name in self._sought:  # by another finder that asks the others
            return None
        self._sought.add(name)
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._sought.discard(name)
        if spec is not None and (is_users(spec.origin) or name.startswith(_TQDM_PREFIX)):
            self._follow(spec)
        return spec

    def _found_by_others(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _follow(self, spec: Any) -> None:
        run = getattr(spec.loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module: Any) -> None:
            del spec.loader.exec_module  # restores the loader
            if self in sys.meta_path:
                self.install_in(module)
            run(module)

        try:
            spec.loader.exec_module = exec_module
        except AttributeError:  # a loader that takes no attributes
            pass

    def _shadow_of(self, real: Any, call: Callable[..., Any]) -> Any:
        needed = self._needed

        def __new__(_cls: Any, *args: Any, **named: Any) -> Any:  # noqa: N807 - Python calls a class by it
            need = needed(real.__name__, caller())
            return real(*args, **named) if need is None else call(need, *args, **named)

        shadow = _Shadow(real.__name__, (), {"__new__": __new__, "__doc__": real.__doc__, "real": real})
        shadow.__module__ = real.__module__
        return shadow

    def _rest_of(self, need: Any, *args: Any) -> range:
        """Return the rest of the loop. The script's own loop may begin later: at a later checkpoint of its own."""
        whole, rest = range(*args), range(*need)
        is_shorter = len(whole) < len(rest) and range(rest.start, whole.stop, whole.step) == rest
        if is_shorter:
            is_fitting = rest[len(rest) - len(whole) :] == whole
        else:
            is_fitting = whole[max(0, len(whole) - len(rest)) :] == rest
            if not is_fitting and whole[: len(rest)] == rest[::-1]:  # it is in a call of reversed()
                return rest[::-1]
        if not is_fitting:
            self._end([f"a loop that had {rest!r} left goes over {whole!r}"])
        return rest


def _is_of_bars(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).startswith(_TQDM_PREFIX)


def _continued_enumerate(need: int, iterable: Any, start: int = 0) -> Any:  # `need` includes the start
    return enumerate(iterable, need)
