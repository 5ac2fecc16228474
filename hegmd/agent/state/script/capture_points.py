"""Whether the training could continue from where it is, and how it reaches such a place otherwise.

A restarted script reaches its place from the top through the heads of its loops. So the place has to be the head of a
loop that trains, and no other loop may have trained in the same pass of the loops around both: it would train again.
Optimizer steps show which loops train, once for each pass over a loader. A thread in the middle of a body continues to
the head under a trace of that one frame only.
"""

from __future__ import annotations

import sys

from ...notes import note
from ..code.loops import loops_of
from ..code.position import Place, Unreadable, is_of_script, look_into, said
from ..code.value_stack import caller
from ..frameworks import accelerate_hf
from ..loaders import passes as loaders_passes
from ..values.refusals import Refusal
from .baseline import note_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

_LATER = "ask again; it is over by itself"
_ONE_EACH = "give each a script of its own, or put them in one loop"
#: Set when a pass over a loader begins: the next step tells which loops it is in.
is_news = True
_trained: dict[tuple[Any, ...], tuple[Any, ...]] = {}
#: Outermost loops that have trained, each with what tells one time that it is entered from the next.
_entered: dict[Any, _Entry] = {}
_entered_again: set[Any] = set()


def note_step(frame: FrameType | None) -> None:
    """An optimizer has stepped, called from this frame."""
    global is_news  # noqa: PLW0603 - read at every step, so that it has to be cheap
    is_news = False
    try:
        place = Place(frame)
        chain = chain_of(place)
        _trained[chain] = positions_of(place)
        _note_entered(place, chain)
        _note_without_loader(place)
    except Exception as error:  # noqa: BLE001 - the edge to the script, which steps on
        note(f"the loops around a step are not known: {error!r}")


def _note_without_loader(place: Place) -> None:
    """A loop over no loader is not seen to begin: what the script holds there is looked at at its first step."""
    if place.loops and _progress_in(place.loops[-1].iterator) is None:
        loop = place.loops[-1]
        path = (*place.path[: loop.depth], (*place.path[loop.depth][:3], loop.line))
        note_place(path, place.frames[: loop.depth + 1], is_late=True)


def _progress_in(iterator: object) -> Any:
    """How far a loader is that this iterator goes over; None where it goes over none."""
    parts = [look_into(iterator, 1, _progress_of)]
    while parts:
        look = parts.pop()
        if look["kind"] == "loader":
            return look["number"]
        inner: Any = look.get("of", [])
        parts += inner if isinstance(inner, list) else [inner]
    return None


def chain_of(place: Place) -> tuple[Any, ...]:
    """The loops that a place is in, from the outermost, each with the calls by which its function was come to."""
    calls = [(*step, frame.f_lasti) for step, frame in zip(place.path, place.frames)]
    return tuple((tuple(calls[: loop.depth]), (*place.path[loop.depth][:3], loop.line)) for loop in place.loops)


def _note_entered(place: Place, chain: tuple[Any, ...]) -> None:
    entry = _entry_of(place)
    if entry is None:
        return
    before = _entered.setdefault(chain[0], entry)
    if not before.is_same(entry):
        _entered[chain[0]] = entry
        _entered_again.add(chain[0])


def _entry_of(place: Place) -> _Entry | None:
    """What tells the entry into the outermost loop from others; None where it is not known, or a `while` is around."""
    if not place.loops:
        return None
    outermost = place.loops[0]
    for depth, frame in enumerate(place.frames[: outermost.depth + 1]):
        lines = loops_of(frame.f_code).whiles_around(frame.f_lasti)
        if any(depth < outermost.depth or line < outermost.line for line in lines):
            return None
    return _Entry(outermost.iterator)


class _Entry:
    """An iterator of numbers by itself, which is all that it keeps alive; a pass over a loader by its number."""

    def __init__(self, iterator: Any) -> None:
        parts = [iterator]
        while parts and type(parts[-1]) in (enumerate, zip):
            inner: Any = parts.pop().__reduce__()[1]
            parts += inner if type(inner[-1]) is not int else inner[:1]
        found = parts[-1] if parts else None
        self._pass = _progress_of(found)
        self._numbers = found if type(found).__name__ in ("range_iterator", "longrange_iterator") else None

    def is_same(self, other: _Entry) -> bool:
        if self._pass is not None or other._pass is not None:
            return self._pass is not None and other._pass is not None and bool(self._pass[0] == other._pass[0])
        return self._numbers is other._numbers


def positions_of(place: Place) -> tuple[Any, ...]:
    """How far each of them is."""
    return tuple(repr(look_into(loop.iterator, 1, _progress_of)) for loop in place.loops)


def _progress_of(iterator: object) -> Any:
    found = loaders_passes.followed(iterator)
    return None if found is None else (found.number, found.iterator()._num_yielded)


def refusals_of(place: Place, driver: Any) -> Iterator[Refusal]:
    """Why there could be no going on from here. `driver` is the loader's iterator that is being asked, if one is."""
    theirs = accelerate_hf.against(place.frames)
    if theirs is not None:
        yield from (Refusal(what, hint, passes=passes) for what, hint, passes in theirs)
        return
    chain = chain_of(place)
    if not place.frames:
        yield Refusal("no frame of the script's is under way in the thread that trains", _LATER, passes=True)
    elif not place.at_head and (chain or driver is None):
        yield Refusal(f"the script is within a loop's body, at {said(place.path[-1])}", _LATER, passes=bool(chain))
    asked = None if driver is None else loaders_passes.followed(driver)
    if asked is not None:
        yield from asked.asked.against(place)
    if not _trained or not chain:
        return
    if not any(trained[: len(chain)] == chain for trained in _trained):
        yield Refusal(
            f"the loop at {said(chain[-1][1])} does not train, and is within one that does", _LATER, passes=True
        )
        return
    before, entry = _entered.get(chain[0]), _entry_of(place)
    if chain[0] in _entered_again or (before is not None and entry is not None and not before.is_same(entry)):
        at = said(chain[0][1])
        yield Refusal(f"the loop at {at} has trained before, in an earlier call, and would do so again", _ONE_EACH)
    positions = positions_of(place)
    for trained, was in list(_trained.items()):
        common = _common(trained, chain)
        if common == len(chain) or common == len(trained):
            continue
        over = f"the loop at {said(trained[-1][1])} has trained before the one at {said(chain[-1][1])}"
        if common == 0:
            yield Refusal(f"{over}, and would do so again", _ONE_EACH)
        elif was[:common] == positions[:common]:
            yield Refusal(f"{over}, and would do so again", _LATER, passes=True)


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    count = 0
    for mine, yours in zip(one, other):
        if mine != yours:
            break
        count += 1
    return count


def fits_of(gate: Any) -> Callable[[], bool]:
    """What a gate that is to park the training where it can go on from asks at each boundary."""
    approach = Approach(gate.arrive_late)
    return lambda: approach.will_do(caller())


class Approach:
    """What a training thread that is to stand is asked at each boundary: whether this one will do.

    `stand` is called in that thread as it comes to the head of a loop that will, if it was not at one.
    """

    def __init__(self, stand: Callable[[], None]) -> None:
        self._stand = stand

    def will_do(self, frame: FrameType) -> bool:
        """Whether it can stand here; if not, it goes on to the head of its loop, or to its next boundary."""
        try:
            place = Place(frame)
        except Unreadable:
            return True  # nothing is gained by going on
        refused = list(refusals_of(place, asked_iterator(frame)))
        if not any(found.passes for found in refused):
            return True
        if not place.at_head and place.loops and sys.gettrace() is None and not accelerate_hf.is_own(place.frames[-1]):
            self._go_to_head(place)
        return False

    def _go_to_head(self, place: Place) -> None:
        loop = place.loops[-1]
        frame = place.frames[loop.depth]
        loops = loops_of(frame.f_code)
        head = loops.around(frame.f_lasti)[-1].offset

        def follow(found: FrameType, event: str, _argument: object) -> Any:
            if event == "opcode" and loops.standing(found.f_lasti) == head:
                _trace_no_more(found)
                if not any(refused.passes for refused in refusals_of(Place(found), None)):
                    self._stand()
                return None
            if event == "return":  # out of the loop in another way
                _trace_no_more(found)
                return None
            return follow

        frame.f_trace = follow
        frame.f_trace_opcodes = True
        sys.settrace(_trace_nothing)


def _trace_nothing(_frame: FrameType, _event: str, _argument: object) -> None:
    """For every other frame that begins meanwhile."""


def _trace_no_more(frame: FrameType) -> None:
    sys.settrace(None)
    frame.f_trace = None
    frame.f_trace_opcodes = False


def asked_iterator(frame: FrameType | None) -> Any:
    """The loader's iterator that is being asked for a batch where the thread stands; None if it stands elsewhere."""
    while frame is not None and not is_of_script(frame.f_code):
        if frame.f_code.co_name == "__next__":
            asked = frame.f_locals.get("self")
            if loaders_passes.followed(asked) is not None:
                return asked
        frame = frame.f_back
    return None
