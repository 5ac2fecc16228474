"""What a request is: a record with a wire tag, the record that answers it, and the record that may come in between.

Owns REQUESTS, the register in which every request is by its tag. The requests themselves are in `messages` and in the
modules that it gathers.
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

    def __init_subclass__(  # the class keywords are what a message is; `Record` only reads the fields
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
        """What an audit record keeps of it: everything that is said, but for what may be a secret."""
        return self.to_plain()


REQUESTS: dict[str, type[Request]] = {}
