"""Records what a script holds when it first reaches a place. A restarted script holds the same there.

The record decides what a state can restore. A model that was made later has no counterpart in a restarted script. A
tensor that existed and was written to is saved. A variable that has another value starts again. The record has names,
numbers and weak references, and keeps nothing of the script alive.

Two marks show a write to a tensor: PyTorch's count of writes, and a checksum of the bytes. The count misses writes
through `.data`, NumPy or a library's C code, and tensors made in `torch.inference_mode()` have none. The checksum sees
those. A training waits for it at its start, so it covers parts of a large tensor and a limited number of tensors.
"""

from __future__ import annotations

import sys
import weakref

from ...addresses import empty_copy
from ...notes import note
from ..code.drift import Drift, print_of
from ..code.loops import loops_of
from ..code.script_objects import Instances
from ..storage import checksums
from ..values import sharded
from ..values.duck_types import is_a
from ..values.refusals import Refusal
from . import kind_table
from .discovery import TENSOR, FoundObject, ScriptSearch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any


#: Tensors up to the first size are summed as a whole; of larger ones, parts over their whole length. The total is
#: limited.
_WHOLE_BYTES = 16 << 20
_PART_BYTES, _PARTS = 1 << 16, 64
_MAX_SUMS, _MAX_SUMMED_BYTES = 2_000, 256 << 20

#: Places that are remembered. A script has a loop for training and some for evaluation.
MAX_PLACES = 128
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SIZED = (list, dict, set, bytearray)
_known: dict[Any, Baseline] = {}


class TensorMark:
    """The state of one tensor: its count of writes and its checksum."""

    __slots__ = ("total", "version")

    def __init__(self, version: int | None, total: int | None) -> None:
        self.version = version
        self.total = total


class TensorMarks:
    """Marks of one moment. Each memory is summed once, however many tensors share it."""

    def __init__(self) -> None:
        self._known: dict[Any, int | None] = {}
        self._left_bytes = _MAX_SUMMED_BYTES

    def mark(self, tensor: Any) -> TensorMark:
        part = sharded.local(tensor)
        return TensorMark(_version_of(part), self._sum_of(part))

    def was_written_to(self, tensor: Any, before: TensorMark, *, is_late: bool) -> bool:
        """Return True if the tensor has changed, or may have. `is_late`: writes before the mark count too."""
        part = sharded.local(tensor)
        version = _version_of(part)
        if version != before.version or (is_late and version != 0):
            return True
        return self._sum_of(part) != before.total if before.total is not None else version is None

    def _sum_of(self, tensor: Any) -> int | None:
        """Return the checksum; None if it has no memory, or if the sum would take too long."""
        try:
            storage = tensor.untyped_storage()
            memory = (tensor.device, storage.data_ptr(), storage.nbytes())
            if memory not in self._known:
                self._known[memory] = self._added_up(tensor.device, storage)
            return self._known[memory]
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            return None

    def _added_up(self, device: Any, storage: Any) -> int | None:
        torch: Any = sys.modules["torch"]
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # a copy would break it
        size_bytes: int = storage.nbytes()
        is_whole = size_bytes <= _WHOLE_BYTES
        self._left_bytes -= size_bytes if is_whole else _PART_BYTES * _PARTS
        if self._left_bytes < 0 or len(self._known) >= _MAX_SUMS:
            return None
        with torch.no_grad():
            raw = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            if not is_whole:
                step_bytes = (size_bytes - _PART_BYTES) // (_PARTS - 1)
                raw = raw.as_strided((_PARTS, _PART_BYTES), (step_bytes, 1)).contiguous()
            raw = raw.cpu()
        return checksums.sum_of(raw.data_ptr(), raw.numel())


def _version_of(tensor: Any) -> int | None:
    """Return PyTorch's count of its writes; None if PyTorch does not count."""
    return None if tensor.is_inference() else int(tensor._version)


def note_place(path: Any, frames: list[FrameType], *, is_late: bool = False) -> None:
    """Record what the script holds at this place, the first time. `is_late`: it was here before. Never raises."""
    if path in _known or len(_known) >= MAX_PLACES:
        return
    try:
        _known[path] = Baseline(frames, is_late=is_late)
        for running in frames:
            empty_copy(running)
    except Exception as error:  # noqa: BLE001 - the edge to the script, whose objects may be anything
        note(f"what the script holds is not known: {error!r}")


def baseline_of(path: Any) -> Baseline | None:
    """Return the record of this place, or None."""
    return _known.get(path)


class Baseline:
    """The first time at a place; or the first step there, if its start was not seen."""

    def __init__(self, frames: list[FrameType], *, is_late: bool = False) -> None:
        self._is_late = is_late
        self._kinds: dict[str, tuple[str, str]] = {}
        self._marks: dict[str, tuple[Any, TensorMark]] = {}
        self._names: dict[int, tuple[Any, list[str]]] = {}
        self._forms: dict[str, Any] = {}
        objects = ScriptSearch(frames)
        marking, elsewhere = TensorMarks(), objects.tensors_elsewhere()
        parameters = kind_table.parameter_names(objects.list)
        for found in objects.list:
            self._names[id(found.thing)] = (_weak(found.thing), found.names)
            form = kind_table.form_of(found, parameters)
            for name in found.names:
                self._kinds[name] = (found.kind, type(found.thing).__qualname__)
                self._forms[name] = form
            if found.kind == TENSOR and id(found.thing) not in elsewhere:
                self._marks[found.names[0]] = (weakref.ref(found.thing), marking.mark(found.thing))
        self._variables = {name: _print_of(value) for name, value in _variables(frames)}
        self.drift = Drift(Instances(frames), is_late=is_late)

    def names_of(self, found: FoundObject) -> list[str]:
        """Return the names that it had here, and will have in a restarted script; its present ones if made later."""
        thing, names = self._names.get(id(found.thing), (None, []))
        return names if thing is not None and thing() is found.thing else found.names

    def is_later(self, found: FoundObject) -> bool:
        """Return True if no object of its class had any of its names."""
        kind = (found.kind, type(found.thing).__qualname__)
        return all(self._kinds.get(name) != kind for name in found.names)

    def changes_of(self, found: FoundObject, parameters: dict[int, str]) -> list[str]:
        """Return how its structure differs from the one here, which a restarted script will have again."""
        known = next((name for name in self.names_of(found) if name in self._forms), None)
        if known is None or self._kinds[known][0] != found.kind:
            return []
        return kind_table.changes_between(found.kind, self._forms[known], kind_table.form_of(found, parameters))

    def written_to(self, objects: list[FoundObject]) -> set[int]:
        """Return the addresses of the tensors that were here and have changed in place, or may have."""
        marking = TensorMarks()
        return {id(found.thing) for found in objects if found.kind == TENSOR and self._was_written_to(found, marking)}

    def _was_written_to(self, found: FoundObject, marking: TensorMarks) -> bool:
        for name in found.names:
            tensor, mark = self._marks.get(name, (None, None))
            if tensor is not None and mark is not None and tensor() is found.thing:
                return marking.was_written_to(found.thing, mark, is_late=self._is_late)
        return False

    def changed(self, frames: list[FrameType]) -> list[tuple[int, str]]:
        """Return the script's variables with another value, except loop variables, each with its function's depth."""
        by_loops = {(depth, name) for depth, frame in enumerate(frames) for name in loops_of(frame.f_code).targets()}
        now = {name: _print_of(value) for name, value in _variables(frames)}
        return [
            name
            for name, before in self._variables.items()
            if name in now and name not in by_loops and now[name] != before
        ]


def refusal_of(found: FoundObject) -> Refusal:
    """Return the refusal of an object that was created since the script first reached this place."""
    name = found.names[0]
    return Refusal(
        f"{name}, a {type(found.thing).__qualname__}, was created after the first batch, so a restarted script would "
        "not have it where it continues",
        "create it before the loop, or keep its contents with hegm.keep(name, get, set)",
    )


def refusal_of_changed(found: FoundObject, changes: list[str]) -> Refusal:
    """Return the refusal of an object whose structure has changed since the script first reached this place."""
    what = f"{changes[0]}{'' if len(changes) == 1 else f', and {len(changes) - 1} more'}"
    return Refusal(
        f"{found.names[0]}, a {type(found.thing).__qualname__}, was changed after the first batch: {what}; a restarted "
        "script would have the former one where it continues",
        "make the change before the loop",
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
    """Return a fingerprint that holds no reference: plain values themselves, collections by their length.

    An array of NumPy has one of its numbers: code does not name what `numpy.add.at(array, ...)` changes.
    """
    if is_a(value, *_PLAIN):
        return value
    if is_a(value, *_SIZED):
        return (type(value).__name__, len(value))
    return print_of(value) if type(value) is getattr(sys.modules.get("numpy"), "ndarray", None) else None
