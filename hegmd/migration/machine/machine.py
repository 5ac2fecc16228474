"""The machine that moves jobs: `handle(operation, event, now)` returns the next operation and the effects to perform.

Owns TABLE, which says for every phase and event whether the event changes the operation, is ignored for a reason, or is
refused without changing anything. Owns the actions behind the changes. Pure: time is an argument, and
hegmd/migration/run/runner.py performs the effects. The table in stages.py, not this module, derives from the facts what
is wanted next; an action only records what an event says and, where needed, rolls the operation back.

A runner must follow these rules:
- a new operation is `Plan.operation(...)` of hegmd/migration/model.py, and takes `begin`; after a restart of the daemon
  every unfinished one takes `recovered`;
- for each event: `handle`, journal the event with the resulting operation, fsync, and only then perform the effects;
  if it returns the very same object, the event was ignored and needs no record;
- each effect ends with one event that carries its number and worker; an effect that cannot end is harmless,
  since the deadline makes the machine inspect the worker; a second result is ignored;
- at `operation.deadline` (monotonic, the clock that `now` is from) feed `deadline-passed`; early or late is fine;
- an effect that is already done succeeds: every effect may come twice;
- effects for one worker begin in the order of their numbers, including its reservations and its pool memory;
- orders use the newest connection that the machine knows (from `begin`, `agent-back`, or the one that answered
  `inspect`); if it has ended, they fail as disconnected, so that nothing is done on old news;
- `inspect` uses any connection; `busy` is true while an order to copy bytes is still running.

| effect | arguments | ends with (or failed) | for a worker with the worker carrier |
|---|---|---|---|
| reserve | gpu, size_bytes | reserved | size_bytes in total are reserved there; refused: not free |
| release-reservation | gpu | reservation-released | nothing is reserved there for the worker |
| reserve-pool | size_bytes | pool-reserved | its memory is allocated, or enlarged; refused: over budget |
| release-pool | | pool-released | its memory is closed |
| await-successor | | successor-awaited(ready) | restart only: it trains until the successor is ready |
| survey | | surveyed(boundary, size_bytes) | order survey |
| park | at, limit_s | parked(boundary), overran(boundary) | order park; replaces an earlier one; failed: withdrawn |
| withdraw | | withdrawn | order withdraw, or release if it is parked already |
| offload | | offloaded(size_bytes) | order offload with the memory |
| disconnect | limit_s | disconnected | order disconnect; for ranks with communicators, as the next two |
| lock | | locked, grew(driver_bytes) | nothing to do |
| unlock | | unlocked | nothing to do |
| checkpoint | | checkpointed, grew(driver_bytes) | nothing to do; the reservation there stays |
| hold | | held | only time passes |
| dump | find | dumped | the image is written, verified and named; if the job trains on, only its processes |
| seal | | sealed | the image of a job that trained on is written from the pool, verified and named |
| scrap | | scrapped | nothing is left of it |
| end | | ended | the process is ended |
| restore | gpu | restored | the reservation becomes the worker's own; of a restart also: training-ended |
| reload | | reloaded | order reload with the memory |
| reconnect | generation, limit_s | reconnected | order reconnect |
| release | | released | order release was sent |
| verify | beyond | verified(boundary) | that order's report, or a survey that counts more than `beyond` |
| inspect | | inspected(...), or worker-exited | survey if connected; the true reservations and pool memory |

Events from elsewhere: begin, cancel-requested(by), drop-requested(by), resume-requested(to), taken-up(into),
image-requested(handoff, limit_s), worker-exited(worker, why, finished), training-ended(worker), came-on(worker, doing),
agent-lost(worker), agent-back(worker, token), deadline-passed, recovered. `failed` has a fault: refused, disconnected
(the connection ended, so its outcome is unknown) or broken.

Cancelling: until the workers have left their GPUs (`is_quicker_to_finish`), a cancel rolls it back. After that it is
refused, because finishing takes less time, and the refusal says so. A resume that fails or is cancelled ends in
`suspended` again. If the operation can neither finish nor roll back, the job is held: it is suspended with its bytes in
the pool, and can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hegmd.errors import Refused
from hegmd.migration.machine import actions, communicators, results
from hegmd.migration.machine.effects import Effect, Seal
from hegmd.migration.machine.events import Ending, Event
from hegmd.migration.machine.next_effects import PLANNED, SUSPENDED, TERMINAL, advance
from hegmd.migration.machine.operation import Operation
from hegmd.migration.machine.stages import STAGES
from hegmd.migration.machine.wording import otherwise

__all__ = ["EVENTS", "PHASES", "TABLE", "TERMINAL", "Event", "Operation", "Result", "Row", "handle"]

ACTIVE = tuple(stage.phase for stage in STAGES)
PHASES = (PLANNED, *ACTIVE, SUSPENDED, *TERMINAL)
HOLDING, READYING = "holding", "readying"
EVENTS = tuple(sorted(Event.register))

MOVE, IGNORE, REFUSE = "move", "ignore", "refuse"
Result = tuple[Operation, tuple[Effect, ...]]


class Row(NamedTuple):
    """The verdict on an event in a phase. `why` is shown to the user if the event changes nothing.

    In `hint`, {id} is replaced by the operation's id, and {otherwise} by what can be done with a suspended operation.
    """

    verdict: str
    why: str
    action: Callable[..., Operation] | None = None
    hint: str = ""


def handle(op: Operation, event: Event, now: float) -> Result:
    """Return the operation after the event, and the effects to perform once that is on disk.

    Returns the same object, and no effects, for an event that is ignored. Raises Refused, with a message for the user,
    if the event cannot be granted; then nothing has changed.
    """
    row = TABLE[op.phase, event.tag]
    if row.verdict == REFUSE:
        hint = row.hint.format(id=op.id, otherwise=otherwise(op))
        raise Refused(f"operation {op.id} is {op.phase}: {row.why}", hint)
    if row.action is None:
        return op, ()
    changed = _ended(op, event, row.action) if isinstance(event, Ending) else row.action(op, event, now)
    if changed is None or changed is op:
        return op, ()
    return advance(changed.replace(seq=op.seq + 1), now)


def _ended(op: Operation, event: Ending, action: Callable[..., Operation]) -> Operation | None:
    """Return the operation after the end of an effect; None if no such effect is running for that worker."""
    pending = op.pending_numbered(event.effect)
    worker = op.worker(event.worker)
    if pending is None or worker is None or pending.worker != event.worker:
        return None
    if event.tag not in Effect.register[pending.effect].ends:
        return None
    left = op.replace(pending=tuple([other for other in op.pending if other is not pending]))
    changed: Operation = action(left, worker, pending, event)
    return changed


# ---- the table -------------------------------------------------------------------------------------------------------

_HAS_ENDED = Row(IGNORE, "the effect that it ends has ended, or was dropped")
_OVER = Row(IGNORE, "the operation is over")
_WATCH = "watch it with: hegmctl op {id}"


def _rows() -> dict[tuple[str, str], Row]:
    table: dict[tuple[str, str], Row] = {}

    def put(event: str, phases: Iterable[str], row: Row) -> None:
        for phase in phases:
            if (phase, event) in table:
                raise ValueError(f"two rows for {event} in {phase}")
            table[phase, event] = row

    _put_requests(put)
    _put_happenings(put)
    _put_endings(put)
    return table


Put = Callable[[str, Iterable[str], Row], None]


def _put_requests(put: Put) -> None:
    put("begin", [PLANNED], Row(MOVE, "it starts", actions.begin))
    put("begin", [*ACTIVE, SUSPENDED, *TERMINAL], Row(REFUSE, "it has already started", hint=_WATCH))

    settled = ("leaving", "ending", "verifying", "tidying")
    open_phases = [phase for phase in (PLANNED, *ACTIVE) if phase not in (*settled, "sealing")]
    put("cancel-requested", ["sealing"], Row(MOVE, "the image is no longer needed", actions.drop_image))
    put(
        "cancel-requested",
        open_phases,
        Row(MOVE, "it rolls back, unless it is past the point of no return or already rolling back", actions.cancel),
    )
    put(
        "cancel-requested",
        settled,
        Row(REFUSE, "it has already done what was requested", hint=_WATCH + "; it ends by itself"),
    )
    put(
        "cancel-requested",
        [SUSPENDED],
        Row(REFUSE, "the operation is not running, so there is nothing to cancel", hint="{otherwise}"),
    )
    put("cancel-requested", TERMINAL, Row(REFUSE, "it has ended", hint="run: hegmctl ops"))

    put("drop-requested", [SUSPENDED], Row(MOVE, "the state is dropped", actions.drop_state))
    put("drop-requested", [PLANNED, *ACTIVE], Row(REFUSE, "only a suspended operation keeps a state", hint=_WATCH))
    put("drop-requested", TERMINAL, Row(REFUSE, "it has ended and keeps no state", hint="run: hegmctl ops"))

    put("resume-requested", [SUSPENDED], Row(MOVE, "it moves to the named GPUs", actions.resume))
    put("resume-requested", [HOLDING], Row(MOVE, "it resumes early", actions.resume_early))
    others = [phase for phase in (PLANNED, *ACTIVE) if phase != HOLDING]
    put("resume-requested", others, Row(REFUSE, "only a suspended operation can be resumed", hint=_WATCH))
    put("resume-requested", TERMINAL, Row(REFUSE, "it has ended", hint="run: hegmctl ps"))

    put("taken-up", [HOLDING], Row(MOVE, "it becomes the requested operation while its job is parked", actions.take_up))
    put(
        "taken-up",
        [*others, SUSPENDED],
        Row(REFUSE, "only an operation that keeps its job parked can change its kind", hint=_WATCH),
    )
    put("taken-up", TERMINAL, Row(REFUSE, "it has ended", hint="try again"))

    put(
        "image-requested", [SUSPENDED], Row(MOVE, "its image is written, and then its processes end", actions.hand_over)
    )
    put(
        "image-requested",
        [PLANNED, *ACTIVE],
        Row(REFUSE, "only a suspended operation can be written to an image", hint=_WATCH),
    )
    put("image-requested", TERMINAL, Row(REFUSE, "it has ended", hint="run: hegmctl ops"))


def _put_happenings(put: Put) -> None:
    put("worker-exited", [PLANNED, *ACTIVE, SUSPENDED], Row(MOVE, "without it", actions.worker_exited))
    put("training-ended", [*ACTIVE, SUSPENDED], Row(MOVE, "its state is no longer needed", actions.training_ended))
    put("training-ended", [PLANNED], Row(IGNORE, "no process has continued from a state yet"))
    put("came-on", ACTIVE, Row(MOVE, "it is reported", actions.record_progress))
    put("came-on", [PLANNED, SUSPENDED], Row(IGNORE, "no process is started here"))
    put("agent-lost", ACTIVE, Row(MOVE, "it waits for the agent", actions.agent_lost))
    put("agent-lost", [PLANNED], Row(IGNORE, "the agent has no order yet"))
    put("agent-lost", [SUSPENDED], Row(IGNORE, "the agent has no order; it is inspected when it reconnects"))
    put("agent-back", [*ACTIVE, SUSPENDED], Row(MOVE, "it is inspected", actions.agent_back))
    put("agent-back", [PLANNED], Row(IGNORE, "the agent has no order yet"))
    put(
        "deadline-passed",
        ACTIVE,
        Row(MOVE, "it rolls back if that is possible, otherwise it retries", actions.deadline_passed),
    )
    put("deadline-passed", [PLANNED, SUSPENDED], Row(IGNORE, "it has no deadline here: an alarm from an earlier phase"))
    put(
        "recovered", [PLANNED], Row(MOVE, "it had not started, and does not start without a request", actions.recovered)
    )
    put("recovered", [*ACTIVE, SUSPENDED], Row(MOVE, "all are inspected", actions.recovered))
    for event in (
        "worker-exited",
        "training-ended",
        "came-on",
        "agent-lost",
        "agent-back",
        "deadline-passed",
        "recovered",
    ):
        put(event, TERMINAL, _OVER)


# The action that records each result. Effect.ends says which results an effect can have.
_WRITES: dict[str, Callable[..., Operation]] = {
    "reserved": results.reserved,
    "reservation-released": results.reservation_released,
    "pool-reserved": results.pool_reserved,
    "pool-released": results.pool_released,
    "successor-awaited": results.successor_awaited,
    "surveyed": results.surveyed,
    "parked": results.parked,
    "overran": results.overran,
    "withdrawn": results.withdrawn,
    "offloaded": results.offloaded,
    "disconnected": communicators.disconnected,
    "locked": communicators.locked,
    "unlocked": communicators.unlocked,
    "checkpointed": results.checkpointed,
    "held": results.held,
    "dumped": results.dumped,
    "sealed": results.sealed,
    "scrapped": results.scrapped,
    "ended": results.ended,
    "grew": results.outgrown,
    "restored": results.restored,
    "reloaded": results.reloaded,
    "reconnected": communicators.reconnected,
    "released": results.released,
    "verified": results.verified,
    "inspected": results.inspected,
    "failed": results.failed,
}


def _put_endings(put: Put) -> None:
    for event, action in _WRITES.items():
        phases = _phases_of(event)
        put(event, phases, Row(MOVE, "it is recorded; the facts decide the next step", action))
        put(event, [phase for phase in (PLANNED, *ACTIVE, SUSPENDED) if phase not in phases], _HAS_ENDED)
        put(event, TERMINAL, _OVER)


def _phases_of(event: str) -> tuple[str, ...]:
    """The phases in which an effect that this event ends can be under way."""
    ended = {tag for tag, effect in Effect.register.items() if event in effect.ends}
    if Seal.tag in ended:  # sealing an image does not affect any other effect
        return ACTIVE
    return tuple(stage.phase for stage in STAGES if stage.phase == "settling" or ended & set(stage.asks))


TABLE: dict[tuple[str, str], Row] = _rows()
