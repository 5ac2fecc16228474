"""The commands about jobs: `jobs`, `inspect`, `wait` and `recovery`."""

from __future__ import annotations

from time import monotonic, sleep

from hegmctl.connection import of_kind
from hegmctl.jobs_text import ended_text, filtered, job_text, jobs_text, templated
from hegmd.errors import TIMEOUT, UNAVAILABLE, USAGE, HegmError
from hegmd.protocol.messages import (
    DropRecovery,
    InspectJob,
    Job,
    JobReply,
    Jobs,
    JobsReply,
    Recovery,
    RecoveryDropped,
    RecoveryReply,
    WaitForJob,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.output import Sink
    from hegmctl.tables import Style

JSON = "json"
_OF_A_SIGNAL = 128


def jobs(session: Session) -> int:
    arguments = session.arguments
    request, filters, template = of_kind(arguments.request(), Jobs), arguments.texts("filter"), _template(session)
    filtered((), filters)  # reports a mistake before the daemon is asked
    write = None if template is None else templated(template)

    def fetch(connection: Connection) -> JobsReply:
        reply = connection.call(request, JobsReply)
        return reply.replace(jobs=tuple(filtered(reply.jobs, filters)))

    def view(reply: JobsReply, style: Style) -> list[str]:
        return (
            jobs_text(reply, style, of_some=bool(filters))
            if write is None
            else write(reply.jobs, reply.taken_utc, style)
        )

    interval_s = arguments.seconds("watch")
    if interval_s is not None:
        from hegmctl.watch import watch

        return watch(session, interval_s, fetch, view)
    with session.connect() as connection:
        reply = fetch(connection)
    _sink(session).answer(reply, view)
    return 0


def inspect(session: Session) -> int:
    from time import time

    template = _template(session)
    write = None if template is None else templated(template)
    with session.connect() as connection:
        reply = connection.call(session.arguments.request(), JobReply)

    def view(reply: JobReply, style: Style) -> list[str]:
        return job_text(reply, style) if write is None else write((reply.job,), time(), style)

    _sink(session).answer(reply, view)
    return 0


class _Late(Exception):
    """The job has not ended within --timeout."""


def wait(session: Session) -> int:
    """`hegmctl wait`: the exit status is the job's. A daemon that restarts is waited for."""
    from hegmctl.watch import RETRY_S, Reconnecting

    wanted = of_kind(session.arguments.request(), WaitForJob).job
    limit_s, began = session.arguments.seconds("timeout"), monotonic()

    def require_time(_job: Job | None = None) -> None:
        if limit_s is not None and monotonic() - began >= limit_s:
            raise _Late

    def look(connection: Connection) -> JobReply:
        nonlocal wanted  # another job may have that name, or that pid, before this one has ended
        wanted = connection.call(InspectJob(job=wanted), JobReply).job.id
        try:
            return connection.converse(WaitForJob(job=wanted), Job, JobReply, require_time, patient=limit_s is None)
        except HegmError as error:
            if error.code is TIMEOUT:
                require_time()
            raise

    link = Reconnecting(session)
    try:
        while (reply := link.ask(look, session.sink.note)) is None:
            require_time()
            sleep(RETRY_S)
    except _Late:
        hint = "it continues; without --timeout the command waits for its end"
        raise HegmError(TIMEOUT, f"job {wanted} has not ended within {limit_s:g} s", hint) from None
    finally:
        link.close()
    job = reply.job
    if job.status is None:
        how, hint = job.end, "hegmctl restore continues it from the image"
        if how is None:
            how = "ended, and its exit status is not known"
            hint = "before Linux 6.15 only the job's parent can read its exit status: read its output"
        raise HegmError(UNAVAILABLE, f"job {job.id} ({job.name}) {how}", hint, {"job": job.id})
    session.sink.answer(reply, ended_text)
    return job.status if job.status >= 0 else _OF_A_SIGNAL - job.status


def recovery(session: Session) -> int:
    """`hegmctl recovery`: how jobs are protected, or the end of a state that is kept."""
    from hegmctl.output import require_yes
    from hegmctl.recovery_text import dropped_text, recovery_text

    arguments = session.arguments
    name = arguments.text("drop")
    if name is None:
        with session.connect() as connection:
            session.sink.answer(connection.call(arguments.request(), RecoveryReply), recovery_text)
        return 0
    if arguments.values("JOB"):
        raise HegmError(
            USAGE, "recovery takes the jobs to show, or --drop and one job", "hegmctl recovery lists the protected jobs"
        )
    if not arguments.flag("yes"):
        with session.connect() as connection:
            connection.call(Recovery(jobs=(name,)), RecoveryReply)
        require_yes(f"Delete the state of job {name}? It can then never continue", name, "run: hegmctl recovery")
    with session.connect() as connection:
        session.sink.answer(connection.call(DropRecovery(job=name), RecoveryDropped), dropped_text)
    return 0


def _template(session: Session) -> str | None:
    text = session.arguments.text("format")
    return None if text in (None, JSON, "table") else text


def _sink(session: Session) -> Sink:
    """Return the sink; `--format json` selects that of --json."""
    from hegmctl.output import sink_for

    as_json = session.arguments.text("format") == JSON
    return sink_for(json=True, quiet=session.sink.quiet, colour=None) if as_json else session.sink
