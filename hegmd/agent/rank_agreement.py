"""How the ranks of a job agree on a step before they take it: each states something, and all read all statements.

Uses the store in which the job's ranks met (`torch.distributed`), with keys of its own. The number of keys is bounded,
and a key of an earlier agreement cannot end a later one: every statement has a number drawn for it, and each rank
confirms the exact set of statements that it read. The agreement is reached once all have confirmed the same set. Every
wait ends at a deadline. Does not interpret statements.
"""

from __future__ import annotations

import os
import socket
from time import monotonic, sleep

from ..errors import REFUSED, HegmError
from ..protocol.codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    #: The statement of one rank.
    Statement = dict[str, Any]

_HINT = "nothing was changed; check that every rank is running and has an agent: hegmctl ps"
_HINT_STORE = (
    "check that the launcher runs, which serves the store; if it has ended, the ranks cannot meet again: end them, and "
    "start the job again or restore its image"
)
# Digits of the number that each statement begins with.
_DRAWN = 16
_FIRST_POLL_S, _MAX_POLL_S = 0.001, 0.01
# How long the store's server may take to accept a connection.
_SERVER_LIMIT_S = 5.0


def require_server(store: Any) -> None:
    """Raise OSError if the store's server has ended: a second connection would be tried for the store's timeout."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        socket.create_connection((store.host, store.port), _SERVER_LIMIT_S).close()


class DisagreementError(HegmError):
    """The ranks did not agree in time. `is_known` is False when another rank may believe that they did."""

    def __init__(self, message: str, hint: str, *, is_known: bool) -> None:
        super().__init__(REFUSED, f"process {os.getpid()}: {message}", hint)
        self.is_known = is_known


class Agreement:
    """The statements of all ranks, by rank, and a label that no other agreement of this job has."""

    __slots__ = ("label", "statements")

    def __init__(self, statements: list[Statement], label: str) -> None:
        self.statements = statements
        self.label = label


class Ranks:
    """The ranks of a job, as one of them sees the others through their store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self._size = size

    def exchange(self, name: str, statement: Statement) -> list[Statement] | None:
        """Publish the statement, and return the newest one of each rank under that name; None while one is missing."""
        self._store.set(f"{name}/{self.rank}", encode(statement).hex())
        statements = self._read(name)
        return None if statements is None else [decode(bytes.fromhex(one)) for one in statements]

    def agree(self, step: str, statement: Statement, deadline: float, is_over: Callable[[], bool]) -> Agreement:
        """Publish the statement, and wait until all ranks have read what all have stated for that step.

        Raises DisagreementError at the deadline, once `is_over`, and if the store cannot be reached.
        """
        states = ""
        try:
            self._store.set(f"{step}/stated/{self.rank}", os.urandom(_DRAWN // 2).hex() + encode(statement).hex())
            poll_s = _FIRST_POLL_S
            while True:
                statements = self._read(f"{step}/stated")
                if statements is not None:
                    confirmed = ":".join(one[:_DRAWN] for one in statements)
                    if confirmed != states:
                        self._store.set(f"{step}/confirmed/{self.rank}", confirmed)
                        states = confirmed
                    if self._read(f"{step}/confirmed") == [confirmed] * self._size:
                        return Agreement(
                            [decode(bytes.fromhex(one[_DRAWN:])) for one in statements], _label(statements)
                        )
                if monotonic() >= deadline or is_over():
                    raise DisagreementError(self._late(step, states), _HINT, is_known=not states)
                sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except DisagreementError:
            raise
        except Exception as error:
            message = f"rank {self.rank} cannot reach the store of its job: {error}"
            raise DisagreementError(message, _HINT_STORE, is_known=not states) from error

    def _read(self, name: str) -> list[str] | None:
        """Return what is stored under that name, by rank; None while one is missing. Does not wait for ranks."""
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        return [bytes(value).decode() for value in self._store.multi_get(keys)]

    def _late(self, step: str, states: str) -> str:
        """Return the names of missing ranks."""
        missing: list[str] = []
        for rank in range(self._size):
            key = f"{step}/confirmed/{rank}" if states else f"{step}/stated/{rank}"
            if not self._store.check([key]) or (states and bytes(self._store.get(key)).decode() != states):
                missing.append(str(rank))
        who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks ({', '.join(missing[:8])})"
        return f"{who} of {self._size} did not respond in time ({step})"


def _label(statements: list[str]) -> str:
    """Combine the drawn numbers of all ranks: a new label each time, since each rank draws."""
    label = 0
    for one in statements:
        label ^= int(one[:_DRAWN], 16)
    return f"{label:0{_DRAWN}x}"
