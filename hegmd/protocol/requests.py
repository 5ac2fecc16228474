"""The base class of requests: a record with a wire tag, the record of its reply, and the record of its events.

REQUESTS maps each tag to its request class. `messages` and the modules that it imports define the requests.
"""

from __future__ import annotations

from .record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar


class Request(Record):
    """Base of all requests."""

    op: ClassVar[str] = ""
    reply: ClassVar[type[Record]]
    event: ClassVar[type[Record] | None] = None
    changes_state: ClassVar[bool] = False
    capability: ClassVar[str | None] = None

    def __init_subclass__(  # the class keywords describe the message; `Record` reads the fields
        cls,
        *,
        op: str,
        reply: type[Record],
        event: type[Record] | None = None,
        changes_state: bool = False,
        capability: str | None = None,
    ) -> None:
        super().__init_subclass__()
        cls.op = op
        cls.reply = reply
        cls.event = event
        cls.changes_state = changes_state
        cls.capability = capability
        REQUESTS[op] = cls

    def audited(self) -> dict[str, object]:
        """Return the fields that the audit record keeps: all except possible secrets."""
        return self.to_plain()


REQUESTS: dict[str, type[Request]] = {}
