"""The running functions, and which code of each runs again before the script is back at its place. Pure.

The position of a function in its loops decides which of its variables a restarted script sets again on its way, and
which were set since the loop started and have to be saved.
"""

from __future__ import annotations

import os
from binascii import crc32

from ...other_threads import called
from ..frameworks.accelerate_hf import is_own
from ..values.duck_types import class_of, is_a
from .assignments import GLOBAL, LOCAL, changes_of, nested_in
from .liveness import flow_of
from .loops import loops_of, names_of
from .position import named_frames
from .value_stack import operands_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType
    from typing import Any

    from .assignments import Change

_GENERATOR = 0x20  # inspect's CO_GENERATOR
_ASKS_ONCE = frozenset(("next", "send", "__next__", "throw"))
#: Values that cannot be changed where they are, so that a restart gives the variable another one.
_VALUES: Any = (bool, int, float, complex, str, bytes, tuple, frozenset)
_PLAIN = tuple(
    "LOAD_CONST LOAD_SMALL_INT LOAD_NAME LOAD_GLOBAL LOAD_FAST LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT PUSH_NULL "
    "COPY DUP_TOP SWAP ROT_ CACHE EXTENDED_ARG NOP FORMAT_ BUILD_STRING CONVERT_VALUE PRECALL KW_NAMES".split()
)
_OPTIMIZED = 0x1  # set for a function's code, not for a module's or a class's
#: Names of functions that draw random numbers.
_DRAWING = frozenset(
    "rand randn randint randperm random randrange choice choices sample shuffle normal normal_ uniform uniform_ "
    "bernoulli bernoulli_ multinomial permutation permuted gauss random_split random_ rand_like randn_like "
    "randint_like integers standard_normal betavariate beta".split()
)


class ReentryFrame:
    """A frame: which of its code is run again before the script comes here once more."""

    def __init__(self, frame: FrameType, depth: int, *, is_inside: bool) -> None:
        self.frame = frame
        self.depth = depth  # how many others are around it
        self.code = frame.f_code
        self.flow = flow_of(self.code)
        self.changes = changes_of(self.code)
        self.loop = self.flow.around(frame.f_lasti)
        #: None for all of it: a function that is called from a loop.
        self.region = None if is_inside else self.loop
        self.late = self.loop - self.flow.before(frame.f_lasti)
        self.is_module = not self.code.co_flags & _OPTIMIZED
        self.is_inside = is_inside
        self.module = str(frame.f_globals.get("__name__"))
        #: True if a loop returns to it, and no framework restores its variables.
        self.is_looked_at = bool(self.loop or is_inside) and not is_own(frame)

    def live(self, *, in_loop: bool = False) -> set[str]:
        if not in_loop:
            return self.flow.live(self.frame.f_lasti)
        return self.flow.live(self.frame.f_lasti, self.flow.innermost(self.frame.f_lasti))

    def local_changes(self) -> Iterator[tuple[Change, bool, bool]]:
        """Yield the changes of its variables, also by inner functions; with whether it is in the loop, and late."""
        for found in (*self.changes.within(self.region), *self.changes.inside_within(self.region)):
            if found.kind == self.kind:
                yield found, found.offset in self.loop, found.offset in self.late
        for inner in nested_in(self.code):
            shared = set(inner.co_freevars) & self.flow.shared
            for found in (*changes_of(inner).found, *changes_of(inner).inside):
                if found.kind == LOCAL and found.name in shared:
                    yield found, True, False

    @property
    def kind(self) -> str:
        return GLOBAL if self.is_module else LOCAL

    def set_before_resume(self) -> set[str]:
        """Return its variables that a restarted script sets on its way to the place; for a call, all of them."""
        if self.is_inside and not self.is_module:
            return {*self.code.co_varnames, *self.code.co_cellvars}
        early = self.loop - self.late
        stored = (found for found in self.changes.found if found.is_stored and found.kind == self.kind)
        return {found.name for found in stored if found.offset in early}

    def set_anew(self) -> set[str]:
        """Return its variables that its loop sets before it reads them, and that no other function reads."""
        stored = {found.name for found in self.changes.within(self.loop) if found.is_stored and found.kind == self.kind}
        read_elsewhere = {name for inner in nested_in(self.code) for name in changes_of(inner).mentions(None)}
        return stored - self.live() - read_elsewhere

    def draws_before_resume(self) -> bool:
        """Return True if random numbers may be drawn between the heads of its loops, on the way to the place."""
        return bool(self.changes.mentions(self.loop - self.late) & _DRAWING)

    def parameters(self) -> list[str]:
        """Return its parameters, whose values its caller computed at the call."""
        count = self.code.co_argcount + self.code.co_kwonlyargcount
        return list(self.code.co_varnames[:count]) if self.is_inside and not self.is_module else []

    def unnamed(self) -> list[Any]:
        """Return the values without a name that wait for the call in this frame, and that the way here makes anew."""
        if not self.is_looked_at:
            return []
        targets = loops_of(self.code).targets()
        stored = (found for found in self.changes.found if found.is_stored and found.kind in (LOCAL, GLOBAL))
        again = {found.name for found in stored if self._is_of_the_loop(found.offset)}
        return [
            value for value, made in operands_of(self.frame) if _is_made_anew(value, made, frozenset(again - targets))
        ]

    def _is_of_the_loop(self, offset: int) -> bool:
        return offset in self.loop if self.loop else offset > self.frame.f_lasti

    def is_collecting(self) -> bool:
        """Return True if it is in the loop of a comprehension, or of a generator that C code goes over."""
        loops = loops_of(self.code)
        if any(loops.collects(head) for head in loops.around(self.frame.f_lasti)):
            return True
        caller = self.frame.f_back
        return bool(self.code.co_flags & _GENERATOR) and caller is not None and _goes_over_all(caller)

    def where(self, line: int) -> str:
        function = "" if self.is_module else f" in {self.code.co_name}()"
        return f"{function} at {os.path.basename(self.code.co_filename)}:{line}"


def _is_made_anew(value: Any, made: list[Any], again: frozenset[str]) -> bool:
    """Return True if a restarted script would make another value there, of what its loops have changed."""
    names = {name for found in made if found.opname.startswith("LOAD_") for name in names_of(found.argval)}
    is_plain = all(found.opname.startswith(_PLAIN) for found in made)
    if not is_a(value, *_VALUES) and getattr(class_of(value), "dtype", None) is None:
        return is_a(value, list, dict, set) and bool(value) and not is_plain and not _is_named(made)
    return bool(names & again) or not is_plain


def _is_named(made: list[Any]) -> bool:
    """Return True if the value was only looked up: a restarted script finds the same object."""
    return all(found.opname.startswith((*_PLAIN, "LOAD_ATTR", "BINARY_SUBSCR", "BINARY_SLICE")) for found in made)


def _goes_over_all(caller: FrameType) -> bool:
    """Return True if that frame gives a generator to a function that asks it for more than one item, such as sum()."""
    name = called(caller)
    return name is not None and name not in _ASKS_ONCE


def spots_of(frames: list[FrameType]) -> Iterator[ReentryFrame]:
    """Yield one for each frame, outermost first."""
    is_inside = False
    for depth, frame in enumerate(frames):
        spot = ReentryFrame(frame, depth, is_inside=is_inside)
        is_inside = is_inside or bool(spot.loop)
        yield spot


def all_set_before_resume(spots: list[ReentryFrame]) -> frozenset[str]:
    """Return the variables of all spots, as `script_objects` names them."""
    functions = {id(frame): name for name, frame in named_frames(spot.frame for spot in spots)}
    looked_at = (spot for spot in spots if spot.is_looked_at)
    return frozenset(
        f"{functions.get(id(spot.frame), spot.module)}.{name}"
        for spot in looked_at
        for name in spot.set_before_resume()
    )


def only_set_anew(names: list[str], frames: list[FrameType]) -> bool:
    """Return True if all these names lead through variables that the loops set again before they read them."""
    functions = {id(frame): name for name, frame in named_frames(frames)}
    anew = tuple(
        f"{functions.get(id(spot.frame), spot.module)}.{name}"
        for spot in spots_of(frames)
        if spot.is_looked_at
        for name in spot.set_anew()
    )
    return all(any(name == root or name.startswith((f"{root}.", f"{root}[")) for root in anew) for name in names)


def known_by(code: CodeType) -> dict[str, Any]:
    """Return what identifies a function in another process."""
    names = repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    return {"function": [code.co_name, code.co_firstlineno], "code": crc32(code.co_code + names)}
