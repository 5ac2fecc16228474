"""The exact state of a training that is parked at a boundary, as one plain value.

Owns what belongs to a state; `restore` restores it into the restarted script. The agent's thread calls `capture` while
the training thread is parked. The result shares memory with the training, and has to be written before that continues.
"""

from __future__ import annotations

import gc
import sys

from .. import lifecycle
from ..addresses import empty_copy
from .code import loop_position, reentry, source_check
from .code.position import Loop, ThreadPosition, Unreadable, look_into, step_text
from .frameworks import accelerate_hf
from .loaders import passes, stateful_loader
from .script import capture_points, kind_table, variables
from .script.baseline import Baseline, baseline_of, refusal_of, refusal_of_changed
from .script.discovery import MODULE, OPTIMIZER, TENSOR, FoundObject, ScriptSearch, is_open
from .script.references import memories_of, references_to
from .values import contents, rng, sharded
from .values.duck_types import is_a
from .values.refusals import Refusal
from .values.script_api import KEY, registrations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

    #: A name, what it must return, and the line of the call unless that is the head of the loop.
    _Need = tuple[str, Any, "int | None"]

#: The version of the state as a whole. Raise it when its content or meaning changes; a test knows each version.
FORM = 4
#: Names that call `range` and `enumerate` for the script.
_ALSO = {"range": {"trange", "tnrange"}, "enumerate": {"resumable", "tenumerate"}}
_WHILE = "write it as a for loop over range() or over the loader, or keep its variables with hegm.keep(name, get, set)"
# So many of the variables that start over are named.
_MAX_NAMED = 3
_INSTEAD = {
    "count": "write `for n in range(most):` in place of itertools.count(), and break as before",
    "cycle": "write two loops in place of itertools.cycle(), one over range() and in it one over the loader",
    "list_iterator": "write `for n in range(len(items)):` in place of the loop over it, and take items[n] in it",
    "tuple_iterator": "write `for n in range(len(items)):` in place of the loop over it, and take items[n] in it",
}
_BY_HAND = "write a for loop over range() or a loader, or keep the condition's variables with hegm.keep(name, get, set)"
_WAIT = "let the script wait for it before the next batch is requested"
_STEP = "let its optimizer make its step before the next batch is requested"
#: A new process restores its state at what these do: it has to import one.
_HOOKED = frozenset(("torch.optim.optimizer", "torch.utils.data.dataloader"))
_OTHERWISE = "use hegmctl migrate without a restart, or hegmctl checkpoint and restore"
_DYNAMIC = "write static_graph=False, or sum the gradients in each batch"
_GENERATOR = "write its loops in the script in place of the generator, or go over the loader itself"


def instead_of(name: str) -> str:
    """Return what a script can write in place of a loop over such an iterator."""
    return _GENERATOR if name.startswith("generator ") else _INSTEAD.get(name, _BY_HAND)


def capture(ident: int | None = None, frame: FrameType | None = None) -> tuple[dict[str, Any], list[Refusal]]:
    """Return the state of the parked training, and what prevents a restart from it.

    `ident` is the training thread if it is not the gate's own; `frame` is its frame if it calls itself.
    """
    thread = lifecycle.gate().home if ident is None else ident
    # Do not keep all frames in a variable: this function would keep itself and all variables of the process. Its own
    # frame would do the same.
    if frame is None:
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented all the same
    taking = _Capture(thread, frame)
    return taking.state, taking.refusals


class _Capture:
    def __init__(self, ident: int, frame: FrameType | None) -> None:
        self.refusals: list[Refusal] = []
        self.state: dict[str, Any] = {"form": FORM, "python": sys.version.split()[0]}
        self._ident = ident
        self._numbers: dict[int, int] = {}
        self._baseline: Baseline | None = None
        try:
            place = ThreadPosition(frame)
        except Unreadable as error:
            self._refuse(str(error), "use CPython 3.9 to 3.14 as it is released")
            return
        if not sys.modules.keys() & _HOOKED:
            self._refuse(
                "the script does not use PyTorch, so nothing would bring a new process to this place", _OTHERWISE
            )
        self.state["place"] = self._placed(place, frame)
        self.state["passes"] = list(self._passes(place))
        self._hold(place)
        self.state["shared"] = rng.read_shared()
        for running in place.frames:
            empty_copy(running)

    def _refuse(self, what: str, hint: str) -> None:
        self.refusals.append(Refusal(what, hint))

    # ---- the place ---------------------------------------------------------------------------------------------------

    def _placed(self, place: ThreadPosition, frame: FrameType | None) -> dict[str, Any]:
        driver = capture_points.asked_iterator(frame)
        framework = accelerate_hf.FrameworkCapture(place.frames)
        self.state[accelerate_hf.KEY] = framework.state
        self.refusals += [Refusal(what, hint) for what, hint in framework.against]
        if framework.read is not None:
            number = self._number_of(framework.read[0])
            if number is not None:
                self._numbers[number] = framework.read[1]
        loops: list[dict[str, Any]] = []
        for index, loop in enumerate(place.loops):
            if accelerate_hf.is_own(place.frames[loop.depth]):
                continue
            is_asked = place.at_head and index == len(place.loops) - 1
            position = look_into(loop.iterator, 0 if is_asked else 1, self._number_of)
            if is_asked and position["kind"] == "zip" and driver is not None:
                position = self._look_into_zip(loop.iterator, driver)
            self._note_loaders(position)
            self._check_asked(position, driver, (*place.path[: loop.depth], (*place.path[loop.depth][:3], loop.line)))
            needs = list(self._needs(position, place.path[loop.depth], loop.line))
            if driver is not None:
                needs = self._made_before(needs, position, loop, place.path[: loop.depth + 1])
            self._check_names(needs, loop, place.path[loop.depth])
            loops.append({"depth": loop.depth, "line": loop.line, "needs": needs})
        self.refusals += capture_points.refusals_of(place, driver, self._ident)
        number = self._number_of(driver) if driver is not None else None
        path = capture_points.path_of_loop(place) if number is None else passes.path_of_pass(driver)
        self._baseline = baseline_of(path)
        return {"path": place.path, "loops": loops, "driver": number, "files": source_check.checksums(place.frames)}

    def _made_before(self, needs: list[_Need], position: dict[str, Any], loop: Loop, path: Any) -> list[_Need]:
        """Return the needs if the pass began above the loop, such as to count batches for a bar."""
        found = next((part for part in _parts_of(position) if part["kind"] == "enumerate"), None)
        inner = found["of"] if found is not None else {"kind": None}
        if "enumerate" in loop.names or inner["kind"] != "loader":
            return needs
        began = next(pass_.path for pass_ in passes.all_followed() if pass_.number == inner["number"])
        if began[:-1] != path[:-1] or began[-1][:3] != path[-1][:3]:
            return needs
        return [(name, value, began[-1][3] if name == "enumerate" else line) for name, value, line in needs]

    def _check_names(self, needs: list[_Need], loop: Loop, step: Any) -> None:
        """Refuse names that are called outside the head of the loop: only there they can be replaced."""
        for name in {name for name, _value, line in needs if line is None} - loop.names:
            if not loop.names & _ALSO[name]:
                where = step_text((*step[:3], loop.line))
                what = f"the loop at {where} iterates over an object created before it, whose position cannot be set"
                self._refuse(what, f"write {name}(...) in the head of the loop")

    def _check_asked(self, position: dict[str, Any], driver: Any, head: Any) -> None:
        """Refuse a pass whose first batch is not requested by the loop."""
        numbers = set(_loaders_in(position)) - {self._number_of(driver)}
        for found in passes.all_followed():
            if found.number in numbers:
                self.refusals += found.requests.against_loop(head)

    def _number_of(self, iterator: object) -> int | None:
        found = passes.followed(iterator)
        return None if found is None else found.number

    def _look_into_zip(self, iterator: Any, driver: Any) -> dict[str, Any]:
        """Look into a zip: of its parts, those before the one that is being asked have given one more."""
        parts = iterator.__reduce__()[1]
        looks = [look_into(part, 0, self._number_of) for part in parts]
        number = self._number_of(driver)
        at = next((index for index, position in enumerate(looks) if number in set(_loaders_in(position))), 0)
        return {"kind": "zip", "of": [look_into(part, 1, self._number_of) for part in parts[:at]] + looks[at:]}

    def _note_loaders(self, position: dict[str, Any]) -> None:
        if position["kind"] == "loader":
            self._numbers[position["number"]] = position["given"]
        for inner in _inner_of(position):
            self._note_loaders(inner)

    def _needs(self, position: dict[str, Any], step: Any, line: int) -> Iterator[_Need]:
        """Yield what names in the head of this loop have to return when it is entered again, in order of the calls."""
        if position["kind"] == "range":
            yield "range", position["rest"], None
        elif position["kind"] == "other":
            where = step_text((*step[:3], line))
            what = f"the loop at {where} goes over a {position['name']}, whose position cannot be set"
            self._refuse(what, instead_of(str(position["name"])))
        for inner in _inner_of(position):
            yield from self._needs(inner, step, line)
        if position["kind"] == "enumerate":
            yield "enumerate", position["index"], None

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def _passes(self, place: ThreadPosition) -> Iterator[dict[str, Any]]:
        if any(found.number not in self._numbers and not found.is_kept_by_loader() for found in passes.all_followed()):
            gc.collect()  # frees finished passes that are in reference cycles
        ahead: dict[Any, None] = {}
        for found in passes.all_followed():
            number = self._numbers.get(found.number)
            iterator = found.iterator()
            if number is None and found.number != self.state["place"]["driver"] and stateful_loader.is_left(iterator):
                continue
            if found.ident != self._ident:
                ahead.setdefault(found.path)
                continue
            rests = number is None and bool(found.sent) and iterator._persistent_workers and not iterator._task_info
            if number is None and found.number != self.state["place"]["driver"] and not rests and not found.is_over():
                if found.requests.is_over_above(place):
                    continue
                self.refusals += loop_position.against_aside(found.path, found.requests, place)
            if number is not None or found.number == self.state["place"]["driver"]:
                self.refusals += loop_position.against_made_earlier(found.path)
            self.refusals += found.refusals(number or 0)
            yield {**found.taken(number or 0), "number": found.number, "rests": rests}
        for path in ahead | dict.fromkeys(loop_position.read_by_others(self._ident)):
            what = f"another thread reads the loader at {step_text(path[-1])} ahead"
            self._refuse(what, "read it in the loop that trains")
        # Numbers of this process's passes are none of theirs.
        yield from ({**taken, "number": -1} for taken in passes.resting)

    # ---- objects with a state ----------------------------------------------------------------------------------------

    def _chosen(self, objects: ScriptSearch, frames: list[FrameType]) -> Iterator[FoundObject]:
        """Yield what to save: what a restarted script will have too; of tensors those that have been written to.

        What the loops make anew in each batch, such as a generator with the seed of its batch, is left out.
        """
        written: set[int] = set()
        if self._baseline is not None:
            written = self._baseline.written_to(objects.list)
        for found in objects.list:
            if found.kind not in (TENSOR, MODULE) and reentry.only_set_anew(found.names, frames):
                continue
            if found.kind == TENSOR:
                if id(found.thing) in written:
                    yield found
            elif self._baseline is None or not self._baseline.is_later(found):
                yield found
            elif found.kind != MODULE or contents.has_tensors(found.thing):
                self.refusals.append(refusal_of(found))

    def _hold(self, place: ThreadPosition) -> None:
        objects = ScriptSearch(place.frames)
        baseline = self._baseline
        if not objects.is_whole:
            self._refuse(
                "the script holds more objects than hegmd searches", "keep fewer objects in lists and dictionaries"
            )
        elsewhere = objects.tensors_elsewhere()
        carried = [
            found
            for found in self._chosen(objects, place.frames)
            if found.kind != TENSOR or id(found.thing) not in elsewhere
        ]
        self._check_structure(carried, place.frames)
        references = kind_table.references_of(dict(enumerate(carried)))
        self.state["holdings"] = [
            {
                "kind": found.kind,
                "class": type(found.thing).__qualname__,
                "names": found.names if baseline is None else baseline.names_of(found),
                "content": kind_table.taken(found, references),
            }
            for found in carried
        ]
        values, against = registrations.capture([found.thing for found in carried if found.kind == OPTIMIZER])
        self.state[KEY] = values
        self.refusals += [Refusal(what, hint) for what, hint in against]
        held = references_to(objects.addresses(), [found.thing for found in carried])
        for found in carried:
            if is_open(found):  # it goes along with its attributes
                held.pop(id(found.thing), None)
        self.state[variables.KEY] = own = variables.capture(
            place.frames,
            held,
            kept=values["kept"],
            changed=[] if baseline is None else baseline.changed(place.frames),
            drift=None if baseline is None else baseline.drift,
            memories=memories_of([found.thing for found in carried]),
        )
        own["unseen"] += objects.unseen
        for text in own.pop("under_way"):
            self.refusals.append(
                Refusal(f"a communication between ranks has not completed: {text}", _WAIT, passes=True)
            )
        if baseline is None:
            own["unseen"].append("tensors and variables that were there at the first batch and have been changed since")
        if own["anew"] and not registrations.keeps:
            anew = "; ".join(own["anew"][:_MAX_NAMED])
            for step in place.whiles():
                what = f"the while loop at {step_text(step)} depends on variables that start over"
                self._refuse(f"{what}: {anew}", _WHILE)

    def _check_structure(self, carried: list[FoundObject], frames: list[FrameType]) -> None:
        """Refuse what has other parts than at the first batch: its state would not fit in a restarted script."""
        parameters = kind_table.parameter_names(carried)
        for found in carried:
            pending = sharded.pending_in(found.thing) if found.kind == MODULE else None
            if pending is not None:
                self.refusals.append(Refusal(f"{found.names[0]}: {pending}", _STEP, passes=True))
                continue
            if found.kind == MODULE and sharded.accumulates_statically(found.thing, frames):
                self._refuse(f"{found.names[0]} is DDP with a static graph, and accumulates gradients", _DYNAMIC)
            if self._baseline is None:
                continue
            changes = self._baseline.changes_of(found, parameters)
            if changes:
                self.refusals.append(refusal_of_changed(found, changes))


def _inner_of(position: dict[str, Any]) -> list[dict[str, Any]]:
    inner: Any = position.get("of", [])
    return inner if is_a(inner, list) else [inner]


def _parts_of(position: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield position
    for inner in _inner_of(position):
        yield from _parts_of(inner)


def _loaders_in(position: dict[str, Any]) -> Iterator[int]:
    return (found["number"] for found in _parts_of(position) if found["kind"] == "loader")
