"""The place in a script where a pass over a loader is first asked for batches. A restarted script is run to that place.

A restarted script starts at the top and makes each pass again at its place. The first caller then has to be the one
that continues with the pass: a batch that is taken above the loop, for example to read its shape, would be a different
one. So the first places that ask a pass are recorded; its later batches cost nothing. A pass that was only asked above
all loops is left to the script, which repeats that.

The place where a pass begins is recorded too. Another thread in a loop around it reads ahead, also between two passes.
So are the objects on the way there that a loop around it makes in some iterations only, such as the loader: a restarted
script continues in another iteration.
"""

from __future__ import annotations

import sys
import weakref
from _thread import get_ident
from functools import cache

from ...addresses import empty_copy
from ...trap import NoCollection, is_ours
from ..frameworks import accelerate_hf
from ..values.duck_types import class_of
from ..values.refusals import Refusal
from .assignments import GLOBAL, changes_of, nested_in
from .liveness import flow_of
from .loops import loops_of
from .position import look_into, path_of, script_frames, step_of, step_text
from .value_stack import caller, iterators_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType
    from typing import Any

    from .position import ThreadPosition

    #: The script's functions that a thread is in, outermost first, each with the offset of its instruction.
    _Calls = list[tuple[CodeType, int]]

#: The calls in which the last pass of each place began.
_begun: dict[Any, _Calls] = {}
#: Objects that loops make in some iterations only, as the last pass of each place began.
_made: dict[Any, _MadeEarlier] = {}
_NOTED = 2
_LATER = "try again shortly; nothing has to change"
_ASIDE = "go over both loaders in the head of the loop, with zip(), or begin the pass above the loop"
_ABOVE = "make it before the loop, so that a restarted script has it"
_PROBE = "take such a batch from a separate iterator, as in next(iter(loader))"


class FirstBatchRequests:
    """The places that asked a pass for its first batches, the first one first."""

    __slots__ = ("paths",)

    def __init__(self) -> None:
        self.paths: list[Any] = []

    def watch(self, iterator: Any) -> None:
        """Note them. Then the iterator is as PyTorch has made it."""
        weak = weakref.ref(iterator)

        def _next_data() -> Any:
            found = weak()
            if found is None:  # a deleted one cannot be asked
                raise StopIteration
            self.paths.append(path_of(script_frames(caller())))
            if len(self.paths) == _NOTED:
                del found._next_data
            ask: Any = class_of(found)._next_data
            return ask(found)

        iterator._next_data = _next_data

    def against(self, place: ThreadPosition) -> Iterator[Refusal]:
        """Yield why the pass that is being asked at this place would not continue there in a restarted script."""
        heads = heads_of(place)
        if not self.paths or _is_of_framework(place) or self.paths[0] == place.path:
            return
        what = f"the loader that is asked for batches at {step_text(place.path[-1])} was first asked at"
        passes = bool(heads) and not is_above(self.paths[0], heads[-1])
        yield Refusal(f"{what} {step_text(self.paths[0][-1])}", _LATER if passes else _PROBE, passes=passes)

    def against_loop(self, head: Any) -> Iterator[Refusal]:
        """Yield the same for the loop with this head, which iterates over the pass."""
        if self.paths and self.paths[0] != head:
            first = step_text(self.paths[0][-1])
            yield Refusal(
                f"the loader that the loop at {step_text(head[-1])} goes over was first asked at {first}", _PROBE
            )

    def is_over_above(self, place: ThreadPosition) -> bool:
        """Return True if the pass was asked above the loops only: the restarted script does so again."""
        heads = [] if _is_of_framework(place) else heads_of(place)
        return bool(heads) and 0 < len(self.paths) < _NOTED and is_above(self.paths[0], heads[0])


def note_begun(path: Any, frames: list[FrameType]) -> None:
    """Record that a pass begins there."""
    _begun[path] = _calls_of(frames)
    now = _MadeEarlier(frames)
    if now.objects or path in _made:
        now.compare(_made.get(path))
        _made[path] = now


def against_made_earlier(path: Any) -> list[Refusal]:
    """Return why a restarted script would not begin the last pass of that place: it would lack what that needs."""
    return list(_made[path].refusals.values()) if path in _made else []


class _MadeEarlier:
    """The objects that the way to a place needs, and that the loops around it have not made in each iteration."""

    def __init__(self, frames: list[FrameType]) -> None:
        self.objects: dict[tuple[int, str], tuple[Any, Any, str]] = {}
        self.refusals: dict[tuple[int, str], Refusal] = {}
        for depth, frame in enumerate(frames):
            names = {} if accelerate_hf.is_own(frame) else _made_for_later(frame.f_code, frame.f_lasti)
            for name, line in names.items():
                try:
                    weak = weakref.ref(frame.f_locals[name])
                except (KeyError, TypeError):  # a number, for example
                    continue
                loops = iterators_of(frame)
                position = look_into(loops[0][1], 1, _of_no_loader) if loops else None
                self.objects[depth, name] = (weak, position, step_text((*step_of(frame)[:3], line)))
            if names:
                empty_copy(frame)

    def compare(self, before: _MadeEarlier | None) -> None:
        """Refuse those that an earlier iteration of the outermost loop made."""
        known = {} if before is None else before.objects
        for key, (weak, position, where) in self.objects.items():
            former, its_position, _where = known.get(key, (weak, position, where))
            if former() is not weak():
                continue
            if position != its_position:
                what = f"{key[1]} was made at {where} in an earlier iteration of the loop"
                self.refusals[key] = Refusal(f"{what}, and a restarted script would not have it", _ABOVE)
            elif before is not None and key in before.refusals:
                self.refusals[key] = before.refusals[key]


def _of_no_loader(_iterator: object) -> None:
    """The position of a pass is not looked for."""


@cache
def _made_for_later(code: CodeType, place: int) -> dict[str, int]:
    """Return the names of what a loop makes on the way to the place in some iterations only, each with the line."""
    found = flow_of(code).made_for_later(place)
    set_by_others = {
        change.name
        for inner in (nested_in(code) if found else ())
        for change in changes_of(inner).found
        if change.kind == GLOBAL and change.is_stored
    }
    names = set(found) - set_by_others - set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return {name: loops_of(code).line_of(found[name]) for name in sorted(names)}


def read_by_others(ident: int) -> list[Any]:
    """Return the places of passes that another thread than that one can begin: it is in a loop around them."""
    with NoCollection():
        others = [
            _calls_of(script_frames(frame))
            for other, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage] - it is documented
            if other not in (ident, get_ident()) and not is_ours(frame)
        ]
    return [path for path, begun in _begun.items() if any(_is_in_loop_around(begun, calls) for calls in others)]


def _calls_of(frames: list[FrameType]) -> _Calls:
    return [(frame.f_code, frame.f_lasti) for frame in frames]


def _is_in_loop_around(begun: _Calls, calls: _Calls) -> bool:
    """Return True if a thread in these calls is in a loop that a pass with those calls began in."""
    for (code, began_at), (its_code, is_at) in zip(begun, calls):
        if code is not its_code:
            return False
        loops = loops_of(code)
        if {head.offset for head in loops.around(began_at)} & {head.offset for head in loops.around(is_at)}:
            return True
        if {*loops.whiles_around(began_at)} & {*loops.whiles_around(is_at)}:
            return True
        if began_at != is_at:
            return False
    return False


def against_aside(began: Any, requests: FirstBatchRequests, place: ThreadPosition) -> Iterator[Refusal]:
    """Yield why a pass that no loop iterates over, and that started there, would not continue in a restarted script."""
    heads = [] if _is_of_framework(place) else heads_of(place)
    if not heads:
        return
    loop = f"the loop at {step_text(heads[-1][-1])}"
    if requests.paths and is_above(requests.paths[0], heads[-1]):
        what = f"a loader was asked for a batch at {step_text(requests.paths[0][-1])}, above {loop}"
        yield Refusal(f"{what}, and a restarted script would call it there again", _PROBE)
    elif not is_above(began, heads[-1]):
        what = f"a pass over a loader that began at {step_text(began[-1])}, within {loop}, is not over"
        yield Refusal(f"{what}, and a restarted script would not begin it on its way", _ASIDE)


def heads_of(place: ThreadPosition) -> list[Any]:
    """Return the paths to the heads of all loops that the place is in, outermost first."""
    found = [(*place.path[: loop.depth], (*place.path[loop.depth][:3], loop.line)) for loop in place.loops]
    for step in place.whiles():
        depth = next(depth for depth, there in enumerate(place.path) if there[:3] == step[:3])
        found.append((*place.path[:depth], step))
    return sorted(found, key=lambda way: (len(way), way[-1][3]))


def is_above(path: Any, head: Any) -> bool:
    """Return True if the script passes there before it reaches that loop."""
    for mine, there in zip(path, head):
        if mine != there:
            return bool(mine[:3] == there[:3] and mine[3] < there[3])
    return False


def _is_of_framework(place: ThreadPosition) -> bool:
    return any(accelerate_hf.is_own(frame) for frame in place.frames)
