"""The position of the training thread, in a form that is valid in another process: frames by function and line, loops
by line.

Offsets in bytecode differ between Pythons and addresses between processes, so a place contains neither. Frames of the
standard library, of PyTorch, of progress bars and of the agent are skipped: the script's own frames call each other
through them. A loop's progress is read from its iterator, which is on the frame's stack.
"""

from __future__ import annotations

import dis
import gc
import os
import sys

from ..frameworks import accelerate_hf
from .loops import loops_of
from .value_stack import iterators_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType
    from typing import Any

# The agent, the parts of hegmd that it loads, and the package `hegm`: their loops are not the script's.
_OURS = os.path.abspath(__file__).rpartition("/agent/state/")[0] + "/"
_FACE = os.path.dirname(os.path.dirname(_OURS)) + "/hegm/"
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"
_PACKAGES = ("/site-packages/", "/dist-packages/")
#: Packages whose frames are transparent, wherever they are installed.
LOOKED_THROUGH = {"accelerate", "torch", "torchdata", "tqdm"}
#: Files whose frames are transparent, such as those of a program that runs scripts within itself.
FILES_LOOKED_THROUGH: set[str] = set()

_judged: dict[str, bool] = {}
#: Results for files of modules: there are thousands, and each snapshot checks all.
_module_files: dict[str, bool] = {}


def is_of_script(code: CodeType) -> bool:
    """Return True if the code is the script's: not ours, not Python's, and not of a transparent package."""
    path = code.co_filename
    known = _judged.get(path)
    if known is None:
        package = "" if path.startswith((_OURS, _FACE)) else _package_of(path)
        is_followed = package not in LOOKED_THROUGH and path not in FILES_LOOKED_THROUGH
        known = _judged[path] = is_followed and (package != "" or is_users(path))
    return known


def is_users_module(module: Any) -> bool:
    """Return True if the module is the user's, in no directory of installed packages."""
    path = getattr(module, "__file__", None)
    if type(path) is not str:
        return getattr(module, "__name__", "") == "__main__"
    known = _module_files.get(path)
    if known is None:
        known = _module_files[path] = is_users(path)
    return known


def is_users(path: object) -> bool:
    """Return True if a file of that name is the user's."""
    if not isinstance(path, str) or path in ("built-in", "frozen"):  # what modules without a file say
        return False
    if path.startswith("<"):
        return path in ("<string>", "<stdin>") or path.startswith("<ipython")
    if path.startswith((_OURS, _FACE, _STANDARD_LIBRARY)) or _package_of(path):
        return False
    return path.endswith((".py", ".pyc", ".pyw")) or "." not in path.rpartition("/")[2]


def _package_of(path: str) -> str:
    """Return the installed package of the file; empty if there is none."""
    for folder in _PACKAGES:
        if folder in path:
            return path.rpartition(folder)[2].split("/", 1)[0].split(".")[0]
    return ""


def script_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the script's frames of this frame's thread, outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        if is_of_script(frame.f_code):
            found.append(frame)
        frame = frame.f_back
    found.reverse()
    return found


def step_of(frame: FrameType) -> tuple[str, str, int, int]:
    """Return what identifies a frame in another process."""
    code = frame.f_code
    return (str(frame.f_globals.get("__name__")), code.co_name, code.co_firstlineno, frame.f_lineno or 0)


def path_of(frames: list[FrameType]) -> tuple[tuple[str, str, int, int], ...]:
    return tuple(step_of(frame) for frame in frames)


def named_frames(frames: Iterable[FrameType]) -> Iterator[tuple[str, FrameType]]:
    """Yield the functions of these frames, outermost first, each with a unique name."""
    counts: dict[str, int] = {}
    for frame in frames:
        name = frame.f_code.co_name
        if name != "<module>":
            counts[name] = count = counts.get(name, 0) + 1
            yield (f"{name}()" if count == 1 else f"{name}()#{count}"), frame


def is_of_another_script(step: Any) -> bool:
    """Return True if the outermost frame of a place certainly belongs to another script than this process's."""
    module, function, first, line = step
    code = _code_of_main() if module == "__main__" else None
    if code is None:
        return False
    parts = [code]
    for part in parts:
        parts += [inner for inner in part.co_consts if isinstance(inner, type(code))]
    return not any(
        (part.co_name, part.co_firstlineno) == (function, first) and line in {at for _, at in dis.findlinestarts(part)}
        for part in parts
    )


def _code_of_main() -> CodeType | None:
    """Return the code of the script's file, or of the text after `-c`; None if neither is known."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    words = getattr(sys, "orig_argv", [])
    try:
        if path is not None:
            with open(path, "rb") as file:
                return compile(file.read(), path, "exec", dont_inherit=True)
        return compile(words[words.index("-c") + 1], "<string>", "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError, LookupError):
        return None


def step_text(step: Any) -> str:
    """Return a step of a path in words."""
    module, function, _first, line = step
    where = "" if function == "<module>" else f" in {function}()"
    return f"line {line} of {module}{where}"


class Unreadable(Exception):
    """This Python's frames cannot be read, so that nothing is known of its loops."""


class Loop:
    """A `for` loop that the thread is in. `depth` counts the script's frames from the outermost."""

    __slots__ = ("depth", "iterator", "line", "names")

    def __init__(self, depth: int, line: int, iterator: Any, names: set[str]) -> None:
        self.depth = depth
        self.line = line
        self.iterator = iterator
        self.names = names  # the names in the expression that it iterates over


class ThreadPosition:
    """The position of a thread, with its loops. `at_head`: the innermost loop is asked for its next item."""

    __slots__ = ("at_head", "frames", "loops", "path")

    def __init__(self, frame: FrameType | None) -> None:
        """Raises Unreadable."""
        self.frames = script_frames(frame)
        self.path = path_of(self.frames)
        self.loops: list[Loop] = []
        for depth, found in enumerate(self.frames):
            iterators = iterators_of(found)
            if iterators is None:
                raise Unreadable(f"frames of Python {sys.version.split()[0]} cannot be read")
            names_before = loops_of(found.f_code).names_before
            self.loops.extend(Loop(depth, head.line, iterator, names_before(head)) for head, iterator in iterators)
        last = self.frames[-1] if self.frames else None
        self.at_head = last is not None and loops_of(last.f_code).is_head(last.f_lasti)

    def whiles(self) -> list[tuple[str, str, int, int]]:
        """Return the `while` loops that it is in, as steps with their lines."""
        found: list[tuple[str, str, int, int]] = []
        for frame, (module, function, first, _line) in zip(self.frames, self.path):
            if not accelerate_hf.is_own(frame):
                lines = loops_of(frame.f_code).whiles_around(frame.f_lasti)
                found.extend([(module, function, first, line) for line in lines])
        return found


# ---- items that an iterator has returned -----------------------------------------------------------------------------


def look_into(iterator: Any, taken: int, loader_of: Any) -> dict[str, Any]:
    """Return how to create this iterator again at its present position, in plain values.

    `taken` is 1 if its last item is still in use and must be returned again. `loader_of` returns the number of a
    loader's iterator, and None for other objects.
    """
    number = loader_of(iterator)
    if number is not None:
        return {"kind": "loader", "number": number, "given": taken}
    kind = type(iterator).__name__
    if kind in ("range_iterator", "longrange_iterator"):
        return {"kind": "range", "rest": _rest_of_range(iterator, taken)}
    if type(iterator) is enumerate:
        reduced: Any = iterator.__reduce__()
        inner, index = reduced[1]
        return {"kind": "enumerate", "index": index - taken, "of": look_into(inner, taken, loader_of)}
    if type(iterator) is zip:
        return {"kind": "zip", "of": [look_into(inner, taken, loader_of) for inner in iterator.__reduce__()[1]]}
    if kind == "generator":
        return _look_into_generator(iterator, taken, loader_of)
    if _is_at_first(iterator, taken):
        return {"kind": "first"}
    return {"kind": "other", "name": kind}


def elsewhere(place: Any, frame: FrameType | None) -> list[str]:
    """Return the outer loops over numbers that are at another item than at the saved place, in words."""
    try:
        loops = {(loop.depth, loop.line): loop.iterator for loop in ThreadPosition(frame).loops}
    except Unreadable:
        return []
    found: list[str] = []
    for loop in place["loops"][:-1]:
        iterator, needs = loops.get((loop["depth"], loop["line"])), [tuple(need) for need in loop["needs"]]
        look = {} if iterator is None else look_into(iterator, 1, _of_no_loader)
        if look.get("kind") == "range" and [("range", look["rest"])] != [(name, list(rest)) for name, rest, _ in needs]:
            found.append(step_text((*place["path"][loop["depth"]][:3], loop["line"])))
    return found


def _of_no_loader(_iterator: object) -> None:
    """The `loader_of` of who wants no loaders."""


def _rest_of_range(iterator: Any, taken: int) -> list[int]:
    """Return start, stop and step of the rest. Up to Python 3.11 it keeps the range and an index, later the rest."""
    found: Any = iterator.__reduce__()
    whole: range = found[1][0]
    rest = whole[found[2] or 0 if len(found) > 2 else 0 :]
    return [rest.start - rest.step * taken, rest.stop, rest.step]


def _look_into_generator(generator: Any, taken: int, loader_of: Any) -> dict[str, Any]:
    """Look into a generator of a transparent package, which yields what its only iterator yields."""
    if not is_of_script(generator.gi_code):
        ahead = accelerate_hf.look_ahead(generator)
        if ahead is not None:
            number = loader_of(ahead[0])
            if number is None:
                return {"kind": "other", "name": "loader of accelerate of an unknown kind"}
            return {"kind": "loader", "number": number, "given": taken + ahead[1]}
        held = gc.get_referents(generator)
        if generator.gi_running:
            frame = generator.gi_frame
            loops = iterators_of(frame)
            if loops:
                return {"kind": "through", "of": look_into(loops[-1][1], taken, loader_of)}
            if not loops_of(frame.f_code).is_delegating(frame.f_lasti):
                return {"kind": "through", "of": {"kind": "first"}}
            held = list(frame.f_locals.values())  # `yield from`, as of a bar that is switched off
        inner = {id(found): found for found in held if _is_known(found, loader_of)}
        if len(inner) == 1:
            return {"kind": "through", "of": look_into(next(iter(inner.values())), taken, loader_of)}
    return {"kind": "other", "name": f"generator {generator.gi_code.co_name}()"}


def _is_known(found: Any, loader_of: Any) -> bool:
    known = ("range_iterator", "longrange_iterator", "enumerate", "zip", "list_iterator", "tuple_iterator")
    return type(found).__name__ in known or loader_of(found) is not None


def _is_at_first(iterator: Any, taken: int) -> bool:
    if type(iterator).__name__ not in ("list_iterator", "tuple_iterator", "str_iterator", "str_ascii_iterator"):
        return False
    found = iterator.__reduce__()
    return len(found) > 2 and found[2] == taken
