"""Small operations, and a driver that ends every effect well, for the tests of the machine and its journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hegmd.migration.machine import events, machine
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import MIGRATE, JobProcess, Limits, Operation

LIMITS = Limits(arm_s=10.0, park_s=20.0, move_s=30.0, verify_s=40.0, retry_s=5.0)


def worker(name: str = "a", to: str | None = "gpu1", **values: Any) -> JobProcess:
    """Return a worker that trains on gpu0 with 10 bytes."""
    plain: dict[str, Any] = {
        "name": name,
        "pid": 100 + ord(name[0]),
        "start_ticks": 7,
        "token": f"token-{name}",
        "origin_gpu": "gpu0",
        "first_gpu": "gpu0",
        "target_gpu": to,
        "gpu": "gpu0",
        "size_bytes": 10,
        "reservations": {"gpu0": 10},
    }
    return JobProcess(**{**plain, **values})


def operation(*workers: JobProcess, kind: str = MIGRATE, **values: Any) -> Operation:
    """A planned one, of a worker that is to go to gpu1 if none is given."""
    return Operation(**{"id": "op1", "kind": kind, "workers": workers or (worker(),), "limits": LIMITS, **values})


@dataclass
class DrivenOperation:
    """An operation, what is to be done for it, and every phase that it was in."""

    op: Operation
    now: float = 0.0
    wanted: list[Effect] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    taken: list[tuple[Operation, Event, Operation, tuple[Effect, ...]]] = field(default_factory=list)

    def feed(self, event: Event) -> tuple[Effect, ...]:
        before = self.op
        self.op, wanted = machine.handle(before, event, self.now)
        self.taken.append((before, event, self.op, wanted))
        self.wanted += wanted
        if not self.phases or self.phases[-1] != self.op.phase:
            self.phases.append(self.op.phase)
        return wanted

    def end(self, **values: Any) -> tuple[Effect, ...]:
        """End the oldest effect with success; `values` replace those of the result event."""
        effect = self.wanted.pop(0)
        return self.feed(ending(effect, **values))

    def fail(self, fault: str = "broken") -> tuple[Effect, ...]:
        """Let the oldest effect fail."""
        effect = self.wanted.pop(0)
        message = f"{effect.tag} failed"
        return self.feed(
            events.Failed(effect=effect.number, worker=effect.worker, fault=fault, message=message, hint="wait")
        )

    def until(self, phase: str) -> DrivenOperation:
        """End effects well until it is in that phase."""
        return self.on(lambda: self.op.phase == phase)

    def on(self, is_there: Callable[[], bool]) -> DrivenOperation:
        if not self.phases:
            self.feed(events.Begin())
        while not is_there():
            assert self.wanted, f"it stands in {self.op.phase}"
            self.end()
        return self


def ending(effect: Effect, **values: Any) -> Event:
    """The event with which that effect ends well."""
    kind = Event.register[effect.ends[0]]
    known: dict[str, Any] = {
        "boundary": getattr(effect, "at", None) or getattr(effect, "beyond", 4) + 1,
        "size_bytes": getattr(effect, "size_bytes", 10),
        "parked": True,
        "out_bytes": 0,
        "gpu": "gpu0",
        "reservations": {"gpu0": 10},
        "pool_bytes": 0,
    }
    own = {declared.name for declared in kind.fields}
    plain = {name: value for name, value in known.items() if name in own}
    made: Event = kind(effect=effect.number, worker=effect.worker, **{**plain, **values})
    return made


def tags(effects: tuple[Effect, ...] | list[Effect]) -> list[str]:
    return [effect.tag for effect in effects]
