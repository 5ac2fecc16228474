"""Values that a name or a text identifies: members of enumerations, paths, dates, fractions, functions and classes; and
communication that has completed.

Creates only what the standard library and PyTorch create from plain numbers and texts. A value that is looked up by
name has to exist: only plain attributes of modules are read.
"""

from __future__ import annotations

import sys

from ..values.duck_types import BUILTIN, FUNCTION, MODULE, class_of, is_a
from .position import is_users_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENUM, MADE, DTYPE = "enum", "made", "dtype"
KINDS = frozenset((ENUM, MADE, DTYPE))
NAME, CODE = "name", "code"
MARKS = frozenset((NAME, CODE))


def _isoformat(value: Any) -> str:
    return str(value.isoformat())


#: Classes by module and name, and how to write a value of each.
_TEXTS: dict[tuple[str, str], Any] = {
    ("decimal", "Decimal"): str,
    ("fractions", "Fraction"): str,
    ("pathlib", "PosixPath"): str,
    ("pathlib", "PurePosixPath"): str,
    ("datetime", "datetime"): _isoformat,
    ("datetime", "date"): _isoformat,
    ("uuid", "UUID"): str,
}


_ROWS = frozenset((("datetime", "timedelta"), ("torch", "Size")))
_DISTRIBUTED = "torch._C._distributed_c10d"  # where the class of communication is
_WORK = _DISTRIBUTED, "Work"


def form_of(value: Any) -> Any:
    """Return the form of a value that can be created from a text; None for other values."""
    kind = class_of(value)
    if kind is bytearray:
        return (MADE, "builtins", "bytearray", bytes(value))
    for (module, name), say in _TEXTS.items():
        if kind is getattr(sys.modules.get(module), name, ()):
            return (MADE, module, name, say(value))
    if kind is getattr(sys.modules.get("datetime"), "timedelta", ()):
        return (MADE, "datetime", "timedelta", (value.days, value.seconds, value.microseconds))
    torch: Any = sys.modules.get("torch")
    if torch is not None and kind is torch.Size:
        return (MADE, "torch", "Size", list(value))
    if torch is not None and kind is torch.dtype:
        return (DTYPE, str(value).rpartition(".")[2])
    if is_communication(value):
        return (MADE, *_WORK, "") if value.is_completed() else None
    enum: Any = sys.modules.get("enum")
    if enum is not None and is_a(value, enum.Enum) and _named(kind.__module__, kind.__qualname__) is kind:
        if value.name in kind.__members__:
            return (ENUM, kind.__module__, kind.__qualname__, value.name)
        return (ENUM, kind.__module__, kind.__qualname__, value.value) if _combines(kind) else None
    return None


def value_of(form: Any) -> Any:
    """Return the value of a form; None if its name no longer exists."""
    if form[0] == DTYPE:
        return getattr(sys.modules["torch"], form[1], None)
    if form[0] == ENUM:
        of_enum = _named(form[1], form[2])
        if is_a(form[3], str):
            return getattr(of_enum, "__members__", {}).get(form[3])
        return of_enum(form[3]) if _combines(of_enum) else None
    _kind, module, name, text = form
    if (module, name) == ("builtins", "bytearray"):
        return bytearray(text)
    if (module, name) == _WORK:
        return _completed_work()
    if (module, name) not in _TEXTS and (module, name) not in _ROWS:
        return None
    __import__(module)
    kind: Any = getattr(sys.modules[module], name)
    if (module, name) == ("datetime", "timedelta"):
        return kind(*text)
    return kind.fromisoformat(text) if module == "datetime" else kind(text)


def _combines(kind: Any) -> bool:
    """Return True for a class of flags whose combinations the standard library creates."""
    enum: Any = sys.modules["enum"]
    makes: Any = getattr(kind, "_missing_", None)
    return (
        is_a(kind, type)
        and issubclass(kind, enum.Flag)
        and makes.__func__ in (enum.Flag._missing_.__func__, enum.IntFlag._missing_.__func__)
    )


def is_communication(value: Any) -> bool:
    """Return True for what `all_reduce(..., async_op=True)` returns. Its tensors are ready once it has completed."""
    return is_a(value, getattr(sys.modules.get(_DISTRIBUTED), "Work", ()))


def _completed_work() -> Any:
    """Return what a script can wait for and that has completed."""
    torch: Any = sys.modules["torch"]
    __import__(_DISTRIBUTED)
    done = torch.futures.Future()
    done.set_result([])
    return sys.modules[_DISTRIBUTED]._create_work_from_future(done)


def mark_of(value: Any) -> Any:
    """Return what identifies a function, a class or a module in another process; None for other values."""
    if is_a(value, MODULE):
        return (NAME, value.__name__, "")
    if is_a(value, FUNCTION, BUILTIN, type):
        module, name = str(getattr(value, "__module__", "")), value.__qualname__
        if _named(module, name) is value:
            return (NAME, module, name)
        code = getattr(value, "__code__", None)
        return None if code is None else (CODE, code.co_name, code.co_firstlineno, code.co_filename)
    return None


def marked(mark: Any, here: Any) -> Any:
    """Return the value of that mark: `here` if it has the mark, or one found by its name; otherwise None.

    Names lead to the script's own functions and classes and to PyTorch's layers only: a file must not name any object.
    """
    if mark_of(here) == mark:
        return here
    if mark[0] == NAME and (is_users_module(sys.modules.get(mark[1])) or mark[1].startswith("torch.nn")):
        return _named(mark[1], mark[2])
    return None


def named_tuple(module: str, name: str, parts: int) -> Any:
    """Return the class of named tuples with that name and number of fields; None if there is none."""
    found: Any = _named(module, name)
    fields: Any = getattr(found, "_fields", ())
    return found if is_a(found, type) and tuple in found.__mro__ and len(fields) == parts else None


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split(".") if name else ():
        found = getattr(found, "__dict__", {}).get(part)
    return found
