"""Typed, frozen records with a checked plain form. `messages` is written in them.

A record class declares its fields with a type and a sentence each. The constructor, `==`, `repr`, the plain form for
the wire, the check of received values and the reference in docs/protocol.md are derived from them. Type checkers take a
record for a dataclass. It is none, because importing `dataclasses` takes 13 ms, more than a whole Python start, in
every call of `hegmctl` and in every worker.

Field types are read from the annotations once, when a class is first decoded or described. They are int, float, bool,
str, bytes, object (any plain value), `int | str`, the name of a record, `tuple[X, ...]`, `Mapping[str, X]`, and `X |
None` for a value that can be unknown.
"""

from __future__ import annotations

import sys

from ..errors import BAD_REQUEST, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, ClassVar

    from typing_extensions import Self, dataclass_transform

    Check = Callable[[object, str], Any]
else:

    def dataclass_transform(**_unused: object):
        """Replace typing's function at run time, where it has no effect either."""
        return lambda cls: cls


REQUIRED: Any = object()
INT_MIN = -(2**63)
INT_MAX = 2**64 - 1
_LARGEST = sys.float_info.max


class BadValue(HegmError):
    """A received value does not have the form that its record declares."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(BAD_REQUEST, f"{where}: {why}", "see docs/protocol.md for the fields of each message")


class Field:
    """One field of a record: its name, the text of its type, its default and its meaning."""

    __slots__ = ("default", "doc", "name", "type_text")

    def __init__(self, doc: str, default: Any) -> None:
        self.doc = doc
        self.default = default
        self.name = ""
        self.type_text = ""


def field(doc: str, *, default: Any = REQUIRED) -> Any:
    """Declare a field. A field with a default may be left out on the wire."""
    return Field(doc, default)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of all records. Subclasses only declare fields; their values are plain."""

    fields: ClassVar[tuple[Field, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _required: ClassVar[tuple[str, ...]] = ()
    _checks: ClassVar[tuple[tuple[str, Check, Any], ...] | None] = None

    def __init_subclass__(cls) -> None:
        own: list[Field] = []
        annotations = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 - inspect costs 10 ms to import
        for name, type_text in annotations.items():
            declared = cls.__dict__.get(name)
            if isinstance(declared, Field):
                declared.name = name
                declared.type_text = str(type_text)
                own.append(declared)
                delattr(cls, name)
        unread = [name for name, value in cls.__dict__.items() if isinstance(value, Field)]
        if unread:
            raise TypeError(f"{cls.__name__} declares {', '.join(unread)} without a type")
        cls.fields = (*cls.fields, *own)
        cls._defaults = {declared.name: declared.default for declared in cls.fields}
        cls._required = tuple([declared.name for declared in cls.fields if declared.default is REQUIRED])
        cls._checks = None

    def __init__(self, **values: Any) -> None:
        held = self.__dict__
        held.update(self._defaults)  # this sets the order and most values; many records are made in a second
        held.update(values)
        if len(held) > len(self._defaults):
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(held.keys() - self._defaults.keys()))}")
        for name in self._required:
            if held[name] is REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {name}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; {name} was not set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; {name} was not deleted")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.__dict__.values())))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({values})"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return type(self)(**{**self.__dict__, **changes})

    def to_plain(self) -> dict[str, object]:
        """Return a map of plain values with all fields."""
        return {name: plain_value(value) for name, value in self.__dict__.items()}

    @classmethod
    def from_plain(cls, value: object, where: str) -> Self:
        """Return the record of a map. Ignores unknown keys; raises BadValue for anything else that does not fit."""
        plain = as_map(value)
        if plain is None:
            raise BadValue(where, f"a map is needed, not {_kind_of(value)}")
        if cls._checks is None:
            module = sys.modules[cls.__module__].__dict__
            cls._checks = tuple((f.name, check_for(f.type_text, module), f.default) for f in cls.fields)
        values: dict[str, Any] = {}
        for name, check, default in cls._checks:
            if name in plain:
                values[name] = check(plain[name], f"{where}.{name}")
            elif default is REQUIRED:
                raise BadValue(f"{where}.{name}", "is missing")
        return cls(**values)


def as_map(value: object) -> dict[str, Any] | None:
    """Return the value if it is a map. Its keys are strings, because `codec` checked them."""
    return value if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType] - said above


def as_list(value: object) -> list[Any] | tuple[Any, ...] | None:
    """Return the value if it is a list."""
    return value if isinstance(value, (list, tuple)) else None  # pyright: ignore[reportUnknownVariableType] - said above


_PLAIN_TYPES = frozenset((str, int, float, bool, bytes, type(None)))


def plain_value(value: object) -> object:
    """Return a field's value as plain values."""
    if type(value) in _PLAIN_TYPES:  # most values are, and a journal writes many
        return value
    if isinstance(value, Record):
        return value.to_plain()
    items = as_list(value)
    if items is not None:
        return [plain_value(item) for item in items]
    entries = as_map(value)
    if entries is not None:
        return {key: plain_value(item) for key, item in entries.items()}
    return value


def _kind_of(value: object) -> str:
    return "nil" if value is None else f"a value of type {type(value).__name__}"


def check_for(type_text: str, scope: Mapping[str, Any]) -> Check:
    """Return the check for received values of this type. `scope` has the records that the type can name."""
    text = type_text.strip()
    if text.endswith(" | None"):
        inner = check_for(text[: -len(" | None")], scope)
        return lambda value, where: None if value is None else inner(value, where)
    if text.startswith("tuple[") and text.endswith(", ...]"):
        return _list_check(check_for(text[len("tuple[") : -len(", ...]")], scope))
    if text.startswith("Mapping[str, ") and text.endswith("]"):
        return _map_check(check_for(text[len("Mapping[str, ") : -1], scope))
    if text in _SCALARS:
        return _SCALARS[text]
    record: type[Record] = scope[text]
    return record.from_plain


def _list_check(inner: Check) -> Check:
    def check(value: object, where: str) -> object:
        items = as_list(value)
        if items is None:
            raise BadValue(where, f"a list is needed, not {_kind_of(value)}")
        return tuple([inner(item, f"{where}[{index}]") for index, item in enumerate(items)])

    return check


def _map_check(inner: Check) -> Check:
    def check(value: object, where: str) -> object:
        entries = as_map(value)
        if entries is None:
            raise BadValue(where, f"a map is needed, not {_kind_of(value)}")
        return {key: inner(item, f"{where}.{key}") for key, item in entries.items()}

    return check


def _check_int(value: object, where: str) -> int:
    if type(value) is not int:
        raise BadValue(where, f"an integer is needed, not {_kind_of(value)}")
    if not INT_MIN <= value <= INT_MAX:
        raise BadValue(where, "an integer of at most 64 bits is needed")
    return value


def _check_float(value: object, where: str) -> float:
    if type(value) is int:
        return float(value)
    if type(value) is not float:
        raise BadValue(where, f"a number is needed, not {_kind_of(value)}")
    if not -_LARGEST <= value <= _LARGEST:  # NaN fails both comparisons
        raise BadValue(where, "a finite number is needed")
    return value


def _check_int_or_str(value: object, where: str) -> int | str:
    if isinstance(value, str):
        return value
    if type(value) is not int:
        raise BadValue(where, f"an integer or a string is needed, not {_kind_of(value)}")
    return _check_int(value, where)


def _exactly(expected: type, words: str) -> Check:
    def check(value: object, where: str) -> object:
        if type(value) is not expected:
            raise BadValue(where, f"{words} is needed, not {_kind_of(value)}")
        return value

    return check


_SCALARS: dict[str, Check] = {
    "int": _check_int,
    "int | str": _check_int_or_str,
    "float": _check_float,
    "bool": _exactly(bool, "true or false"),
    "str": _exactly(str, "a string"),
    "bytes": _exactly(bytes, "a byte string"),
    "object": lambda value, where: value,
}
