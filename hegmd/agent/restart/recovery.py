"""The script's own variables in the script that has been started again: whether they fit, and set where they were.

Called by the training thread, at the place where they were taken. Everything is compared before anything is set.
"""

from __future__ import annotations

import ctypes
import sys

from .drift import holders_in
from .frameworks import is_own
from .instances import Instances
from .kinds import is_a
from .references import Referred
from .settling import Settling
from .spots import known_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_OPTIMIZED = 0x1
_HAS_WRITABLE_LOCALS = sys.version_info >= (3, 13)


def misfits(taken: Any, frames: list[FrameType]) -> list[str]:
    """Why this cannot be put back: the functions that are under way are other ones."""
    if len(frames) != len(taken["frames"]):
        return [f"{len(frames)} functions of the script's are under way, and {len(taken['frames'])} were"]
    is_same_python = list(taken["python"]) == list(sys.version_info[:2])
    reasons: list[str] = []
    for frame, saved in zip(frames, taken["frames"]):
        here = known_by(frame.f_code)
        if is_own(frame):
            continue
        if here["function"] != saved["function"] or (is_same_python and here["code"] != saved["code"]):
            reasons.append(f"{here['function'][0]}() at line {here['function'][1]} is not as it was when it was left")
    return reasons


def put_back(taken: Any, frames: list[FrameType], held: Callable[[Any], Any], *, from_cpu: bool = False) -> list[str]:
    """Set all of it; what was not there to be set. `held` finds what has a state of its own by its reference."""
    instances = Instances(frames)
    referred = Referred(taken["instances"], instances, held)
    settling = Settling(referred.thing, from_cpu=from_cpu)
    _set_slots(taken["slots"], instances, settling)
    for module_name, name, form, is_stored in taken["globals"]:
        values: Any = vars(sys.modules[module_name]) if module_name in sys.modules else {}
        values[name] = settling.settle(form, values.get(name), name, in_place=not is_stored)
    for frame, saved in zip(frames, taken["frames"]):
        if saved["values"]:
            _set_variables(frame, saved["values"], settling)
    for module_name, class_name, name, form in taken["classes"]:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if is_a(kind, type):
            setattr(kind, name, settling.settle(form, getattr(kind, name, None), f"{class_name}.{name}"))
    referred.put_values(settling)
    return settling.missing


def _set_slots(saved: list[Any], instances: Instances, settling: Settling) -> None:
    here = {(holder.kind, holder.name): holder for holder in holders_in(instances)} if saved else {}
    for kind, name, key, form in saved:
        holder = here.get((kind, name))
        said = f"{name}.{key}" if key else name
        if holder is None:
            settling.missing.append(said)
        else:
            holder.put(key, settling.settle(form, dict(holder.values()).get(key), said))


def _set_variables(frame: FrameType, values: dict[str, Any], settling: Settling) -> None:
    variables: Any = frame.f_locals
    for name, (form, is_stored) in values.items():
        variables[name] = settling.settle(form, variables.get(name), name, in_place=not is_stored)
    if frame.f_code.co_flags & _OPTIMIZED and not _HAS_WRITABLE_LOCALS:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
