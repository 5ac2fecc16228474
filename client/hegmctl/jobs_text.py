"""Jobs as text: the table of `hegmctl jobs`, one job in full, and templates like podman's.

`--filter` and `--format` work on the daemon's answer, so that both libraries have plain records.
"""

from __future__ import annotations

import re
from time import localtime, strftime

from hegmctl.inventory_text import below, gpus_as_text
from hegmctl.quantities import binary_size, duration
from hegmctl.tables import UNKNOWN, Column, Style, printable, table, wrapped
from hegmd.errors import USAGE, HegmError
from hegmd.protocol.jobs import ENDED, JOB_STATES, QUIESCED, STARTING, SUSPENDED, TRAINING, WAITING
from hegmd.protocol.names import closest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hegmctl.tables import Cell
    from hegmd.protocol.jobs import Job, JobProcess, JobReply, JobsReply

_COLOURS = {TRAINING: "green", STARTING: "cyan", QUIESCED: "yellow", SUSPENDED: "yellow", WAITING: "red", ENDED: "dim"}
_FIELD = re.compile(r"\{\{ *\.([A-Za-z]+) *\}\}")
_LABEL_COLUMNS = 12


def rate_text(steps_per_s: float | None) -> str:
    """Return a rate in three digits: `0.42`, `7.1`, `218`."""
    if steps_per_s is None:
        return UNKNOWN
    return f"{steps_per_s:.0f}" if steps_per_s >= 100 else f"{steps_per_s:.3g}"


def age_text(job: Job, now_utc: float) -> str:
    return duration(max(0.0, (job.ended_utc or now_utc) - job.started_utc))


# The fields of a template; in lower case also those of `--filter`.
_FIELDS: dict[str, Callable[[Job, float], str]] = {
    "ID": lambda job, _now: job.id,
    "Name": lambda job, _now: job.name,
    "State": lambda job, _now: job.state,
    "GPU": lambda job, _now: gpus_as_text(job.gpus),
    "VRAM": lambda job, _now: UNKNOWN if job.vram_bytes is None else binary_size(job.vram_bytes),
    "Steps": lambda job, _now: rate_text(job.steps_per_s),
    "Age": age_text,
    "Command": lambda job, _now: job.command or UNKNOWN,
    "User": lambda job, _now: _user(job),
    "PID": lambda job, _now: UNKNOWN if job.pid is None else str(job.pid),
    "Status": lambda job, _now: UNKNOWN if job.status is None else str(job.status),
    "Operation": lambda job, _now: job.operation or UNKNOWN,
    "Priority": lambda job, _now: str(job.priority),
}


def jobs_text(reply: JobsReply, style: Style, *, of_some: bool = False) -> list[str]:
    """Return the table of `hegmctl jobs`, with users if there are several. `of_some`: not all were requested."""
    if not reply.jobs:
        return ["No job fits --filter." if of_some else "No job is running here." if style.remarks else "No job."]
    of_several, ended = len({job.uid for job in reply.jobs}) > 1, any(job.state == ENDED for job in reply.jobs)
    columns = [
        Column("JOB"),
        Column("NAME", shrink=8),
        *([Column("USER", shrink=6, drop=2)] if of_several else []),
        Column("STATE"),
        *([Column("STATUS", right=True, drop=3)] if ended else []),
        Column("GPU", shrink=6),
        Column("VRAM", right=True, drop=4),
        Column("STEP/S", right=True, drop=5),
        Column("AGE", right=True, drop=1),
        Column("COMMAND", shrink=12),
    ]
    rows = [_row(job, reply.taken_utc, of_several=of_several, ended=ended) for job in reply.jobs]
    # A suspended job waits to be resumed, which is no news, unless its command has ended.
    stuck = [job for job in reply.jobs if job.state == WAITING or (job.state == SUSPENDED and job.pid is None)]
    waiting = [f"{job.id} ({job.name}): {job.waits}" for job in stuck if job.waits]
    return [*table(columns, rows, style), *(below(waiting, style) if style.remarks else [])]


def _row(job: Job, now_utc: float, *, of_several: bool, ended: bool) -> list[Cell]:
    def text_of(field: str) -> str:
        return _FIELDS[field](job, now_utc)

    state: Cell = (job.state, _COLOURS.get(job.state, ""))
    row: list[Cell] = [job.id, job.name, *([text_of("User")] if of_several else []), state]
    row += [_status(job)] if ended else []
    return [*row, text_of("GPU"), text_of("VRAM"), text_of("Steps"), text_of("Age"), text_of("Command")]


def _status(job: Job) -> str:
    if job.status is None:
        return UNKNOWN
    return str(job.status) if job.status >= 0 else f"signal {-job.status}"


def _user(job: Job) -> str:
    return user_name(job.uid) if job.user is None else job.user


def user_name(uid: int) -> str:
    """Return the name of a user of this node; the number of one that has none here."""
    from pwd import getpwuid

    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def job_text(reply: JobReply, style: Style) -> list[str]:
    job = reply.job
    facts = [
        ("state", job.state),
        ("waits for", job.waits),
        ("end", job.end),
        ("status", None if job.status is None else _status(job)),
        ("user", _user(job)),
        ("command", job.command),
        ("started", strftime("%Y-%m-%d %H:%M:%S", localtime(job.started_utc))),
        ("priority", str(job.priority)),
        ("GPU", gpus_as_text(job.gpus)),
        ("VRAM", None if job.vram_bytes is None else binary_size(job.vram_bytes)),
        ("held", binary_size(job.held_bytes) if job.held_bytes else None),
        ("batches", None if job.boundary is None else str(job.boundary)),
        ("step/s", None if job.steps_per_s is None else rate_text(job.steps_per_s)),
        ("operation", None if job.operation is None else f"{job.operation}; see: hegmctl op {job.operation}"),
    ]
    lines = [style.paint(printable(f"{job.id}  {job.name}"), "bold")]
    for label, value in facts:
        if value is not None:
            lines += _fact(label, value, style)
    if job.processes:
        columns = (Column("PID", right=True), Column("ROLE"), Column("GPU"), Column("VRAM", right=True))
        rest = (Column("BATCHES", right=True), Column("FRAMEWORK", shrink=6))
        lines += ["", *table((*columns, *rest), [_process_row(one) for one in job.processes], style)]
    for note in job.notes:
        lines += ["", *_paragraph(note, style)]
    return lines


def _fact(label: str, value: str, style: Style) -> list[str]:
    indent = " " * (_LABEL_COLUMNS + 2)
    text = wrapped(printable(value), style.columns, indent) if style.columns else [indent + printable(value)]
    return [f"  {label:<{_LABEL_COLUMNS}}{text[0][len(indent) :]}", *text[1:]]


def _paragraph(text: str, style: Style) -> list[str]:
    return wrapped(printable(text), style.columns) if style.columns else [printable(text)]


def _process_row(process: JobProcess) -> list[Cell]:
    return [
        str(process.pid),
        process.role if process.rank is None else f"{process.role} {process.rank}",
        gpus_as_text(process.gpus),
        UNKNOWN if process.vram_bytes is None else binary_size(process.vram_bytes),
        UNKNOWN if process.boundary is None else str(process.boundary),
        process.framework or UNKNOWN,
    ]


def ended_text(reply: JobReply, style: Style) -> list[str]:
    job = reply.job
    return _paragraph(f"{job.id} ({job.name}) {job.end or ENDED}", style)


# -- by a template -----------------------------------------------------------------------------------------------------


def templated(template: str) -> Callable[[Sequence[Job], float, Style], list[str]]:
    r"""Return the renderer for a template: `{{.ID}} {{.State}}`, or `table {{.ID}}\t{{.Name}}`. Raises USAGE."""
    is_table = template.startswith("table ")
    text = template.removeprefix("table ").replace("\\t", "\t").replace("\\n", "\n")
    fields = [_field_named(name) for name in _FIELD.findall(text)]
    if not fields:
        hint = f"write --format json, or fields such as {{{{.ID}}}}: {', '.join(_FIELDS)}"
        raise HegmError(USAGE, f"--format {template!r} names no field", hint)

    def write(jobs: Sequence[Job], now_utc: float, style: Style) -> list[str]:
        rows = [[_FIELDS[field](job, now_utc) for field in fields] for job in jobs]
        if is_table:
            last = len(fields) - 1
            columns = [Column(field.upper(), shrink=12 if at == last else None) for at, field in enumerate(fields)]
            return table(columns, rows, style)
        return [printable(line) for row in rows for line in _filled(text, row)]

    return write


def _filled(text: str, values: Sequence[str]) -> list[str]:
    rest = iter(values)
    return _FIELD.sub(lambda _: next(rest), text).split("\n")


def _field_named(name: str) -> str:
    found = next((field for field in _FIELDS if field.lower() == name.lower()), None)
    if found is None:
        close = closest(name, _FIELDS)
        hint = f"did you mean {{{{.{close}}}}}? " if close else ""
        raise HegmError(USAGE, f"--format: a job has no field {name!r}", f"{hint}it has {', '.join(_FIELDS)}")
    return found


def filtered(jobs: Sequence[Job], filters: Sequence[str]) -> list[Job]:
    """Return the jobs that match one filter of each key. Names and commands can have `*` and `?`. Raises USAGE."""
    choices: dict[str, list[str]] = {}
    for text in filters:
        key, equals, value = text.partition("=")
        field = next((field for field in _FIELDS if field.lower() == key.lower()), None)
        if not equals or field is None:
            close = closest(key, [known.lower() for known in _FIELDS])
            known = ", ".join(field.lower() for field in _FIELDS)
            hint = f"write KEY=VALUE, such as state=training; the keys are {known}"
            raise HegmError(USAGE, f"--filter {text!r}", f"did you mean {close}=? {hint}" if close else hint)
        if field == "State" and value not in JOB_STATES:
            raise HegmError(
                USAGE, f"--filter {text!r}: there is no such state", f"it is one of {', '.join(JOB_STATES)}"
            )
        choices.setdefault(field, []).append(value)
    return [job for job in jobs if all(_fits(job, field, values) for field, values in choices.items())]


def _fits(job: Job, field: str, values: Sequence[str]) -> bool:
    from fnmatch import fnmatchcase

    if field == "GPU":
        return any(f"gpu{value}" in job.gpus if value.isdigit() else value in job.gpus for value in values)
    own = _FIELDS[field](job, 0.0)
    return any(fnmatchcase(own, value) for value in values)
