"""The caller of an operation, its limits, and how it is answered or refused.

Defines the values that clients' requests pass to `operations`, `sequences` and `image_requests`, and turns invalid
limits and refusals into errors. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hegmd.errors import BAD_REQUEST, Bug, HegmError, code_named
from hegmd.migration.machine.operation import Limits, Respawn
from hegmd.migration.model import MigrationPlan
from hegmd.operations.survey import May
from hegmd.protocol import operations as protocol
from hegmd.protocol.operations import Reason

Emit = Callable[[protocol.OperationProgress], Awaitable[None]]

MAX_LIMIT_S = 1_000_000.0


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The circumstances of a request: its caller, whether it is a dry run, and whether the caller waits."""

    by: str
    may: May
    emit: Emit
    wait: bool = True
    dry_run: bool = False
    limit_s: float | None = None
    carrier: str | None = None
    lent: bool = False  # of a suspend: whether the job itself asks, for a hegm.released() block


@dataclass(frozen=True, slots=True)
class Restarting:
    """The permission to migrate by restart, and the differences of the new process."""

    via: str | None = None
    allowed: bool = False
    set: Mapping[str, str] = field(default_factory=dict[str, str])
    unset: tuple[str, ...] = ()
    python: str | None = None

    @property
    def respawn(self) -> Respawn:
        return Respawn(set=self.set, unset=self.unset, python=self.python)


NO_RESTART = Restarting()


class OperationResult(NamedTuple):
    """An operation's public record, and its plan."""

    operation: protocol.Operation | None
    plan: protocol.Plan | None


def limits_of(limit_s: float | None, hold_s: float | None = None) -> Limits:
    """Return the limits of an operation, with the daemon's own for those not given. Raises HegmError."""
    limits = Limits()
    for asked_s, what in ((limit_s, "the wait for a boundary"), (hold_s, "the time parked there")):
        if asked_s is not None:
            _require_limit(asked_s, what)
    return limits.replace(park_s=limit_s or limits.park_s, hold_s=hold_s or limits.hold_s)


def limit_of(context: RequestContext) -> float | None:
    """Return the total limit of a request; None without one. Raises HegmError."""
    if context.limit_s is not None:
        _require_limit(context.limit_s, "it")
    return context.limit_s


def _require_limit(limit_s: float, what: str) -> None:
    if not 0 < limit_s <= MAX_LIMIT_S:  # NaN fails both comparisons
        hint = f"give more than 0 and at most {MAX_LIMIT_S:,.0f} seconds"
        raise HegmError(BAD_REQUEST, f"{limit_s:g} s is not a valid limit for {what}", hint)


def plan_or_raise(result: MigrationPlan | tuple[Reason, ...]) -> MigrationPlan:
    """Return the plan, or raise an error with every reason."""
    if isinstance(result, MigrationPlan):
        return result
    raise refusal(result)


def refusal(reasons: Sequence[Reason]) -> HegmError:
    """Return an error with every reason: the first one's code, all messages, all hints."""
    if not reasons:
        raise Bug("a plan was refused without a reason")
    messages = "\n".join(dict.fromkeys(reason.message for reason in reasons))
    hints = "; ".join(dict.fromkeys(reason.hint for reason in reasons))
    facts = {"reasons": [reason.to_plain() for reason in reasons]}
    return HegmError(code_named(reasons[0].code), messages, hints, facts)


def plan_record(plan: MigrationPlan) -> protocol.Plan:
    return protocol.Plan.from_plain(plan.to_plain(), "plan")
