"""The fate of an operation that a daemon finds in its journal: simulated for each phase and each finding.

Draws RECOVERY.md: `python -m tools.docs.recovery`. Nothing here is a rule of its own. The machine is driven to
each phase on a node where everything works, told `recovered`, told what was found, and then left to go on to its rest;
the page says which effects that took and where the job was then. A test keeps the page fresh, so it cannot say what
the machine does not do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hegmd.errors import Refused
from hegmd.migration.machine import events
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import PHASES, handle
from hegmd.migration.machine.next_effects import SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import (
    BY_STATE,
    CHECKPOINT,
    MIGRATE,
    QUIESCE,
    RESTART,
    SUSPEND,
    ImageRequest,
    JobProcess,
    Operation,
)

PAGE = Path(__file__).parents[2] / "hegmd" / "migration" / "RECOVERY.md"
OLD, NEW = "gpu0", "gpu1"
# A migration by restart: its process leaves by ending, and another one comes back in its place.
BY_RESTART = "restart"
# A migration of a job whose ranks have communicators: what holds for one of its ranks.
OF_RANKS = "migrate ranks"
PLACES = {OLD: "the old GPU", NEW: "the new GPU", None: "no GPU"}
NAME, AGENT = "the job", "its agent"
LEFT = "checkpoint --leave-running"
SIZE_BYTES = 10


@dataclass(frozen=True)
class World:
    """The true state of the one worker."""

    parked: bool = False
    out: bool = False
    gpu: str | None = OLD
    locked: bool = False
    boundary: int = 4
    alive: bool = True
    image: bool = False
    written: bool = False
    finished: bool = False

    @property
    def words(self) -> str:
        if self.finished:
            return "its training has finished"
        if not self.alive:
            return "its process has ended"
        where = f"on {PLACES[self.gpu]}"
        if not self.parked and not self.out:
            return f"it trains {where}"
        return f"it is parked {where}, its bytes {'offloaded' if self.out else 'in it'}"


@dataclass
class Play:
    """One operation on a node where every effect succeeds."""

    op: Operation
    world: World
    effects: list[Effect]
    done: list[str]

    def feed(self, event: Event) -> None:
        self.op, effects = handle(self.op, event, 0.0)
        self.effects += effects

    def end_one(self) -> None:
        """End the oldest effect well; a reconnect after the reload beside it, so that each has its phase."""
        oldest = next((at for at, effect in enumerate(self.effects) if effect.tag != "reconnect"), 0)
        effect: Any = self.effects.pop(oldest)
        if self.op.pending_numbered(effect.number) is None:
            return  # given up since
        self.done.append(effect.tag)
        ends = {"effect": effect.number, "worker": effect.worker}
        if self._finds_no_image(effect):
            message = "there is no image of it"
            self.feed(events.Failed(**ends, fault=events.REFUSED, message=message, hint="ask again"))
            return
        self.feed(Event.register[effect.ends[0]](**ends, **self._facts_of(effect)))

    def _finds_no_image(self, effect: Any) -> bool:
        """Whether it is of an image that a daemon before this one had begun, and that is not whole."""
        is_found = self.world.image or (effect.tag == "seal" and self.world.written)
        return (effect.tag == "seal" or (effect.tag == "dump" and effect.find)) and not is_found

    def _facts_of(self, effect: Any) -> dict[str, Any]:
        """Return the facts in the result, once the world has changed as the effect wants."""
        world = self.world
        changes: dict[str, dict[str, Any]] = {
            "park": {"parked": True, "boundary": world.boundary + 1},
            "withdraw": {"parked": False},
            "release": {"parked": False},
            "offload": {"out": not self._restarts},
            "reload": {"out": False},
            "lock": {"locked": True},
            "unlock": {"locked": False},
            "checkpoint": {"gpu": None, "locked": False},
            "dump": {"written": True} if self.op.image and self.op.image.leave_running else {"image": True},
            "seal": {"image": True},
            "scrap": {"image": False, "written": False},
            "end": {"alive": False},
            "restore": {
                "gpu": getattr(effect, "gpu", None),
                **({"parked": False, "alive": True} if self._restarts else {}),
            },
            "verify": {"boundary": world.boundary + 1},
        }
        self.world = world = replace(world, **changes.get(effect.tag, {}))
        facts: dict[str, dict[str, Any]] = {
            "survey": {"boundary": world.boundary, "size_bytes": SIZE_BYTES},
            "park": {"boundary": world.boundary},
            "offload": {"size_bytes": SIZE_BYTES},
            "verify": {"boundary": world.boundary},
            "inspect": self.facts(),
            "restore": {"pid": 2, "start_ticks": 2, "token": AGENT, "boundary": world.boundary}
            if self._restarts
            else {},
        }
        return facts.get(effect.tag, {})

    @property
    def _restarts(self) -> bool:
        return self.op.workers[0].restarts

    def facts(self) -> dict[str, Any]:
        """Return the findings of an inspection: the world as it is, and all reservations of the journal."""
        worker, world = self.op.workers[0], self.world
        return {
            "parked": world.parked,
            "boundary": world.boundary,
            "out_bytes": SIZE_BYTES if world.out else 0,
            "gpu": world.gpu,
            "reservations": {**worker.reservations, **({world.gpu: SIZE_BYTES} if world.gpu else {})},
            "pool_bytes": worker.pool_bytes,
            "locked": world.locked,
        }

    def until(self, phase: str | None) -> bool:
        """Go on to that phase, or to the rest; whether it came there."""
        while self.op.phase != phase and self.effects:
            self.end_one()
        return phase is None or self.op.phase == phase


@dataclass(frozen=True)
class Finding:
    """One possible finding after a start."""

    words: str
    world: World | None = None
    event: str = "inspected"

    def can_be(self, situation: Play) -> bool:
        """Return whether the finding is possible: an image exists only after it may have been begun, a restarted job
        has nothing out of its process, and no process continues from a state that is not whole.
        """
        handoff, worker = situation.op.image, situation.op.workers[0]
        if worker.restarts and self.world is not None and (self.world.out or self.world.gpu is None):
            return False
        if self.event in ("training-ended", "stateless") and not (worker.restarts and worker.state_saved):
            return False
        return self.world is None or not self.world.image or (handoff is not None and handoff.begun)


FINDINGS = (
    *(Finding(world.words, world) for world in (World(), World(gpu=NEW), World(gpu=None))),
    *(Finding(world.words, world) for world in (World(parked=True), World(parked=True, gpu=NEW))),
    *(Finding(world.words, world) for world in (World(parked=True, gpu=None), World(parked=True, out=True))),
    *(Finding(world.words, world) for world in (World(True, True, None), World(True, True, NEW))),
    Finding(
        "its image is complete, and it is parked on no GPU, its bytes offloaded", World(True, True, None, image=True)
    ),
    Finding("its agent still executes an order", event="busy"),
    Finding("its agent has not connected yet", event="away"),
    Finding("another program runs in its process", event="agent-back"),
    Finding("its process has ended", event="worker-exited"),
    Finding("its process has ended, and no copy of its state is left", event="stateless"),
    Finding("the process that continued has finished its training", event="training-ended"),
)


def situations() -> Iterator[tuple[str, Play]]:
    """Every kind of operation in every phase and heading that it can be in, by its name."""
    for kind, phase in (
        (kind, phase)
        for kind in (MIGRATE, SUSPEND, "resume", CHECKPOINT, LEFT, QUIESCE, BY_RESTART, OF_RANKS)
        for phase in PHASES
    ):
        forward = _driven(kind, phase)
        if forward is None or phase == "settling":
            continue
        yield f"{kind}, {phase}", forward
        back = _turned_back(kind, phase)
        if back is not None and back.op.phase not in TERMINAL:
            yield f"{kind} (rolling back), {back.op.phase}", back


def _driven(kind: str, phase: str) -> Play | None:
    """An operation of that kind in that phase; None when it never is."""
    goal = {MIGRATE: NEW, QUIESCE: OLD, BY_RESTART: NEW, OF_RANKS: NEW}.get(kind)
    worker = JobProcess(
        name=NAME,
        pid=1,
        start_ticks=1,
        token=AGENT,
        first_gpu=OLD,
        origin_gpu=OLD,
        target_gpu=goal,
        gpu=OLD,
        size_bytes=SIZE_BYTES,
        reservations={OLD: SIZE_BYTES},
    )
    if kind == BY_RESTART:
        worker = worker.replace(method=RESTART, carrier=BY_STATE, must_exit=True)
    if kind == OF_RANKS:
        worker = worker.replace(communicators="suspend")
    kinds = {"resume": SUSPEND, LEFT: CHECKPOINT, BY_RESTART: MIGRATE, OF_RANKS: MIGRATE}
    op = Operation(id="1", kind=kinds.get(kind, kind), workers=(worker,))
    if op.kind == CHECKPOINT:
        handoff = ImageRequest(path="/images/one", uid=0, gid=0, leave_running=kind == LEFT)
        op = op.replace(image=handoff, workers=(worker.replace(kept_gpu=OLD),))
    play = Play(op, World(), [], [])
    if kind == "resume":
        play.feed(events.Begin())
        play.until(SUSPENDED)
        play.feed(events.ResumeRequested(to={NAME: NEW}))
    elif phase != play.op.phase:
        play.feed(events.Begin())
    return play if play.until(phase) and play.op.phase not in TERMINAL else None


def _turned_back(kind: str, phase: str) -> Play | None:
    """Return the same after a cancel; None if that is refused, or changes nothing."""
    play = _driven(kind, phase)
    if play is None:
        return None
    try:
        play.feed(events.CancelRequested(by="somebody"))
    except Refused:
        return None
    while play.op.phase == "settling" and play.effects:
        play.end_one()
    return play


def outcome(situation: Play, finding: Finding) -> tuple[str, str]:
    """The effects that a start leads to, and how that ends."""
    # A daemon that wrote an image has not read it back, so the next daemon does not continue with it.
    play = Play(situation.op, finding.world or replace(situation.world, written=False), [], [])
    play.feed(events.Recovered())
    if not play.effects:
        return "—", f"`{play.op.phase}`: the job was not touched"
    if play.effects[0].tag != "inspect":
        return _unasked(play, finding)
    inspect = play.effects.pop(0)
    ends: dict[str, Any] = {"effect": inspect.number, "worker": NAME}
    if finding.event == "busy":
        facts: dict[str, Any] = {**play.facts(), "busy": True}
        play.feed(events.Inspected(**ends, **facts))
        return "—", "it is inspected again when that has ended"
    if finding.event == "away":
        play.feed(events.Failed(**ends, fault=events.DISCONNECTED, message="it is not there", hint="wait"))
        return "—", "it is inspected once the agent connects; `hegmctl ops` shows that it waits"
    if finding.event == "agent-back":
        play.world = replace(play.world, alive=False)
        play.feed(events.AgentBack(worker=NAME, token=f"not {AGENT}"))
    elif finding.event == "worker-exited":
        play.world = replace(play.world, alive=False)
        play.feed(events.WorkerExited(worker=NAME))
    elif finding.event == "stateless":
        play.world = replace(play.world, alive=False)
        play.feed(events.WorkerExited(worker=NAME, stateless=True))
    elif finding.event == "training-ended":
        play.world = replace(play.world, alive=False, finished=True)
        play.feed(events.TrainingEnded(worker=NAME))
    else:
        play.feed(events.Inspected(**ends, **play.facts()))
    play.until(None)
    return ", ".join(play.done) or "—", _end(play)


def _unasked(play: Play, finding: Finding) -> tuple[str, str]:
    """The same if its image is searched before agents are queried; it may contain an exited process."""
    if finding.world is None and finding.event != "worker-exited":
        return "—", "the daemon looks for its image first, and the result decides"
    if finding.event == "worker-exited":
        play.world = replace(play.world, alive=False)
        play.feed(events.WorkerExited(worker=NAME))
    play.until(None)
    return ", ".join(play.done) or "—", _end(play)


def _end(play: Play) -> str:
    worker = play.op.workers[0]
    if play.op.phase == "lost":
        return "`lost`: it ended while its bytes were offloaded"
    if worker.has_exited and play.op.ends_workers:
        return f"`{play.op.phase}`: it is in a complete image, and has ended"
    if worker.finished:
        return f"`{play.op.phase}`: its training has finished, and everything held for it is released"
    if worker.has_exited:
        return f"`{play.op.phase}`: everything held for it is released"
    return f"`{play.op.phase}`: {play.world.words}"


_INTRO = """\
# What a start does with each operation in the journal

<!-- Written by `make docs` from tools/docs/recovery.py, by playing the machine. Change that, or the machine. -->

A daemon that starts reads the journal, and inspects each worker of every unfinished operation before it does anything
else. The result of the inspection and the direction of the operation decide what follows, in the order of the stages
([STATES.md](STATES.md)). The tables below show each phase and each result, if every later effect succeeds. If one
fails, the operation rolls back where possible. Otherwise it is `suspended` with the bytes held, and `hegmctl resume`
works.

For example, the daemon was killed between a migration's checkpoint and its restore. The phase is `restoring`, and the
inspection finds a process that is parked on no GPU with its bytes offloaded: the table is
[here](#{example}). The pool still has the bytes. The
GPU reservation ended with the killed daemon, so the next one reserves the memory again, and waits if there is no room.
Then it restores the process on the new GPU, reloads its bytes, and the operation ends `done`.

* The inspection asks the driver too. It unlocks a process that a killed daemon had locked. A process that the driver
  has checkpointed is on no GPU; it is restored only while GPU memory is reserved for it.
* The inspection waits for a driver call that is still under way. Bytes that were on their way to the pool through GPU
  memory are copied to the pool. If that fails, they stay there, under a mark in the pool that names the place.
* If an image may have been started, the daemon looks for it first. An image with its final name is complete. Anything
  else is removed, and the operation rolls back. For a job that is left running, the job resumes first.
* A process that ended while its image was made, and is not in a complete image, is lost.
* **restart** is a migration by restart. Its process ends on purpose once its state is saved. Until the next process
  reports that it has the state, the operation waits.
* `settling` (a worker is inspected) and `counting` (of running ranks) are not in the tables. Each row
  applies to all ranks.
"""


def page() -> str:
    """The whole page, as Markdown."""
    found = list(situations())
    example = next(finding.words for finding in FINDINGS if finding.world == World(True, True, None))
    parts = [_INTRO.format(example=re.sub(r"[^\w -]", "", f"found {example}").replace(" ", "-").lower())]
    for finding in FINDINGS:
        parts.append(f"## Found: {finding.words}\n")
        parts.append("| an operation that was | does | and ends |\n|---|---|---|")
        parts += _rows(found, finding)
        parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


def _rows(found: list[tuple[str, Play]], finding: Finding) -> Iterator[str]:
    """Return one line for each different outcome, with its situations."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, play in ((name, play) for name, play in found if finding.can_be(play)):
        names = grouped.setdefault(outcome(play, finding), [])
        if name not in names:
            names.append(name)
    for (effects, end), names in grouped.items():
        yield f"| {_gathered(names)} | {effects} | {end} |"


def _gathered(names: list[str]) -> str:
    """Return the names with each kind once."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        kind, _, phase = name.partition(", ")
        by_kind.setdefault(kind, []).append(phase)
    return "; ".join(f"**{kind}** {', '.join(phases)}" for kind, phases in by_kind.items())


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())
