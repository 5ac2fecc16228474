"""The machine that moves jobs: `handle(operation, event, now)` gives the operation that follows and what is to be done.

Owns TABLE, which says of every phase and event whether it is a move, ignored for a reason, or refused without changing
anything, and the actions behind the moves. Pure: time comes as an argument, and whoever performs the effects is
hegmd/migration/run/runner.py. What is wanted next is not decided here, event by event, but by the table of stages.py
from the facts; an action only writes down what an event says and, where it has to, turns the operation round.

What a runner has to keep to:
- a new operation is `Plan.operation(...)` of hegmd/migration/model.py, and takes `begin`; after a restart every one
  that is not over takes `recovered`;
- for each event: `handle`, journal the event with the operation that follows, fsync, and only then perform the effects;
  if it gives back the very same object, the event was ignored and needs no record;
- each effect ends with one event that carries its number and worker; one that cannot be ended any more is harmless,
  since the deadline makes the machine look for itself; a second ending is ignored;
- at `operation.deadline` (monotonic, the clock that `now` is from) feed `deadline-passed`; early or late is fine;
- an effect that is done already is done: every one may come twice;
- what is wanted of one worker begins in the order of the numbers, the room and the pool of that worker included;
- orders go over the connection that the machine has heard of last (at `begin`, by `agent-back`, or the one by which
  `inspect` was answered); where that one has ended, they fail as disconnected, so that nothing is done on old news;
- `inspect` goes over whatever connection there is; `busy` is true while an order to carry bytes is still under way.

| effect | arguments | ends with (or failed) | for a worker with the worker carrier |
|---|---|---|---|
| reserve | gpu, size_bytes | reserved | size_bytes in all are reserved there; refused: not free |
| release-reservation | gpu | reservation-released | nothing is reserved there for the worker |
| reserve-pool | size_bytes | pool-reserved | its memory is made, or made larger; refused: over budget |
| release-pool | | pool-released | its memory is closed |
| await-successor | | successor-awaited(ready) | restart only: it trains until the successor is ready |
| survey | | surveyed(boundary, size_bytes) | order survey |
| park | at, limit_s | parked(boundary), overran(boundary) | order park; instead of an earlier one; failed: withdrawn |
| withdraw | | withdrawn | order withdraw, or release if it stands already |
| offload | | offloaded(size_bytes) | order offload with the memory |
| disconnect | limit_s | disconnected | order disconnect; for ranks with communicators, as the next two |
| lock | | locked, grew(driver_bytes) | nothing to do |
| unlock | | unlocked | nothing to do |
| checkpoint | | checkpointed, grew(driver_bytes) | nothing to do; the room there stays held |
| hold | | held | nothing but time passes |
| dump | find | dumped | the image is written, read back and named; of a job that goes on its processes, no more |
| seal | | sealed | the image of a job that has gone on is written from the pool, read back and named |
| scrap | | scrapped | nothing is left of it |
| end | | ended | the process is ended |
| restore | gpu | restored | the room there becomes the worker's own; of a restart also: training-ended |
| reload | | reloaded | order reload with the memory |
| reconnect | generation, limit_s | reconnected | order reconnect |
| release | | released | order release was sent |
| verify | beyond | verified(boundary) | that order's report, or a survey that counts more than `beyond` |
| inspect | | inspected(...), or worker-exited | attended? survey; and what room and pool are really held |

Events from elsewhere: begin, cancel-requested(by), drop-requested(by), resume-requested(to), taken-up(into),
image-requested(handoff, limit_s), worker-exited(worker, why, finished), training-ended(worker), came-on(worker, doing),
agent-lost(worker), agent-back(worker, token), deadline-passed, recovered. `failed` has a
fault: refused, disconnected (the connection ended, so whether it was done is not known) or broken.

Cancelling: until the workers have left their GPUs (`is_past_return`), the job is brought back to how it was; from there
on it is refused, because going on is the shorter way, and the operation says so. A resume that fails or is cancelled
ends in `suspended` again. When neither way is open the job is held: it stands, its bytes in the pool, and resume works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hegmd.errors import Refused
from hegmd.migration.machine import actions, communicators, results
from hegmd.migration.machine.effects import Effect, Seal
from hegmd.migration.machine.events import Ending, Event
from hegmd.migration.machine.next_effects import PLANNED, SUSPENDED, TERMINAL, advance
from hegmd.migration.machine.operation import Operation
from hegmd.migration.machine.stages import STAGES
from hegmd.migration.machine.wording import otherwise

__all__ = ["EVENTS", "PHASES", "TABLE", "TERMINAL", "Event", "Operation", "Result", "Row", "handle", "row_for"]

ACTIVE = tuple(stage.phase for stage in STAGES)
PHASES = (PLANNED, *ACTIVE, SUSPENDED, *TERMINAL)
HOLDING, READYING = "holding", "readying"
EVENTS = tuple(sorted(Event.register))

MOVE, IGNORE, REFUSE = "move", "ignore", "refuse"
Result = tuple[Operation, tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of an event in a phase. `why` is what a person is told where nothing becomes of it.

    In `hint`, {id} stands for the operation and {otherwise} for what can be done with it once it is suspended.
    """

    verdict: str
    why: str
    action: Callable[..., Operation] | None = None
    hint: str = ""


def handle(op: Operation, event: Event, now: float) -> Result:
    """The operation after the event, and the effects to perform once that is on disk.

    Gives back the same object, and no effects, for an event that is ignored. Raises Refused, which a person reads, for
    one that cannot be granted; nothing has changed then.
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
    """The operation after the end of an effect; None for one that is not under way, or for another worker."""
    pending = op.pending_numbered(event.effect)
    worker = op.worker(event.worker)
    if pending is None or worker is None or pending.worker != event.worker:
        return None
    if event.tag not in Effect.register[pending.effect].ends:
        return None
    left = op.replace(pending=tuple([other for other in op.pending if other is not pending]))
    changed: Operation = action(left, worker, pending, event)
    return changed


def row_for(op: Operation, event: Event) -> Row:
    """What the table says of that event now."""
    return TABLE[op.phase, event.tag]


# ---- the table -------------------------------------------------------------------------------------------------------

_HAS_ENDED = Row(IGNORE, "the effect that it ends has ended, or was given up")
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
    put("begin", [PLANNED], Row(MOVE, "it begins", actions.begin))
    put("begin", [*ACTIVE, SUSPENDED, *TERMINAL], Row(REFUSE, "it has begun already", hint=_WATCH))

    settled = ("leaving", "ending", "verifying", "tidying")
    open_phases = [phase for phase in (PLANNED, *ACTIVE) if phase not in (*settled, "sealing")]
    put("cancel-requested", ["sealing"], Row(MOVE, "the image is not wanted any more", actions.drop_image))
    put("cancel-requested", open_phases, Row(MOVE, "back, unless past return or on its way back", actions.cancel))
    put("cancel-requested", settled, Row(REFUSE, "what it was for has been done", hint=_WATCH + "; it ends by itself"))
    put("cancel-requested", [SUSPENDED], Row(REFUSE, "there is nothing under way to cancel", hint="{otherwise}"))
    put("cancel-requested", TERMINAL, Row(REFUSE, "it is over", hint="see the others with: hegmctl ops"))

    put("drop-requested", [SUSPENDED], Row(MOVE, "the state that is held is given up", actions.drop_state))
    put("drop-requested", [PLANNED, *ACTIVE], Row(REFUSE, "only a state that is held can be given up", hint=_WATCH))
    put(
        "drop-requested",
        TERMINAL,
        Row(REFUSE, "it is over, and holds no state", hint="see the others with: hegmctl ops"),
    )

    put("resume-requested", [SUSPENDED], Row(MOVE, "it heads for the GPUs named", actions.resume))
    put("resume-requested", [HOLDING], Row(MOVE, "it goes on before its time", actions.let_go))
    others = [phase for phase in (PLANNED, *ACTIVE) if phase != HOLDING]
    put("resume-requested", others, Row(REFUSE, "only a suspended one can be resumed", hint=_WATCH))
    put("resume-requested", TERMINAL, Row(REFUSE, "it is over", hint="see what runs with: hegmctl ps"))

    put("taken-up", [HOLDING], Row(MOVE, "it becomes what is wanted, its job standing", actions.take_up))
    put("taken-up", [*others, SUSPENDED], Row(REFUSE, "only one that holds its job is taken up", hint=_WATCH))
    put("taken-up", TERMINAL, Row(REFUSE, "it is over", hint="ask again"))

    put(
        "image-requested",
        [SUSPENDED],
        Row(MOVE, "it is to have an image, and its processes are to end", actions.hand_over),
    )
    put("image-requested", [PLANNED, *ACTIVE], Row(REFUSE, "only a suspended one can be handed over", hint=_WATCH))
    put("image-requested", TERMINAL, Row(REFUSE, "it is over", hint="see the others with: hegmctl ops"))


def _put_happenings(put: Put) -> None:
    put("worker-exited", [PLANNED, *ACTIVE, SUSPENDED], Row(MOVE, "without it", actions.worker_exited))
    put("training-ended", [*ACTIVE, SUSPENDED], Row(MOVE, "its state is of no more use", actions.training_ended))
    put("training-ended", [PLANNED], Row(IGNORE, "nobody has gone on from a state yet"))
    put("came-on", ACTIVE, Row(MOVE, "it is told of", actions.came_on))
    put("came-on", [PLANNED, SUSPENDED], Row(IGNORE, "nobody is started here"))
    put("agent-lost", ACTIVE, Row(MOVE, "it waits for the agent", actions.agent_lost))
    put("agent-lost", [PLANNED], Row(IGNORE, "nothing was asked of the agent yet"))
    put("agent-lost", [SUSPENDED], Row(IGNORE, "nothing is asked of the agent; when it is back, it is looked at"))
    put("agent-back", [*ACTIVE, SUSPENDED], Row(MOVE, "it is asked how it stands", actions.agent_back))
    put("agent-back", [PLANNED], Row(IGNORE, "nothing was asked of the agent yet"))
    put("deadline-passed", ACTIVE, Row(MOVE, "back where that is open, else another attempt", actions.deadline_passed))
    put("deadline-passed", [PLANNED, SUSPENDED], Row(IGNORE, "it has no deadline here: an alarm from an earlier phase"))
    put("recovered", [PLANNED], Row(MOVE, "it had not begun, and does not begin by itself", actions.recovered))
    put("recovered", [*ACTIVE, SUSPENDED], Row(MOVE, "all are asked how they stand", actions.recovered))
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


# What each ending event writes down, and the effects that it can end are those whose `ends` name it.
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
        put(event, phases, Row(MOVE, "written down; the facts decide what comes next", action))
        put(event, [phase for phase in (PLANNED, *ACTIVE, SUSPENDED) if phase not in phases], _HAS_ENDED)
        put(event, TERMINAL, _OVER)


def _phases_of(event: str) -> tuple[str, ...]:
    """The phases in which an effect that this event ends can be under way."""
    ended = {tag for tag, effect in Effect.register.items() if event in effect.ends}
    if Seal.tag in ended:  # whatever is done meanwhile, it is in nobody's way
        return ACTIVE
    return tuple(stage.phase for stage in STAGES if stage.phase == "settling" or ended & set(stage.asks))


TABLE: dict[tuple[str, str], Row] = _rows()
