"""The script's own variables over a restart: counters, best values, lists of losses, counters of its objects.

Saves what the code of the running loops changes and reads again, but not what only configures the script, which may
differ on another target. Values that have a form in a state file are saved; the others are named. Everything is read
while the training is parked; nothing of this runs while it trains. Longer than 400 lines because what one way of
looking has taken, the others leave out.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from ....protocol.agents import UNSEEN
from ..code.assignments import ATTRIBUTE, GLOBAL, MAX_CODES, Functions, changes_of, nested_in
from ..code.drift import OTHERS, OWN
from ..code.encoding import (
    MUTABLE,
    SAME,
    SHARED,
    NotEncodable,
    TooLarge,
    UnderWay,
    ValueEncoder,
    is_mutable,
    is_replaced,
)
from ..code.loops import begun_anew_in, is_queue
from ..code.position import is_users_module
from ..code.reentry import ReentryFrame, all_set_before_resume, known_by, spots_of
from ..code.script_objects import Instances, held_by_several, users_modules, values_of
from ..loaders import passes
from ..values.duck_types import FUNCTION, attribute_of, class_of, is_a, is_filled, members_of
from .references import CapturedReferences

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import CodeType, FrameType
    from typing import Any

    from ..code.assignments import Change
    from ..code.drift import Drift

#: Under which the state has them.
KEY = "own"
_MAX_NOTES = 32
_OF_LOADERS = frozenset(("DataLoader", "DataLoaderShard", "StatefulDataLoader"))
_OPTIMIZED = 0x1
_NUMBERS: Any = (int, float, complex, type(None))
_COUNTED: Any = (bool, str, *_NUMBERS)
_GENERATOR: Any = type(one for one in "")


def capture(
    frames: list[FrameType],
    held: dict[int, Any],
    kept: Collection[str] = (),
    changed: Collection[tuple[int, str]] = (),
    drift: Drift | None = None,
    memories: dict[int, tuple[Any, Any]] | None = None,
) -> dict[str, Any]:
    """Return the plain values; under "anew" what starts over, under "unseen" what was too large to search, and under
    "under_way" communication between ranks that has not completed.

    `held` maps the address of each object with a state of its own to a reference. `kept` are names under which the
    script keeps objects itself. `changed` are variables whose change `baseline` has observed. `drift` has all other
    former values. `memories` has the tensors among `held`, by the address of their memory, with their references.
    """
    return _Capture(frames, held, kept, changed, drift, memories).taken


def begin_anew(state: Any) -> list[str]:
    """Return the variables in a state that start over, and what was not searched."""
    own = state.get(KEY, {})
    return [*own.get("anew", ()), *[f"{UNSEEN}{what}" for what in own.get("unseen", ())]]


class _Capture:
    def __init__(
        self,
        frames: list[FrameType],
        held: dict[int, Any],
        kept: Collection[str],
        changed: Collection[tuple[int, str]],
        drift: Drift | None,
        memories: dict[int, tuple[Any, Any]] | None,
    ) -> None:
        self._held = held
        self._memories = memories
        self._changed = frozenset(changed)
        self._kept = frozenset(kept)
        self._anew: dict[str, None] = {}
        self._unseen: dict[str, None] = {}
        self._under_way: dict[str, None] = {}
        self._made: set[int] = set()
        self._drawn: set[int] = set()  # objects of the script's that may be made of random numbers
        self._taken_ids: set[int] = set()
        self._noted_ids: set[int] = set()  # containers without a form, which have been named
        self._forms: dict[int, tuple[Any, Any]] = {}
        self._instances = Instances(frames)
        self._unseen.update(dict.fromkeys(self._instances.unseen))
        self._spots = list(spots_of(frames))
        on_the_way = all_set_before_resume(self._spots)
        # Not our own method: in a cycle of references all that was found would stay until the garbage collector runs.
        was_there = partial(_was_there, self._made) if drift is None else drift.had
        self._referring = CapturedReferences(self._instances, held, was_there, drift, on_the_way)
        reached = self._reach()
        looked_at = [spot.changes for spot in self._spots if spot.is_looked_at]
        looked_at += [changes_of(found.code) for found in reached]
        #: True if functions alter containers that are passed to them, so that any mentioned one may be altered.
        self._is_given = any(found.alters_argument() for found in looked_at)
        self._mentioned: set[str] = set()
        if self._is_given:
            self._mentioned.update(*[found.mentions(None) for found in looked_at])
        self._read_elsewhere = {name for found in reached for name in changes_of(found.code).mentions(None)}
        self.taken: dict[str, Any] = {
            "python": list(sys.version_info[:2]),
            "frames": [{**known_by(spot.code), "values": self._locals(spot)} for spot in self._spots],
            "globals": self._globals(reached),
            "classes": list(self._of_classes(reached)),
            "slots": [],
            "instances": self._referring.entries,
        }
        self._note_shared(frames)
        self._of_instances(reached)
        if drift is not None:
            self.taken["slots"] += self._of_drift(drift, reached)
        self.taken["anew"] = _bounded(self._anew)
        self.taken["unseen"] = _bounded(self._unseen)
        self.taken["under_way"] = list(self._under_way)

    def _reach(self) -> list[Any]:
        mentioned: set[str] = set()
        codes: list[tuple[CodeType, str]] = []
        for spot in self._spots:
            if not spot.is_looked_at:
                continue
            mentioned |= spot.changes.mentions(spot.region)
            codes += [] if spot.is_module else [(code, spot.module) for code in nested_in(spot.code)]
            values = [] if spot.is_module else list(spot.frame.f_locals.values())
            codes += [(value.__code__, value.__module__) for value in values if is_a(value, FUNCTION)]
        functions = Functions(users_modules())
        reached = list(functions.reached_from(mentioned, codes))
        if not functions.is_whole:
            self._unseen[f"functions beyond the first {MAX_CODES:,} that the loop may call"] = None
        return reached

    # ---- variables

    def _locals(self, spot: ReentryFrame) -> dict[str, Any]:
        if not spot.is_looked_at:
            return {}
        live, values = spot.live(), spot.frame.f_locals
        if spot.is_module:
            live |= self._read_elsewhere
        chosen: dict[str, Any] = {}
        is_drawn = spot.draws_before_resume()
        for found, is_in_loop, is_late in spot.local_changes():
            value = values.get(found.name)
            if found.name not in values or (found.is_stored and found.name not in live):
                continue
            if is_a(value, str) and not is_in_loop:
                continue  # a setting, made on the way
            is_lost = found.name in live and self._is_lost(value, spot.module, found)
            if found.is_stored or is_lost or (is_mutable(value) and not found.is_inside):
                if found.is_stored:
                    self._made.add(id(value))
                is_other = is_drawn and is_in_loop and type(value).__name__ not in _OF_LOADERS
                is_named = is_lost or (found.is_stored and (is_late or is_other))
                if is_named and is_other and self._instances.is_own(value):
                    self._drawn.add(id(value))
                self._choose(chosen, found, value, spot.where(found.line), is_named=is_named)
        self._choose_seen(spot, chosen, live)
        for name in spot.parameters():
            if name in live and name in values and name not in chosen and is_a(values[name], *_NUMBERS):
                chosen[name] = (values[name], True)
        self._note_cut(spot, chosen)
        return chosen

    def _note_shared(self, frames: list[FrameType]) -> None:
        """Mark variables whose objects others hold too, and have to hold again in a restarted script."""
        several = held_by_several(frames, self._instances)
        for spot, saved in zip(self._spots, self.taken["frames"]):
            values: dict[str, Any] = dict(spot.frame.f_locals)
            for name, (form, is_stored) in saved["values"].items():
                if is_stored and id(values.get(name)) in several:
                    saved["values"][name] = (form, SHARED)

    def _choose_seen(self, spot: ReentryFrame, chosen: dict[str, Any], live: set[str]) -> None:
        """Choose variables whose changes were observed, such as by a library, or that change when they are read."""
        mentioned = spot.changes.mentions(spot.region)
        values: dict[str, Any] = dict(spot.frame.f_locals)
        begun_anew = set(begun_anew_in(spot.code, values))
        for name, value in values.items():
            if name in chosen or name.startswith("__"):
                continue
            text = f"{name} ({type(value).__qualname__}){spot.where(spot.frame.f_lineno or 0)}"
            if name in live and (spot.depth, name) in self._changed:
                form: Any = self._form(value, text, is_named=True)
                if form is not None:
                    chosen[name] = (form[0], type(value).__name__ != "ndarray")
            elif name in mentioned and self._is_given and is_a(value, *MUTABLE):
                form = self._form(value, text, is_named=False, is_altered=False)
                if form is not None:
                    chosen[name] = (form[0], False)
            elif name in mentioned and hasattr(class_of(value), "__next__"):
                if not self._is_restored_elsewhere(value):
                    self._note(text)
            elif name in begun_anew:
                self._note(text)

    def _is_restored_elsewhere(self, iterator: Any) -> bool:
        """Return True for files, which the script opens, and for passes over loaders, which restore themselves."""
        return (
            id(iterator) in self._held
            or self._instances.is_own(iterator)
            or is_a(iterator, sys.modules["io"].IOBase)
            or passes.followed(iterator) is not None
        )

    def _note_cut(self, spot: ReentryFrame, chosen: dict[str, Any]) -> None:
        """Note tensors through which the loop continues to compute gradients."""
        looped: set[str] = set()
        for name, (form, _is_stored) in chosen.items():
            if type(form) is tuple and _has_history(spot.frame.f_locals.get(name)):
                looped = looped or spot.live(in_loop=True)
                if name in looped:
                    self._note(f"the gradients' history of {name}{spot.where(spot.frame.f_lineno or 0)}")

    def _choose(self, chosen: dict[str, Any], found: Change, value: Any, where: str, *, is_named: bool) -> None:
        name = found.name
        if name in chosen:
            chosen[name] = (chosen[name][0], chosen[name][1] or found.is_stored)
            return
        form: Any = self._form(value, f"{name} ({type(value).__qualname__}){where}", is_named=is_named)
        if form is not None:
            chosen[name] = (form[0], found.is_stored)

    def _form(self, value: Any, text: str, *, is_named: bool, is_altered: bool = True) -> tuple[Any] | None:
        try:
            form: Any = self._new_forms().of(value)
        except TooLarge as error:
            self._unseen[f"{text or type(value).__qualname__}, which has {error}"] = None
            return None
        except NotEncodable as error:
            if is_named or (is_altered and is_a(value, *MUTABLE)):
                if is_replaced(value) and id(value) in self._noted_ids:
                    return None
                self._noted_ids.add(id(value))
                inside = "" if str(error) == type(value).__qualname__ else f", which holds {error}"
                if is_a(error, UnderWay):
                    self._under_way[f"{text}{inside}"] = None
                else:
                    self._note(f"{text}{inside}")
            return None
        stays = class_of(form) is tuple and form[0] == SAME and not is_named
        if not stays and is_mutable(value):
            self._taken_ids.add(id(value))
        return None if stays else (form,)

    def _is_lost(self, value: Any, module: str, change: Change) -> bool:
        """Return True if that module of the script has altered it so, and it starts over unless it has a form."""
        is_theirs = not is_users_module(sys.modules.get(module))
        is_of_kind = is_filled(value) if change.is_inside else is_replaced(value)
        return is_of_kind and not (is_theirs or self._instances.is_own(value))

    def _new_forms(self) -> ValueEncoder:
        return ValueEncoder(self._refer, self._forms, self._held, self._memories)

    def _refer(self, value: Any, forms: ValueEncoder) -> tuple[Any] | None:
        return self._referring.of(value, forms)

    def _note(self, what: str) -> None:
        """Note that it starts over. An object that hegm.keep keeps under that name may be the same or another one."""
        name = what.partition(" (")[0].rpartition(".")[2]
        self._anew[f"{what}, except what hegm.keep({name!r}) keeps" if name in self._kept else what] = None

    def _globals(self, reached: list[Any]) -> list[Any]:
        found: dict[str, dict[str, Any]] = {}
        sources: list[tuple[str, CodeType, Any]] = [(function.module, function.code, None) for function in reached]
        sources += [
            (spot.module, spot.code, spot.region) for spot in self._spots if not spot.is_module and spot.is_looked_at
        ]
        for module_name, code, region in sources:
            values: Any = vars(sys.modules[module_name]) if module_name in sys.modules else {}
            for name in begun_anew_in(code, values):
                self._note(f"{name} ({type(values[name]).__qualname__}) of {module_name}")
            changes = changes_of(code)
            for change in (*changes.within(region), *changes.inside_within(region)):
                value = values.get(change.name)
                if change.kind != GLOBAL or change.name not in values:
                    continue
                is_named = change.is_stored or self._is_lost(value, module_name, change)
                if not is_named and (change.is_inside or not is_mutable(value)):
                    continue
                where = f" of {module_name}, set at {os.path.basename(code.co_filename)}:{change.line}"
                self._choose(found.setdefault(module_name, {}), change, value, where, is_named=is_named)
        return [(module, name, *form) for module, chosen in found.items() for name, form in chosen.items()]

    # ---- attributes

    def _of_classes(self, reached: list[Any]) -> Iterator[tuple[str, str, str, Any]]:
        """Yield attributes of the script's classes that are set, such as counts of all their objects."""
        names = {change.name for change, _owner, _file in self._attribute_changes(reached) if not change.is_inside}
        for module in users_modules():
            for class_name, kind in members_of(module).items():
                if is_a(kind, type) and kind.__module__ == module.__name__:
                    members = members_of(kind)
                    for name in names & members.keys():
                        value = members[name]
                        if type(value) in _COUNTED or is_a(value, *MUTABLE):
                            form = self._form(value, f"{class_name}.{name}", is_named=True)
                            if form is not None:
                                yield module.__name__, class_name, name, form[0]

    def _of_drift(self, drift: Drift, reached: list[Any]) -> Iterator[tuple[str, str, str, Any]]:
        """Yield what changed without being named by code; of the script's objects, what is not saved with them."""
        under_way = {spot.module for spot in self._spots if spot.is_module}
        functions = [function.__code__ for function, _name in self._instances.functions]
        codes = [changes_of(code) for code in {*functions, *[found.code for found in reached]}]
        modules = [spot.changes for spot in self._spots if spot.is_module]
        stored = {(found.kind, found.name) for code in codes for found in code.found if found.is_stored}
        stored |= {(ATTRIBUTE, found.name) for code in modules for found in code.found if found.kind == ATTRIBUTE}
        for holder, name, key, value in drift.changed(self._instances):
            is_told = holder.kind == GLOBAL and holder.name in under_way and not is_a(value, *MUTABLE)
            if id(value) in self._taken_ids or (is_told and (GLOBAL, key) not in stored):
                continue
            if holder.kind == OTHERS and (ATTRIBUTE, key) not in stored:
                continue
            text = f"{name}.{key} ({type(value).__qualname__})" if key else f"{name} ({type(value).__qualname__})"
            form = self._form(value, text, is_named=not (holder.kind == GLOBAL and holder.name in under_way))
            if form is None:
                continue
            if holder.kind == OWN:
                self._values_of(holder.thing).setdefault(key, (form[0], True))
            else:
                yield holder.kind, name, key, form[0]

    def _values_of(self, thing: Any) -> dict[str, Any]:
        number = self._referring.number(thing, self._new_forms())
        values: dict[str, Any] = self._referring.entries[number]["values"]
        return values

    def _of_instances(self, reached: list[Any]) -> None:
        changes = list(self._attribute_changes(reached))
        by_class: dict[type, dict[str, tuple[Change, str]]] = {}
        for thing, names in self._instances.found:
            if id(thing) in self._held and not _is_module(thing):
                continue
            kind = class_of(thing)
            if kind not in by_class:
                by_class[kind] = {}
                for change, owner, file in changes:
                    if owner is None or issubclass(kind, owner):
                        known = by_class[kind].get(change.name)
                        if known is None or _rank(change) > _rank(known[0]):
                            by_class[kind][change.name] = (change, file)
            chosen = self._attributes(thing, names[0], by_class[kind])
            if chosen:
                self._values_of(thing).update(chosen)

    def _attribute_changes(self, reached: list[Any]) -> Iterator[tuple[Change, Any, str]]:
        """Yield each change with the class of the object, if it is known."""
        for spot in self._spots:
            if spot.is_looked_at:
                first = spot.frame.f_locals.get(spot.code.co_varnames[0]) if spot.code.co_argcount else None
                for change in (*spot.changes.within(spot.region), *spot.changes.inside_within(spot.region)):
                    if change.kind == ATTRIBUTE:
                        yield change, type(first) if change.of_self else None, os.path.basename(spot.code.co_filename)
        for function in reached:
            for change in (*changes_of(function.code).found, *changes_of(function.code).inside):
                if change.kind == ATTRIBUTE:
                    owner = function.owner if change.of_self else None
                    yield change, owner, os.path.basename(function.code.co_filename)

    def _attributes(self, thing: Any, name: str, changes: dict[str, tuple[Change, str]]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        is_made = id(thing) in self._made  # created by the loop, with everything in it
        for attribute, value in values_of(thing):
            change, file = changes.get(attribute, (None, ""))
            is_lost = change is not None and self._is_lost(value, class_of(thing).__module__, change)
            if change is not None and change.is_inside and not is_lost:
                change = None
            if change is None and id(thing) in self._drawn:
                form = self._form(value, f"{name}.{attribute}", is_named=True)
                if form is not None:
                    chosen[attribute] = (form[0], True)
            elif change is None:
                is_given = attribute in self._mentioned and is_a(value, *MUTABLE)
                if is_given or (is_made and type(value) in _NUMBERS):
                    form = self._form(value, f"{name}.{attribute}", is_named=False, is_altered=False)
                    if form is not None:
                        chosen[attribute] = (form[0], not is_given)
                elif attribute in self._read_elsewhere and (is_a(value, _GENERATOR) or is_queue(value)):
                    self._note(f"{name}.{attribute} ({type(value).__qualname__})")
            elif change.is_stored or is_lost or is_mutable(value):
                where = f" of {name}, set at {file}:{change.line}"
                self._choose(chosen, change, value, where, is_named=change.is_stored or is_lost)
        return chosen


def _rank(change: Change) -> int:
    """Return how much a change says about a value: that it is set, altered, or only altered inside."""
    return 2 if change.is_stored else 0 if change.is_inside else 1


def _was_there(made: set[int], thing: Any) -> bool:
    """Return False if the loop set a variable to it; True if unknown."""
    return id(thing) not in made


def _bounded(notes: dict[str, None]) -> list[str]:
    """Return at most that many notes, and the number of the others."""
    text = list(notes)
    more = len(text) - _MAX_NOTES
    return text if more <= 0 else [*text[:_MAX_NOTES], f"{more} more"]


def _is_module(thing: Any) -> bool:
    nn: Any = getattr(sys.modules.get("torch"), "nn", None)
    return nn is not None and is_a(thing, nn.Module)


def _has_history(value: Any) -> bool:
    if is_a(value, list, tuple):
        return any(_has_history(found) for found in value)
    return attribute_of(value, "grad_fn") is not None
