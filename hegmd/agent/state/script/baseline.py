"""What a script held when it first reached a place: what it will hold there when it runs again.

This decides what a state can restore: a model that was made later has no counterpart in a restarted script; a tensor
that existed and was written to is saved; a variable with another value is one that starts again. Stores names, numbers
and weak references, and keeps nothing of the script alive.
"""

from __future__ import annotations

import weakref

from ...notes import note
from ..code.drift import Drift
from ..code.loops import loops_of
from ..code.script_objects import Instances
from ..values.duck_types import is_a
from ..values.refusals import Refusal
from .discovery import TENSOR, Holding, Holdings
from .write_detection import Mark, Marking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

#: Places that are remembered. A script has a loop for training and some for evaluation.
MAX_PLACES = 128
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, dict, set, bytearray)
_known: dict[Any, Baseline] = {}


def note_place(path: Any, frames: list[FrameType], *, is_late: bool = False) -> None:
    """The script is there; remember it the first time. `is_late` says that it came there before. Never raises."""
    if path in _known or len(_known) >= MAX_PLACES:
        return
    try:
        _known[path] = Baseline(frames, is_late=is_late)
    except Exception as error:  # noqa: BLE001 - the edge to the script, whose objects may be anything
        note(f"what the script holds is not known: {error!r}")


def baseline_of(path: Any) -> Baseline | None:
    """What was remembered of this place."""
    return _known.get(path)


class Baseline:
    """One place, the first time; or the first step there, where nothing was seen to come to it."""

    def __init__(self, frames: list[FrameType], *, is_late: bool = False) -> None:
        self._is_late = is_late
        self._kinds: dict[str, tuple[str, str]] = {}
        self._marks: dict[str, tuple[Any, Mark]] = {}
        self._names: dict[int, tuple[Any, list[str]]] = {}
        holdings = Holdings(frames)
        marking, elsewhere = Marking(), holdings.tensors_elsewhere()
        for found in holdings.list:
            self._names[id(found.thing)] = (_weak(found.thing), found.names)
            for name in found.names:
                self._kinds[name] = (found.kind, type(found.thing).__qualname__)
            if found.kind == TENSOR and id(found.thing) not in elsewhere:
                self._marks[found.names[0]] = (weakref.ref(found.thing), marking.mark(found.thing))
        self._variables = {name: _print_of(value) for name, value in _variables(frames)}
        self.drift = Drift(Instances(frames))

    def names_of(self, found: Holding) -> list[str]:
        """The names that it had here, which it will have in a restarted script; those of now if it is later."""
        thing, names = self._names.get(id(found.thing), (None, []))
        return names if thing is not None and thing() is found.thing else found.names

    def is_later(self, found: Holding) -> bool:
        """Whether nothing of its class was held under any of its names."""
        kind = (found.kind, type(found.thing).__qualname__)
        return all(self._kinds.get(name) != kind for name in found.names)

    def written_to(self, holdings: list[Holding]) -> set[int]:
        """Those tensors, by address, that were there and have been changed in place since, or may have been."""
        marking = Marking()
        return {id(found.thing) for found in holdings if found.kind == TENSOR and self._was_written_to(found, marking)}

    def _was_written_to(self, found: Holding, marking: Marking) -> bool:
        for name in found.names:
            tensor, mark = self._marks.get(name, (None, None))
            if tensor is not None and mark is not None and tensor() is found.thing:
                return marking.was_written_to(found.thing, mark, is_late=self._is_late)
        return False

    def changed(self, frames: list[FrameType]) -> list[tuple[int, str]]:
        """The script's own variables that have another value now, each with how many functions are around its own.

        Not those that its loops set.
        """
        by_loops = {(depth, name) for depth, frame in enumerate(frames) for name in loops_of(frame.f_code).targets()}
        now = {name: _print_of(value) for name, value in _variables(frames)}
        return [
            name
            for name, before in self._variables.items()
            if name in now and name not in by_loops and now[name] != before
        ]


def refusal_of(found: Holding) -> Refusal:
    """That it was made since the script first came here."""
    name = found.names[0]
    return Refusal(
        f"{name}, a {type(found.thing).__qualname__}, was made after the first batch, and a restarted script would not "
        "have it where it continues",
        "make it before the loop, or keep what is in it with hegm.keep(name, get, set)",
    )


def _weak(thing: Any) -> Any:
    try:
        return weakref.ref(thing)
    except TypeError:  # a generator of Python's, for instance
        return lambda: None


def _variables(frames: list[FrameType]) -> Iterator[tuple[tuple[int, str], Any]]:
    for depth, frame in enumerate(frames):
        for name, value in list(frame.f_locals.items()):
            if not name.startswith("__"):
                yield (depth, name), value


def _print_of(value: Any) -> Any:
    """By which a change of it is seen, without holding it: plain values by themselves, collections by their length."""
    if is_a(value, *_PLAIN):
        return value
    if is_a(value, *_SIZED):
        return (type(value).__name__, len(value))
    return None
