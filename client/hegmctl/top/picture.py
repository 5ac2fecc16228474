"""The screen of `hegmctl top` as lines of a given size: GPUs with their last minutes, jobs, operations, events.

Keeps the last snapshot, the order, the filter and the cursor. Pure: the time comes with the snapshots, and no terminal
is touched. A line is a list of parts, each a text and the name of its style; every text is printable.

Longer than 400 lines because everything that is drawn shares the cursor, the order and the width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import localtime, strftime

from hegmctl.inventory_text import gpus_as_text
from hegmctl.operating_text import AT_REST, job_names
from hegmctl.quantities import binary_size, duration, used_of_total
from hegmctl.tables import printable, shortened, width
from hegmd.protocol.operations import PHASES_IN_ORDER, Operation
from hegmd.protocol.snapshots import HEALTHY, Event, Gpu

Part = tuple[str, str]
Line = list[Part]

# Looks that are remembered of each GPU: at one look in 5 s, five minutes.
HISTORY = 60
EVENTS = 200
# From this width on there is room for the ids of jobs beside their names.
WIDE = 100
OVER = ("done", "rolled-back", "lost")
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
ORDERS = ("job", "gpu", "vram", "step/s", "age", "state")
JOBS, OPERATIONS = "jobs", "operations"
# The actions that a key requests for a job.
SUSPEND, RESUME, MIGRATE = "suspend", "resume", "migrate"
STATE_STYLES = {"training": "green", "moving": "cyan", "waiting": "red", "suspended": "yellow", "quiesced": "yellow"}
# The keys in the last line; those with the highest number are left out first where they do not fit.
KEYS = (
    ("s suspend", 1),
    ("r resume", 1),
    ("m migrate", 0),
    ("o order", 4),
    ("/ filter", 3),
    ("t timeline", 1),
    ("Tab operations", 2),
    ("? help", 0),
    ("q quit", 0),
)


class JobRow:
    """A job as a row. `pids` are its processes that are known."""

    __slots__ = ("age_s", "command", "gpus", "id", "name", "pids", "state", "steps_per_s", "vram_bytes", "waits")

    def __init__(  # noqa: PLR0913 - a row, each column named
        self,
        id: str,  # noqa: A002 - the column's name
        name: str,
        state: str,
        *,
        pids: Sequence[int] = (),
        gpus: Sequence[str] = (),
        vram_bytes: int | None = None,
        steps_per_s: float | None = None,
        age_s: float = 0.0,
        command: str = "",
        waits: str = "",
    ) -> None:
        self.id = id
        self.name = name
        self.state = state
        self.pids = tuple(pids)
        self.gpus = tuple(gpus)
        self.vram_bytes = vram_bytes
        self.steps_per_s = steps_per_s
        self.age_s = age_s
        self.command = command
        self.waits = waits

    def key(self, order: str) -> tuple[object, ...]:
        """Return its sort key for that order; the busiest job comes first in an order by a figure."""
        number = int(self.id[1:]) if self.id[1:].isdigit() else 0
        first: dict[str, object] = {
            "gpu": (not self.gpus, [(len(gpu), gpu) for gpu in self.gpus]),
            "vram": -(self.vram_bytes or 0),
            "step/s": -(self.steps_per_s or 0.0),
            "age": -self.age_s,
            "state": self.state,
        }
        return (first.get(order, 0), number)

    def has(self, text: str) -> bool:
        """Return True if the text occurs in it, ignoring case."""
        return text.lower() in " ".join((self.id, self.name, self.state, *self.gpus, self.command)).lower()


class NodeView:
    __slots__ = ("gpus", "jobs", "node", "operations", "utc")

    def __init__(
        self, utc: float, node: str, gpus: Sequence[Gpu], jobs: Sequence[JobRow], operations: Sequence[Operation]
    ) -> None:
        self.utc = utc
        self.node = node
        self.gpus = tuple(gpus)
        self.jobs = tuple(jobs)
        self.operations = tuple(operations)


class Listener:
    """Receives what happens on the node. Called in the feed's threads."""

    def on_view(self, view: NodeView) -> None:
        raise NotImplementedError

    def happened(self, event: Event) -> None:
        raise NotImplementedError

    def away(self, why: str) -> None:
        """Note that the daemon does not answer."""
        raise NotImplementedError


class Picture:
    """Everything that is shown."""

    def __init__(self, *, unicode: bool = True) -> None:
        self.unicode = unicode
        self.order = ORDERS[0]
        self.filter = ""
        #: Why the snapshot is old; empty while the daemon answers.
        self.trouble = ""
        #: The result of the last command.
        self.notice = ""
        self.section = JOBS
        self._seen = NodeView(0.0, "", (), (), ())
        self._history: dict[str, deque[tuple[float | None, float | None]]] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._chosen = {JOBS: "", OPERATIONS: ""}
        self._top = 0

    # -- data ----------------------------------------------------------------------------------------------------------

    def take(self, view: NodeView) -> None:
        """Take a look in, and remember the GPUs' figures."""
        self.trouble = ""
        if view.gpus is not self._seen.gpus:  # a look at operations alone says nothing new of the GPUs
            for gpu in view.gpus:
                self._history.setdefault(gpu.id, deque(maxlen=HISTORY)).append((gpu.utilisation_percent, _full(gpu)))
        self._seen = view

    def happened(self, event: Event) -> None:
        self._events.append(event)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self._seen.gpus

    @property
    def jobs(self) -> list[JobRow]:
        """Return the jobs that match the filter, sorted."""
        found = [job for job in self._seen.jobs if not self.filter or job.has(self.filter)]
        return sorted(found, key=lambda job: job.key(self.order))

    @property
    def operations(self) -> list[Operation]:
        """Return the operations under way, newest first, and then those that ended."""
        under_way = [each for each in self._seen.operations if each.phase not in OVER]
        ended = [each for each in self._seen.operations if each.phase in OVER]
        return [*reversed(under_way), *reversed(ended)]

    @property
    def is_moving(self) -> bool:
        """Return True if an operation makes progress now."""
        return any(each.phase not in OVER and each.phase not in AT_REST for each in self._seen.operations)

    # -- selection -----------------------------------------------------------------------------------------------------

    def job(self) -> JobRow | None:
        """Return the job under the cursor."""
        jobs = self.jobs
        return next((job for job in jobs if job.id == self._chosen[JOBS]), jobs[0] if jobs else None)

    def operation(self) -> Operation | None:
        """Return the operation under the cursor; with the cursor on a job, the newest one of its processes."""
        if self.section == OPERATIONS:
            known = self.operations
            return next((op for op in known if op.id == self._chosen[OPERATIONS]), known[0] if known else None)
        job = self.job()
        return None if job is None else next((op for op in self.operations if _is_of(op, job)), None)

    def move(self, by: int) -> None:
        ids = [job.id for job in self.jobs] if self.section == JOBS else [op.id for op in self.operations]
        if ids:
            at = ids.index(self._chosen[self.section]) if self._chosen[self.section] in ids else 0
            self._chosen[self.section] = ids[min(max(at + by, 0), len(ids) - 1)]

    def switch(self) -> None:
        """Have the cursor among the operations, or among the jobs again."""
        self.section = OPERATIONS if self.section == JOBS and self.operations else JOBS

    def next_order(self) -> None:
        """Order the jobs by the next column."""
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]

    def target_for(self, job: JobRow) -> str:
        """Return a target to propose: as many other GPUs as the job is on, those with the most free memory first.

        A job that is on all GPUs exchanges its own. Empty if there is no other GPU.
        """
        others = [gpu for gpu in self.gpus if gpu.id not in job.gpus and _is_fit(gpu)]
        others.sort(key=lambda gpu: gpu.memory_used_bytes or 0)
        count = max(1, len(job.gpus))
        if len(others) < count and count > 1:
            return ",".join((*job.gpus[1:], job.gpus[0]))
        return ",".join(gpu.id for gpu in others[:count])

    # -- lines ---------------------------------------------------------------------------------------------------------

    def lines(self, columns: int, rows: int) -> list[Line]:
        """Return the whole screen: exactly that many rows, each of at most that many columns."""
        gpus = self._gpu_lines(columns, max(2, rows // 3))
        ops = self._operation_lines(columns, 4 if rows >= 30 else 3)
        events = self._event_lines(columns, 5 if rows >= 40 else 2)
        left = rows - 2 - len(gpus) - len(ops) - len(events)
        body = [self._head(columns), *gpus, *self._job_lines(columns, max(2, left)), *ops, *events]
        body = body[: rows - 1]
        body += [[]] * (rows - 1 - len(body))
        notice = self.notice or keys(columns)
        return [*body, [(shortened(notice, columns, self._ellipsis), "bold" if self.notice else "dim")]]

    @property
    def _ellipsis(self) -> str:
        return "…" if self.unicode else "~"

    def _head(self, columns: int) -> Line:
        view = self._seen
        under_way = sum(each.phase not in OVER for each in view.operations)
        waiting = sum(bool(job.waits) for job in view.jobs)
        jobs = f"{len(view.jobs)} jobs, {waiting} waiting" if waiting else f"{len(view.jobs)} jobs"
        parts = [f"{len(view.gpus)} GPUs", jobs, f"{under_way} operations", f"order: {self.order}"]
        if self.filter:
            parts.append(f"filter: {printable(self.filter)}")
        clock = strftime("%H:%M:%S", localtime(view.utc)) if view.utc else "--:--:--"
        if self.trouble:
            return [(shortened(f"{clock}  {printable(self.trouble)}", columns, self._ellipsis), "red")]
        text = f"hegmd on {printable(view.node)}  {'  '.join(parts)}"
        return [(shortened(text, columns - 10, self._ellipsis).ljust(columns - 8) + clock, "bold")]

    def _gpu_lines(self, columns: int, most: int) -> list[Line]:
        gpus = self._seen.gpus
        beside = 1
        while len(gpus) > most * beside and columns // (beside + 1) >= 38:
            beside += 1
        rows = min(most, -(-len(gpus) // beside))
        room = (columns - 2 * (beside - 1)) // beside
        lines: list[Line] = []
        for row in range(rows):
            line: Line = []
            for column in range(beside):
                number = column * rows + row
                if number < len(gpus):
                    line += [
                        *([("  ", "")] if column else []),
                        *self._gpu(gpus[number], room, fill=column < beside - 1),
                    ]
            lines.append(line)
        if len(gpus) > rows * beside:
            lines[-1] = [(f"and {len(gpus) - (rows - 1) * beside} more GPUs", "dim")]
        return lines

    def _gpu(self, gpu: Gpu, room: int, *, fill: bool) -> Line:
        name = f"{gpu.id:<6}"
        if gpu.state != "ok":
            text = f"{name}{gpu.state}"
            return [(text.ljust(room) if fill else text, "red")]
        busy = " -%" if gpu.utilisation_percent is None else f"{gpu.utilisation_percent:.0f}%"
        memory = used_of_total(gpu.memory_used_bytes, gpu.memory_total_bytes).replace(" ", "").rjust(14)
        style = {"warn": "yellow", "failed": "red"}.get(gpu.health.state, "")
        line: Line
        if gpu.health.condition != HEALTHY:
            why = printable(f"{gpu.health.condition}: {gpu.health.reason}")
            left = max(8, room - len(name) - len(memory) - 6)
            line = [
                (name, "red"),
                (shortened(why, left, self._ellipsis).ljust(left), "red"),
                (f" {busy:>4} {memory}", ""),
            ]
        else:
            product = f"  {printable(gpu.name)}" if gpu.name and room >= 70 else ""
            each = min(HISTORY, max(4, (room - len(name) - 4 - len(memory) - width(product) - 2) // 2))
            history = self._history.get(gpu.id, ())
            line = [
                (name, style),
                (self.sparkline([used for used, _ in history], each), "green"),
                (f" {busy:>4} ", ""),
                (self.sparkline([full for _, full in history], each), "cyan"),
                (f"{memory}{product}", ""),
            ]
        spent = sum(width(text) for text, _ in line)
        return [*line, (" " * (room - spent), "")] if fill and spent < room else line

    def sparkline(self, values: Sequence[float | None], columns: int) -> str:
        """Return percentages as bars, newest at the right; unknown values are blank."""
        bars = BARS if self.unicode else ASCII_BARS
        text = "".join(" " if value is None else bars[min(7, int(value / 12.5))] for value in list(values)[-columns:])
        return text.rjust(columns)

    def _job_lines(self, columns: int, rows: int) -> list[Line]:
        jobs, chosen = self.jobs, self.job()
        head = f"  {'JOB':<6}{'STATE':<11}{'GPU':<10}{'VRAM':>10}{'STEP/S':>8}{'AGE':>9}  NAME / COMMAND"
        lines: list[Line] = [[(shortened(head, columns, ""), "bold")]]
        rows -= 1
        at = jobs.index(chosen) if chosen is not None else 0
        self._top = min(max(self._top, at - rows + 1), at, max(0, len(jobs) - rows))
        shown = jobs[self._top : self._top + rows]
        lines += [self._job(job, columns, is_chosen=job is chosen and self.section == JOBS) for job in shown]
        if not jobs:
            lines.append([("  no job matches the filter" if self.filter else "  no job runs here", "dim")])
        return lines

    def _job(self, job: JobRow, columns: int, *, is_chosen: bool) -> Line:
        rate = "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}"
        vram = "-" if job.vram_bytes is None else binary_size(job.vram_bytes)
        gpus = shortened(gpus_as_text(job.gpus), 9, self._ellipsis)
        before = f"{'>' if is_chosen else ' '} {job.id:<6}"
        age = duration(job.age_s).replace(" min", "m").replace(" h", "h").replace(" d", "d").replace(" s", "s")
        after = f"{gpus:<10}{vram:>10}{rate:>8}{age.replace('m ', 'm'):>9}  "
        style = "reverse" if is_chosen else ""
        name = printable(f"{job.name}  {job.command}" if job.command else job.name)
        if job.waits:  # it has few figures, and the reason is long
            after, name = f"{gpus:<10}", printable(f"  {job.name} waits: {job.waits}")
        rest = shortened(name, max(0, columns - len(before) - 11 - len(after)), self._ellipsis)
        return [
            (before, style),
            (f"{shortened(job.state, 10, self._ellipsis):<11}", style or STATE_STYLES.get(job.state, "")),
            (after, style),
            (rest, style),
        ]

    def _operation_lines(self, columns: int, most: int) -> list[Line]:
        chosen = self.operation() if self.section == OPERATIONS else None
        known = self.operations
        if not known:
            return []
        at = known.index(chosen) if chosen is not None else 0
        top = max(0, min(at, len(known) - (most - 1)))
        lines: list[Line] = [[("  OPERATIONS", "bold")]]
        return lines + [self._operation(op, columns, is_chosen=op is chosen) for op in known[top : top + most - 1]]

    def _operation(self, op: Operation, columns: int, *, is_chosen: bool) -> Line:
        style = "reverse" if is_chosen else {"done": "green", "lost": "red", "rolled-back": "red"}.get(op.phase, "cyan")
        here = gpus_as_text((each.began_on if op.phase in OVER else each.gpu) or "pool" for each in op.processes)
        there = gpus_as_text(each.to or "pool" for each in op.processes)
        where = here if here == there else f"{here}->{there}"
        if op.phase in OVER:
            figures = binary_size(op.size_bytes)
            figures += "" if op.downtime_s is None else f", downtime {op.downtime_s:.2f} s"
        else:
            bar = self._bar(op, 10 if columns >= WIDE else 6)
            figures = f"{bar} {binary_size(op.moved_bytes)}/{binary_size(op.size_bytes)}"
            figures += f"  {op.waits.why}" if op.waits is not None else ""
        names = 20 if columns >= WIDE else 11
        who = shortened(",".join(job_names(op.processes, ids=columns >= WIDE)), names, self._ellipsis)
        mark = ">" if is_chosen else " "
        text = f"{mark} {op.id:<4}{op.kind:<11}{op.phase:<14}{who:<{names}} {where:<11} {figures}"
        return [(shortened(printable(text), columns, self._ellipsis), style)]

    def _bar(self, op: Operation, length: int) -> str:
        phases = len(PHASES_IN_ORDER)
        place = PHASES_IN_ORDER.index(op.phase) if op.phase in PHASES_IN_ORDER else phases
        within = op.moved_bytes / op.size_bytes if op.size_bytes else 0.0
        full = min(length, round(length * (place + min(1.0, within)) / phases))
        return "[" + "#" * full + "." * (length - full) + "]"

    def _event_lines(self, columns: int, most: int) -> list[Line]:
        styles = {"error": "red", "warning": "yellow"}
        return [
            [
                (
                    shortened(
                        f"  {strftime('%H:%M:%S', localtime(event.time_utc))} {printable(event.message)}",
                        columns,
                        self._ellipsis,
                    ),
                    styles.get(event.severity, "dim"),
                )
            ]
            for event in list(self._events)[-most:]
        ]


def _is_of(op: Operation, job: JobRow) -> bool:
    return op.job == job.id or any(each.pid in job.pids for each in op.processes)


def keys(columns: int) -> str:
    """Return as many of the keys as fit whole."""
    shown: tuple[tuple[str, int], ...] = KEYS
    while len(text := "  ".join(key for key, _ in shown)) > columns and len({drop for _, drop in shown}) > 1:
        least = max(drop for _, drop in shown)
        shown = tuple([(key, drop) for key, drop in shown if drop < least])
    return text


def _is_fit(gpu: Gpu) -> bool:
    return gpu.state == "ok" and gpu.health.condition == HEALTHY


def _full(gpu: Gpu) -> float | None:
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return 100 * gpu.memory_used_bytes / gpu.memory_total_bytes
