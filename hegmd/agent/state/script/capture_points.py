"""Decides whether the training could continue from its present place, and how it reaches a better one.

A restarted script reaches its place from the top through the heads of its loops. So the place has to be the head of a
loop that trains. No other loop may have trained in the same pass of the loops around both: it would train again.
Optimizer steps show which loops train, once for each pass over a loader. A thread in the middle of a body continues to
the head under a trace of that frame only.
"""

from __future__ import annotations

import dis
import sys
from _thread import get_ident

from ... import lifecycle
from ...addresses import empty_copy
from ...notes import note
from ..code.loops import loops_of
from ..code.position import ThreadPosition, Unreadable, is_of_script, look_into, step_text
from ..code.reentry import spots_of
from ..code.value_stack import caller
from ..frameworks import accelerate_hf
from ..loaders import passes as loaders_passes
from ..values import sharded
from ..values.refusals import Refusal
from .baseline import note_place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

_LATER = "try again shortly; nothing has to change"
_COLLECTED = "write a for loop that appends each value to a list, in place of the comprehension or generator"
_OWN_LINE = "write the call in a line of its own, as in `loss = run()`, and use its result in the next line"
_FOR = "write `for step in range(most):` in place of the `while`, and `break` as before"
_ONE_EACH = "use a separate script for each, or one loop"
#: Instructions at which a frame ends; an exception may also end it at the one that raised it.
# The flag of the code of a generator, as in `inspect`.
_CO_GENERATOR = 0x20
_ENDS = ("RETURN_", "RAISE_", "RERAISE", "CLEANUP_THROW")
#: Set when a pass over a loader begins: at the next step the loops are found.
is_news = True
_trained: dict[tuple[Any, ...], tuple[Any, ...]] = {}
#: Outermost loops that have trained, each with what distinguishes one entry from the next.
_entered: dict[Any, _Entry] = {}
_entered_again: set[Any] = set()


def note_step(frame: FrameType | None) -> None:
    """Record that an optimizer has stepped, called from this frame."""
    global is_news  # noqa: PLW0603 - read at every step, so that it has to be cheap
    is_news = False
    try:
        place = ThreadPosition(frame)
        chain = chain_of(place)
        _trained[chain] = positions_of(place)
        _note_entered(place, chain)
        _note_without_loader(place)
    except Exception as error:  # noqa: BLE001 - the edge to the script, which steps on
        note(f"the loops around a step are not known: {error!r}")


def _note_without_loader(place: ThreadPosition) -> None:
    """Record a loop without a loader at its first step: its start is not seen."""
    if place.loops and _progress_in(place.loops[-1].iterator) is None:
        note_place(path_of_loop(place), place.frames[: place.loops[-1].depth + 1], is_late=True)


def path_of_loop(place: ThreadPosition) -> Any:
    """Return the path of the head of the innermost loop: a survey may find the training within the loop's body."""
    if place.at_head or not place.loops:
        return place.path
    loop = place.loops[-1]
    return (*place.path[: loop.depth], (*place.path[loop.depth][:3], loop.line))


def _progress_in(iterator: object) -> Any:
    """Return the progress of the loader that this iterator iterates over; None without a loader."""
    parts = [look_into(iterator, 1, _progress_of)]
    while parts:
        position = parts.pop()
        if position["kind"] == "loader":
            return position["number"]
        inner: Any = position.get("of", [])
        parts += inner if isinstance(inner, list) else [inner]
    return None


def chain_of(place: ThreadPosition) -> tuple[Any, ...]:
    """Return the loops that a place is in, outermost first, each with the calls that lead to its function."""
    calls = [(*step, frame.f_lasti) for step, frame in zip(place.path, place.frames)]
    return tuple((tuple(calls[: loop.depth]), (*place.path[loop.depth][:3], loop.line)) for loop in place.loops)


def _note_entered(place: ThreadPosition, chain: tuple[Any, ...]) -> None:
    entry = _entry_of(place)
    if entry is None:
        return
    before = _entered.setdefault(chain[0], entry)
    if not before.is_same(entry):
        _entered[chain[0]] = entry
        _entered_again.add(chain[0])


def _entry_of(place: ThreadPosition) -> _Entry | None:
    """Return what identifies this entry into the outermost loop; None if unknown, or inside a `while`."""
    if not place.loops:
        return None
    outermost = place.loops[0]
    for depth, frame in enumerate(place.frames[: outermost.depth + 1]):
        lines = loops_of(frame.f_code).whiles_around(frame.f_lasti)
        if any(depth < outermost.depth or line <= outermost.line for line in lines):  # its body may begin with the loop
            return None
    return _Entry(outermost.iterator)


class _Entry:
    """An iterator of numbers, kept alive alone; a pass over a loader, by its number."""

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


def positions_of(place: ThreadPosition) -> tuple[Any, ...]:
    return tuple(repr(look_into(loop.iterator, 1, _progress_of)) for loop in place.loops)


def _progress_of(iterator: object) -> Any:
    found = loaders_passes.followed(iterator)
    return None if found is None else (found.number, found.iterator()._num_yielded)


def refusals_of(place: ThreadPosition, driver: Any, ident: int | None = None) -> Iterator[Refusal]:
    """Yield why a restart could not continue from here. `driver` is the loader's iterator that is driver, if any.

    `ident` is the thread that is there, if it is not this one.
    """
    if _may_read_ahead(get_ident() if ident is None else ident):
        yield Refusal(
            "no optimizer has made a step, so that this thread may only read a loader ahead", _LATER, passes=True
        )
        return
    found = list(_of_place(place, driver))
    yield from found
    if not any(refused.passes for refused in found):  # it would stay here
        yield from _of_unnamed(place)


def _may_read_ahead(ident: int) -> bool:
    """Return True for a thread beside the main one that passes the batches, as long as no thread has trained."""
    threading, gate = sys.modules.get("threading"), lifecycle.gate()
    is_beside = threading is not None and ident != threading.main_thread().ident
    return is_beside and ident == gate.home and not gate.trainers


def _of_unnamed(place: ThreadPosition) -> Iterator[Refusal]:
    """Yield where values that no variable has would be lost, or computed anew from variables not restored yet."""
    for spot, step in zip(spots_of(place.frames), place.path):
        if spot.is_collecting():
            yield Refusal(f"the loop at {step_text(step)} collects values that no variable has yet", _COLLECTED)
        if spot.unnamed():
            what = f"the call at {step_text(step)} is in an expression that has computed another value already"
            yield Refusal(f"{what}, which a restarted script would compute anew", _OWN_LINE)


def _of_place(place: ThreadPosition, driver: Any) -> Iterator[Refusal]:
    framework = accelerate_hf.against(place.frames)
    if framework is not None:
        yield from (Refusal(what, hint, passes=passes) for what, hint, passes in framework)
        return
    chain = chain_of(place)
    if not place.frames:
        yield Refusal("the training thread runs no function of the script", _LATER, passes=True)
    elif not place.at_head and chain:
        yield Refusal(f"the script is within a loop's body, at {step_text(place.path[-1])}", _LATER, passes=True)
    elif not place.at_head and driver is None:
        within = place.whiles()
        where = (
            f"the body of a `while` loop, at {step_text(within[-1])}"
            if within
            else f"no loop, at {step_text(place.path[-1])}"
        )
        yield Refusal(f"the training is in {where}, and continues at the head of a `for` loop only", _FOR)
    asked = None if driver is None else loaders_passes.followed(driver)
    if asked is not None:
        yield from asked.requests.against(place)
    if not _trained or not chain:
        return
    if not any(trained[: len(chain)] == chain for trained in _trained):
        if _feeds_training(place, chain):
            return  # no later place is better, and `capture` says why
        yield Refusal(
            f"the loop at {step_text(chain[-1][1])} does not train, but is inside one that does", _LATER, passes=True
        )
        return
    before, entry = _entered.get(chain[0]), _entry_of(place)
    if chain[0] in _entered_again or (before is not None and entry is not None and not before.is_same(entry)):
        at = step_text(chain[0][1])
        yield Refusal(f"the loop at {at} has trained before, in an earlier call, and would do so again", _ONE_EACH)
    positions = positions_of(place)
    for trained, was in list(_trained.items()):
        common = _common(trained, chain)
        if common == len(chain) or common == len(trained):
            continue
        over = f"the loop at {step_text(trained[-1][1])} has trained before the one at {step_text(chain[-1][1])}"
        if common == 0:
            yield Refusal(f"{over}, and would do so again", _ONE_EACH)
        elif was[:common] == positions[:common]:
            yield Refusal(f"{over}, and would do so again", _LATER, passes=True)


def _feeds_training(place: ThreadPosition, chain: tuple[Any, ...]) -> bool:
    """Return True in a generator of the script that the loop that trains goes over."""
    if not place.frames[-1].f_code.co_flags & _CO_GENERATOR:
        return False
    around = sum(loop.depth < len(place.frames) - 1 for loop in place.loops)
    return chain[:around] in _trained


def _common(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    count = 0
    for mine, yours in zip(one, other):
        if mine != yours:
            break
        count += 1
    return count


def fits_of(gate: Any) -> Callable[[], bool]:
    """Return the check that the gate makes at each boundary, to park the training where a restart can continue."""
    approach = CapturePointCheck(gate.arrive_late)
    return lambda: approach.will_do(caller())


class CapturePointCheck:
    """Checks at each boundary whether the training thread can be parked here.

    `park` is called in that thread when it reaches the head of a suitable loop later.
    """

    def __init__(self, park: Callable[[], None]) -> None:
        self._park = park

    def will_do(self, frame: FrameType) -> bool:
        """Return True if it can be parked here. Otherwise it continues to the head of its loop or its next boundary."""
        try:
            place = ThreadPosition(frame)
        except Unreadable:
            return True  # continuing would not help
        refused = list(refusals_of(place, asked_iterator(frame)))
        if not any(found.passes for found in refused):
            return not sharded.is_accumulating()
        if not place.at_head and place.loops and sys.gettrace() is None and not accelerate_hf.is_own(place.frames[-1]):
            self._run_to_loop_head(place)
        return False

    def _run_to_loop_head(self, place: ThreadPosition) -> None:
        loop = place.loops[-1]
        frame = place.frames[loop.depth]
        loops = loops_of(frame.f_code)
        head = loops.around(frame.f_lasti)[-1].offset
        is_raised = False

        def follow(found: FrameType, event: str, _argument: object) -> Any:
            nonlocal is_raised
            if event == "opcode" and loops.instruction_start(found.f_lasti) == head:
                sys.settrace(None)
                if not any(refused.passes for refused in refusals_of(ThreadPosition(found), None)):
                    self._park()
                _trace_no_more(found)  # its trace function marked it until now: see hegmd/agent/addresses.py
                _empty_copy_later(found)
                return None
            if event == "return" and (is_raised or not _is_suspended(found)):  # out of the loop in another way
                _trace_no_more(found)
                return None
            is_raised = event == "exception"
            return follow

        frame.f_trace = follow
        frame.f_trace_opcodes = True
        sys.settrace(_trace_nothing)


def _is_suspended(frame: FrameType) -> bool:
    """Return True if the frame has yielded, as a coroutine does in an `await`, and may be resumed."""
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(_ENDS)


def _trace_nothing(_frame: FrameType, _event: str, _argument: object) -> None:
    """Trace no other frame that starts meanwhile."""


def _empty_copy_later(frame: FrameType) -> None:
    """Empty the copy of a function's variables at the thread's next call: CPython reads it after a trace function."""

    def at_call(_frame: FrameType, _event: str, _argument: object) -> None:
        sys.settrace(None)
        empty_copy(frame)

    sys.settrace(at_call)


def _trace_no_more(frame: FrameType) -> None:
    sys.settrace(None)
    frame.f_trace = None
    frame.f_trace_opcodes = False


def asked_iterator(frame: FrameType | None) -> Any:
    """Return the loader's iterator that the thread is asking for a batch; None if it asks none."""
    while frame is not None and not is_of_script(frame.f_code):
        if frame.f_code.co_name == "__next__":
            asked = frame.f_locals.get("self")
            if loaders_passes.followed(asked) is not None:
                return asked
        frame = frame.f_back
    return None
