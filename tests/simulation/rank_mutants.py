"""Bugs in what is done to ranks with communicators, put in on purpose: the lives of ranks have to find each of them."""

from __future__ import annotations

from hegmd.migration.machine import effects, events, machine
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import BACK, JobProcess, Operation
from tests.simulation.daemon import Parts
from tests.simulation.hands import Running
from tests.simulation.mutants import Mutant
from tests.simulation.node import Process
from tests.simulation.ranks import RankNodeActions

Result = tuple[Operation, tuple[Effect, ...]]


def _passed_over(op: Operation, event: Event, now: float, kind: type[Effect], **done: object) -> Result:
    """The machine, which takes the last rank's effect of that kind for done without asking for it."""
    after, wanted = machine.handle(op, event, now)
    for effect in wanted:
        if isinstance(effect, kind) and effect.worker == after.workers[-1].name:
            left = tuple([pending for pending in after.pending if pending.number != effect.number])
            after = after.with_worker(after.workers[-1].replace(**done)).replace(pending=left)
            return after, tuple([other for other in wanted if other is not effect])
    return after, wanted


def leaves_one_rank_unlocked(op: Operation, event: Event, now: float) -> Result:
    return _passed_over(op, event, now, effects.LockRank, is_locked=True)


def forgets_the_groups_of_one_rank(op: Operation, event: Event, now: float) -> Result:
    return _passed_over(op, event, now, effects.Disconnect, is_connected=False)


def connects_all_but_one_again(op: Operation, event: Event, now: float) -> Result:
    """Rolls back, or ends, one rank only."""
    return _passed_over(op, event, now, effects.Reconnect, is_connected=True)


def connects_before_it_unlocks(op: Operation, event: Event, now: float) -> Result:
    return _passed_over(op, event, now, effects.UnlockRank, is_locked=False)


def locks_each_rank_in_its_turn(op: Operation, event: Event, now: float) -> Result:
    """Checkpoints each rank once that rank is locked, before the others are."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Locked) and after is not op:
        wanted = (*wanted, effects.Checkpoint(number=10_000 + after.seq, worker=event.worker, cause=0))
    return after, wanted


def forgets_communicators(op: Operation, event: Event, now: float) -> Result:
    bare: list[JobProcess] = [worker.replace(communicators="") for worker in op.workers]
    blind = op.replace(workers=tuple(bare))
    after, wanted = machine.handle(blind, event, now)
    return (op, ()) if after is blind else (after, wanted)


def believes_in_what_was_cut_off(op: Operation, event: Event, now: float) -> Result:
    """After a start, communicators are mistaken for what the journal last had certain."""
    if isinstance(event, events.Recovered):
        workers = [worker.replace(is_connected=worker.is_connected is not False) for worker in op.workers]
        op = op.replace(workers=tuple(workers))
    return machine.handle(op, event, now)


def lets_go_one_by_one(op: Operation, event: Event, now: float) -> Result:
    """A rank is released as soon as its own communicators are up."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Reconnected) and after is not op:
        wanted = (*wanted, effects.Release(number=10_000 + after.seq, worker=event.worker, cause=0))
    return after, wanted


class LeavesOneGroupConnected(RankNodeActions):
    """An agent disconnects all groups of its rank but one."""

    def do(self, running: Running, process: Process) -> Event | None:
        done = super().do(running, process)
        if isinstance(done, events.Disconnected):
            process.live_groups = process.groups - 1
        return done


class RollsBackOneRankOnly(RankNodeActions):
    """In a rollback the first rank connects without the others, which only report that they did."""

    def do(self, running: Running, process: Process) -> Event | None:
        effect = running.effect
        if effect.tag != "reconnect" or self.daemon.ops[running.op_id].direction != BACK:
            return super().do(running, process)
        if process is self.node.crew(process.name)[0]:
            process.live_groups, process.generation = process.groups, effect.generation
        return events.Reconnected(effect=effect.number, worker=effect.worker)


class LeavesRestoredRanksLocked(RankNodeActions):
    """The restore of a rank ends locked, and no effect unlocks it before the order to connect."""

    def restore(self, effect: effects.Restore, process: Process) -> Event:
        done = super().restore(effect, process)
        if self.node.driven and isinstance(done, events.Restored):
            process.driver = "locked"
        return done


_FAILING = {"fail": 0.15}
RANK_MUTANTS = {
    **{
        handle.__name__: Mutant(Parts(hands=RankNodeActions, handle=handle), odds)
        for handle, odds in (
            (leaves_one_rank_unlocked, {}),
            (forgets_the_groups_of_one_rank, {}),
            (connects_all_but_one_again, {}),
            (connects_before_it_unlocks, _FAILING),
            (locks_each_rank_in_its_turn, {}),
            (forgets_communicators, {}),
            (lets_go_one_by_one, {}),
        )
    },
    "believes_in_what_was_cut_off": Mutant(
        Parts(hands=RankNodeActions, handle=believes_in_what_was_cut_off), {"crash": 0.03}, found_by=49
    ),
    "forgets_one_group": Mutant(Parts(hands=LeavesOneGroupConnected)),
    "undoes_it_on_one_rank_only": Mutant(Parts(hands=RollsBackOneRankOnly), _FAILING),
    "leaves_restored_ranks_locked": Mutant(Parts(hands=LeavesRestoredRanksLocked)),
}
