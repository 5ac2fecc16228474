"""Records that are stored with the name of their class: events and effects.

Owns the tag in the plain form, and gives names no meaning. Each family has its own register. An unknown name is
refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hegmd.errors import BAD_REQUEST, HegmError
from hegmd.protocol.record import Record, as_map

TAG = "is"


class Tagged(Record):
    """Base of a family. Its first subclass creates the register, which lists each subclass with a tag."""

    tag: ClassVar[str] = ""
    register: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, *, tag: str = "") -> None:
        super().__init_subclass__()
        if not hasattr(cls, "register"):
            cls.register = {}
        if tag:
            cls.tag = tag
            cls.register[tag] = cls

    def to_plain(self) -> dict[str, object]:
        """Return the record as plain values, with its name."""
        return {TAG: self.tag, **super().to_plain()}

    @classmethod
    def untagged(cls, value: object, where: str) -> Any:
        """Return the record of this family that the plain value names. Raises HegmError for an unknown name."""
        plain = as_map(value) or {}
        member = cls.register.get(str(plain.get(TAG)))
        if member is None:
            raise HegmError(
                BAD_REQUEST,
                f"{where}: unknown {cls.__name__.lower()} {plain.get(TAG)!r}",
                "start the version of hegmd that wrote it",
            )
        return member.from_plain(plain, where)
