"""Restores the script's own variables in the restarted script, if they fit.

The training thread calls it at the place where they were saved. Everything is compared before anything is set.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial

from ..code.drift import holders_in
from ..code.encoding import Decoding, RestoreTarget
from ..code.reentry import known_by
from ..code.script_objects import Instances, held_by_several
from ..frameworks.accelerate_hf import is_own
from ..values.duck_types import is_a
from .references import RestoredReferences

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

_OPTIMIZED = 0x1
_HAS_WRITABLE_LOCALS = sys.version_info >= (3, 13)


def misfits(taken: Any, frames: list[FrameType]) -> list[str]:
    """Return why this cannot be restored: other functions are running."""
    if len(frames) != len(taken["frames"]):
        return [f"{len(frames)} functions of the script's are under way, and {len(taken['frames'])} were"]
    is_same_python = list(taken["python"]) == list(sys.version_info[:2])
    reasons: list[str] = []
    for frame, saved in zip(frames, taken["frames"]):
        here = known_by(frame.f_code)
        if is_own(frame):
            continue
        if here["function"] != saved["function"] or (is_same_python and here["code"] != saved["code"]):
            reasons.append(
                f"{here['function'][0]}() at line {here['function'][1]} has changed since the state was saved"
            )
    return reasons


def put_back(taken: Any, frames: list[FrameType], held: Callable[[Any], Any], *, from_cpu: bool = False) -> list[str]:
    """Restore all of it; return what could not be set. `held` returns an object with a state by its reference."""
    instances = Instances(frames)
    referred = RestoredReferences(taken["instances"], instances, held)
    settling = Decoding(referred.thing, from_cpu=from_cpu)
    missing = settling.missing
    places = [*_places_of_drift(taken["slots"], instances, missing), *_places_of_globals(taken["globals"], missing)]
    of_frames = list(_places_of_frames(taken["frames"], frames))
    places += [*of_frames, *_places_of_classes(taken["classes"], missing)]
    places += referred.places(missing)
    # A variable that was set may hold another object in the new script. One that was only altered has the right object.
    several = held_by_several(frames, instances)
    alone = [place for place in of_frames if place.is_stored and not place.is_shared]
    for place in sorted(places, key=lambda place: place.is_stored):
        if place in alone and id(place.here) in several:
            settling.leave(place.here)  # it was set to an object of its own, and holds objects that others hold too
        settling.claim(place.form, place.here, in_place=not place.is_stored)
    values = [settling.settle(place.form, place.here, place.name, in_place=not place.is_stored) for place in places]
    settling.fill()
    for place, value in zip(places, values):
        place.put(value)
    for frame, saved in zip(frames, taken["frames"]):
        if saved["values"] and frame.f_code.co_flags & _OPTIMIZED and not _HAS_WRITABLE_LOCALS:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return missing


def _places_of_drift(saved: list[Any], instances: Instances, missing: list[str]) -> Iterator[RestoreTarget]:
    here = {(holder.kind, holder.name): holder for holder in holders_in(instances)} if saved else {}
    for kind, name, key, form in saved:
        holder = here.get((kind, name))
        text = f"{name}.{key}" if key else name
        if holder is None:
            missing.append(text)
        else:
            yield RestoreTarget(form, dict(holder.values()).get(key), text, partial(holder.put, key), is_stored=True)


def _places_of_globals(saved: list[Any], missing: list[str]) -> Iterator[RestoreTarget]:
    for module_name, name, form, is_stored in saved:
        if module_name not in sys.modules:
            missing.append(f"{name} of {module_name}")
        else:
            yield _place_in(vars(sys.modules[module_name]), name, form, is_stored=is_stored)


def _places_of_frames(saved: list[Any], frames: list[FrameType]) -> Iterator[RestoreTarget]:
    for frame, taken in zip(frames, saved):
        names: Any = frame.f_locals  # read once: up to Python 3.12 each read discards what was set
        for name, (form, is_stored) in taken["values"].items():
            yield _place_in(names, name, form, is_stored=is_stored)


def _place_in(names: Any, name: str, form: Any, *, is_stored: bool) -> RestoreTarget:
    return RestoreTarget(form, names.get(name), name, partial(names.__setitem__, name), is_stored=is_stored)


def _places_of_classes(saved: list[Any], missing: list[str]) -> Iterator[RestoreTarget]:
    for module_name, class_name, name, form in saved:
        kind = getattr(sys.modules.get(module_name), class_name, None)
        text = f"{class_name}.{name}"
        if not is_a(kind, type):
            missing.append(text)
        else:
            yield RestoreTarget(form, getattr(kind, name, None), text, partial(setattr, kind, name), is_stored=True)
