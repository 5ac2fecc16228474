"""The running functions, and which code of each runs again before the script is back at its place. Pure.

The position of a function in its loops decides which of its variables a restarted script sets again on its way, and
which were set since the loop started and have to be saved.
"""

from __future__ import annotations

import os
from binascii import crc32

from ..frameworks.accelerate_hf import is_own
from .assignments import GLOBAL, LOCAL, changes_of, nested_in
from .liveness import flow_of
from .position import named_frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType
    from typing import Any

    from .assignments import Change

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
        for found in self.changes.within(self.region):
            if found.kind == self.kind:
                yield found, found.offset in self.loop, found.offset in self.late
        for inner in nested_in(self.code):
            shared = set(inner.co_freevars) & self.flow.shared
            for found in changes_of(inner).found:
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

    def draws_before_resume(self) -> bool:
        """Return True if random numbers may be drawn between the heads of its loops, on the way to the place."""
        return bool(self.changes.mentions(self.loop - self.late) & _DRAWING)

    def parameters(self) -> list[str]:
        """Return its parameters, whose values its caller computed at the call."""
        count = self.code.co_argcount + self.code.co_kwonlyargcount
        return list(self.code.co_varnames[:count]) if self.is_inside and not self.is_module else []

    def where(self, line: int) -> str:
        function = "" if self.is_module else f" in {self.code.co_name}()"
        return f"{function} at {os.path.basename(self.code.co_filename)}:{line}"


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


def known_by(code: CodeType) -> dict[str, Any]:
    """Return what identifies a function in another process."""
    names = repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    return {"function": [code.co_name, code.co_firstlineno], "code": crc32(code.co_code + names)}
