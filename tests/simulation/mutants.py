"""Parts with a bug put in on purpose: the simulation is worth something only if it finds each of them.

Each wraps the real machine, the real journal file, or a model, so the product has no switch for it. MUTANTS names them
all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hegmd.errors import HegmError
from hegmd.migration.journal.file import JournalFile
from hegmd.migration.journal.records import History
from hegmd.migration.machine import effects, events, machine, next_effects
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import BACK, JobProcess, Operation
from tests.simulation.daemon import Parts
from tests.simulation.disk import ModelDisk
from tests.simulation.driven_mutants import MEANS
from tests.simulation.hands import NodeActions, Running
from tests.simulation.node import Process

Result = tuple[Operation, tuple[Effect, ...]]


def _all_workers(op: Operation, change: Callable[[JobProcess], JobProcess]) -> Operation:
    return op.replace(workers=tuple([change(worker) for worker in op.workers]))


def _one_worker(op: Operation, name: str, **values: object) -> Operation:
    worker = op.worker(name)
    return op if worker is None else op.with_worker(worker.replace(**values))


def frees_before_the_next_boundary(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    return (_one_worker(after, event.worker, verified=True) if isinstance(event, events.Reloaded) else after), wanted


def believes_in_room(op: Operation, event: Event, now: float) -> Result:
    """The target counts as reserved without having been reserved."""
    sure = _all_workers(
        op,
        lambda w: (
            w.replace(reservations={**w.reservations, w.target_gpu: 1000}) if w.target_gpu and not w.has_exited else w
        ),
    )
    after, wanted = machine.handle(sure, event, now)
    return (op, ()) if after is sure else (after, wanted)


def takes_late_endings_for_new_ones(op: Operation, event: Event, now: float) -> Result:
    if isinstance(event, events.Ending):
        for pending in op.pending:
            if pending.worker == event.worker and event.tag in Effect.register[pending.effect].ends[:-1]:
                event = event.replace(effect=pending.number)
    return machine.handle(op, event, now)


def trusts_its_memory_after_a_restart(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    if not isinstance(event, events.Recovered):
        return after, wanted
    certain = _all_workers(after, lambda w: w.replace(needs_inspection=False, recount_memory=False)).replace(pending=())
    return next_effects.advance(certain, now)


def gives_the_way_back_away(op: Operation, event: Event, now: float) -> Result:
    """The room on the old GPU goes as soon as the process has left it."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Checkpointed) and (worker := after.worker(event.worker)) and worker.origin_gpu:
        early = effects.ReleaseReservation(
            number=10_000 + after.seq, worker=worker.name, cause=0, gpu=worker.origin_gpu
        )
        wanted = (*wanted, early)
    return after, wanted


def stops_each_rank_where_it_is(op: Operation, event: Event, now: float) -> Result:
    alone = op.replace(is_distributed=False)
    after, wanted = machine.handle(alone, event, now)
    return (op, ()) if after is alone else (after, wanted)


def is_deaf_to_deadlines(op: Operation, event: Event, now: float) -> Result:
    return (op, ()) if isinstance(event, events.DeadlinePassed) else machine.handle(op, event, now)


def is_deaf_to_deaths(op: Operation, event: Event, now: float) -> Result:
    return (op, ()) if isinstance(event, events.WorkerExited) else machine.handle(op, event, now)


def forgets_what_is_out_when_it_turns(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    if after.direction == BACK != op.direction:
        after = _all_workers(after, lambda w: w.replace(offloaded=False))
    return after, wanted


def does_not_count_again(op: Operation, event: Event, now: float) -> Result:
    """Growth between the plan and the stop is missed."""
    after, wanted = machine.handle(op, event, now)
    if not isinstance(event, events.Parked) or after is op:
        return after, wanted
    blind = _all_workers(after, lambda w: w.replace(measured=True)).replace(pending=())
    return next_effects.advance(blind, now)


def lets_go_one_by_one(op: Operation, event: Event, now: float) -> Result:
    """A rank is released as soon as it has its own bytes."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Reloaded):
        wanted = (*wanted, effects.Release(number=10_000 + after.seq, worker=event.worker, cause=0))
    return after, wanted


def takes_another_program_for_the_same(op: Operation, event: Event, now: float) -> Result:
    """The pid is trusted, and not what the agent calls itself."""
    if isinstance(event, events.AgentBack) and (worker := op.worker(event.worker)):
        event = event.replace(token=worker.token)
    return machine.handle(op, event, now)


# ---- the disk and the journal's file ---------------------------------------------------------------------------------


class NeverSyncs(ModelDisk):
    def sync(self, fd: int) -> None:
        return


class NeverSyncsNames(ModelDisk):
    def sync_folder(self, folder: Path) -> None:
        return


class LeavesPartialRecord(JournalFile):
    """A write that finds no room is left as it is, and the next record follows it."""

    def _cut_off(self) -> None:
        return


class WritesToUnlinkedJournal(JournalFile):
    """After a compacted journal got its name and the name is not on disk, the old file is still written."""

    def rewrite(self, histories: Iterable[History]) -> None:
        old, self._fd = self._fd, -1
        try:
            super().rewrite(histories)
        except HegmError:
            self._fd = old
            raise
        if old >= 0:
            self._disk.close(old)


class ForgetsSuspendedJobs(JournalFile):
    def rewrite(self, histories: Iterable[History]) -> None:
        super().rewrite([history for history in histories if history.operation.phase != next_effects.SUSPENDED])


class ReplacesJournalTooEarly(JournalFile):
    """A compacted journal replaces the old one before it is complete."""

    def rewrite(self, histories: Iterable[History]) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(self.path)
        super().rewrite(histories)


# ---- the hands -------------------------------------------------------------------------------------------------------


class RestoresWithoutFreeMemory(NodeActions):
    def has_room(self, process: Process, gpu: str) -> bool:
        return True


class TakesLostHelperForDone(NodeActions):
    def checkpoint(self, effect: Any, process: Process) -> Event:
        event = super().checkpoint(effect, process)
        lost = isinstance(event, events.Failed) and event.fault == events.BROKEN
        return events.Checkpointed(effect=effect.number, worker=effect.worker) if lost else event


class LeavesProcessesLocked(NodeActions):
    def unlock(self, process: Process) -> None:
        return


class KillsWrongProgram(NodeActions):
    def knows_program(self, process: Process) -> bool:
        return False


class InspectsDuringCopy(NodeActions):
    def is_busy(self, process: Process) -> bool:
        return False


class DumpsResumedJob(NodeActions):
    def steps_aside(self, process: Process) -> bool:
        return True


class TrustsUnfinishedImage(NodeActions):
    """An image in progress when the daemon was killed counts as complete."""

    def dump(self, running: Running) -> Event | None:
        if running.effect.find:
            return events.Dumped(effect=running.effect.number, worker=running.effect.worker)
        return super().dump(running)


class SealsUnverifiedImage(NodeActions):
    """An image that a killed daemon had written counts as complete, although it was not read back."""

    def see_to_written(self, running: Running) -> Event | None:
        if running.effect.tag == "seal":
            return events.Sealed(effect=running.effect.number, worker=running.effect.worker)
        return super().see_to_written(running)


def frees_before_the_reload(op: Operation, event: Event, now: float) -> Result:
    """The pool's memory goes back as soon as the process is on its GPU."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Restored):
        wanted = (effects.ReleasePool(number=10_000 + after.seq, worker=event.worker, cause=0), *wanted)
    return after, wanted


def frees_before_the_image_is_written(op: Operation, event: Event, now: float) -> Result:
    """The pool's memory goes back as soon as the job has proved that it has its own."""
    after, wanted = machine.handle(op, event, now)
    if isinstance(event, events.Verified) and after is not op:
        wanted = (effects.ReleasePool(number=10_000 + after.seq, worker=event.worker, cause=0), *wanted)
    return after, wanted


def ends_before_the_image_is_whole(op: Operation, event: Event, now: float) -> Result:
    after, wanted = machine.handle(op, event, now)
    early = [
        effects.End(number=10_000 + after.seq, worker=effect.worker, cause=0)
        for effect in wanted
        if isinstance(effect, effects.Dump)
    ]
    return after, (*wanted, *early)


@dataclass(frozen=True)
class Mutant:
    """Parts with one bug, odds under which it shows sooner, and a seed that found it late: that one is lived first."""

    parts: Parts
    odds: dict[str, float] = field(default_factory=dict)
    found_by: int = 0


_CRASHING = {"crash": 0.1}
# The seed that finds each bug that is found late; if it no longer does, use all lives up to another seed that does.
_FOUND_BY = {
    "takes_late_endings_for_new_ones": 118,
    "trusts_its_memory_after_a_restart": 84,
    "finds_an_image_that_is_not_there": 438,
    "restores_without_room": 401,
    "counts_the_old_figure": 124,
    "takes_a_lost_restore_for_over": 377,
    "has_no_turns": 284,
    "does_not_look_once_more": 22,
    "forgets_what_is_suspended": 37,
    "believes_success": 33,
    "looks_while_bytes_are_moving": 81,
    "forgets_the_margin": 64,
    "stops_each_rank_where_it_is": 34,
    "lets_go_one_by_one": 34,
    "does_not_count_again": 28,
    "counts_on_who_is_loose": 27,
    "keeps_a_file_without_a_name": 25,
    "is_deaf_to_deaths": 17,
    "maps_two_gpus_of_three": 6,
}
_BROKEN_HANDLES = (
    frees_before_the_reload,
    frees_before_the_next_boundary,
    believes_in_room,
    takes_late_endings_for_new_ones,
    trusts_its_memory_after_a_restart,
    gives_the_way_back_away,
    stops_each_rank_where_it_is,
    is_deaf_to_deadlines,
    is_deaf_to_deaths,
    forgets_what_is_out_when_it_turns,
    does_not_count_again,
    lets_go_one_by_one,
    ends_before_the_image_is_whole,
    frees_before_the_image_is_written,
)
_ALL: dict[str, Mutant] = {
    **{handle.__name__: Mutant(Parts(handle=handle)) for handle in _BROKEN_HANDLES},
    "takes_another_program_for_the_same": Mutant(Parts(handle=takes_another_program_for_the_same), {"exec": 0.02}),
    "dumps_who_has_gone_on": Mutant(Parts(hands=DumpsResumedJob), {"alone": 0.2}),
    "finds_an_image_that_is_not_there": Mutant(Parts(hands=TrustsUnfinishedImage), {"crash": 0.03, "fail": 0.0}),
    "seals_what_is_not_there": Mutant(Parts(hands=SealsUnverifiedImage), {"crash": 0.03, "fail": 0.0}),
    "acts_before_the_journal_is_on_disk": Mutant(Parts(acts_before_sync=True), _CRASHING),
    "acts_though_the_journal_cannot_be_written": Mutant(Parts(ignores_write_errors=True)),
    "forgets_descriptors_when_it_restarts": Mutant(Parts(forgets_descriptors=True), _CRASHING),
    "never_syncs": Mutant(Parts(disk=NeverSyncs)),
    "never_syncs_names": Mutant(Parts(disk=NeverSyncsNames)),
    "leaves_half_a_record": Mutant(Parts(journal_file=LeavesPartialRecord), {"full": 0.05, **_CRASHING}),
    "keeps_a_file_without_a_name": Mutant(Parts(journal_file=WritesToUnlinkedJournal), {"break": 0.2}),
    "forgets_what_is_suspended": Mutant(Parts(journal_file=ForgetsSuspendedJobs), _CRASHING),
    "writes_over_the_old_journal": Mutant(Parts(journal_file=ReplacesJournalTooEarly), {"full": 0.1, **_CRASHING}),
    "restores_without_room": Mutant(Parts(hands=RestoresWithoutFreeMemory), {"grab": 0.3}),
    "takes_a_lost_helper_for_done": Mutant(Parts(hands=TakesLostHelperForDone), {"helper": 0.2}),
    "leaves_processes_locked": Mutant(Parts(hands=LeavesProcessesLocked), {"helper": 0.2}),
    "orders_another_program": Mutant(Parts(hands=KillsWrongProgram), {"exec": 0.02}),
    **{name: Mutant(Parts(means=means), odds) for name, (means, odds) in MEANS.items()},
    "looks_while_bytes_are_moving": Mutant(Parts(hands=InspectsDuringCopy), {"disconnect": 0.05}),
}
MUTANTS = {name: replace(mutant, found_by=_FOUND_BY.get(name, 0)) for name, mutant in _ALL.items()}
