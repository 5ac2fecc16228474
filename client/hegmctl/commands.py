"""Handlers of commands: they ask the daemon, pass the answer to the sink, and return the exit status.

To add a command, start at its table, `grammar/__init__.py`. `hegmd/server/handlers.py` is the daemon's side.

`ask` serves every command that its row describes completely. Each handler imports what only it needs. `cli` prints
errors and maps them to exit statuses.
"""

from __future__ import annotations

from hegmctl.grammar.rows import load
from hegmd.errors import ATTENTION, INCOMPATIBLE, NOT_FOUND, USAGE, HegmError
from hegmd.protocol.operations import OperationProgress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.answers import DaemonVersion
    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.tables import Style
    from hegmd.protocol.messages import ProcessesReply, Welcome
    from hegmd.protocol.snapshots import Check

DOCTOR_TIMEOUT_S = 120.0
COMPLETION_TIMEOUT_S = 1.0


def ask(session: Session) -> int:
    """Serve a command by its row: make the request and write the reply."""
    arguments = session.arguments
    command = arguments.command
    form = [form for form in command.forms if not form.words or arguments.flag(form.words.lstrip("-"))][-1]
    request = arguments.request(form.request)
    if request.event is OperationProgress:
        from hegmctl.move_commands import carry_out

        return carry_out(session, request)
    with session.connect() as connection:
        reply = connection.call(request, request.reply)
    session.sink.answer(reply, load(form.render))
    return 0


def gpus(session: Session) -> int:
    from hegmctl.inventory_text import gpus_in_full, gpus_text

    with session.connect() as connection:
        reply = connection.gpus()
    session.sink.answer(reply, gpus_in_full if session.arguments.flag("long") else gpus_text)
    return 0


def ps(session: Session) -> int:
    from hegmctl.connection import of_kind
    from hegmctl.inventory_text import processes_text, ways_text
    from hegmd.protocol.messages import Processes, ProcessesReply

    arguments = session.arguments
    request = of_kind(arguments.request(), Processes)
    pids = request.pids

    def fetch(connection: Connection) -> ProcessesReply:
        return connection.call(request, ProcessesReply)

    def view(reply: ProcessesReply, style: Style) -> list[str]:
        text = ways_text if request.ways else processes_text
        return text(reply, style, request.gpus)

    interval_s = arguments.seconds("watch")
    try:
        if interval_s is not None:
            from hegmctl.watch import watch

            return watch(session, interval_s, fetch, view)
        with session.connect() as connection:
            reply = fetch(connection)
    except HegmError as error:
        if error.code is NOT_FOUND and interval_s is not None and len(pids) == 1 and pids[0] in range(1000):
            raise HegmError(
                error.code, error.message, f"a number of seconds is written as --watch={pids[0]}", error.facts
            ) from error
        raise
    session.sink.answer(reply, view)
    return 0


def events(session: Session) -> int:
    from hegmctl.answers_text import event_text

    arguments = session.arguments
    since = arguments.whole("since") or 0
    kinds = arguments.texts("kind")
    run = arguments.text("run")
    if arguments.flag("follow"):
        from hegmctl.watch import follow

        return follow(session, since, kinds, event_text, run)
    shown = 0
    with session.connect() as connection:
        for event in connection.events(since, kinds=kinds, run=run):
            session.sink.element(event, event_text)
            shown += 1
    if not shown:
        session.sink.note("the daemon remembers no such event" if since or kinds else "the daemon remembers no event")
    return 0


def doctor(session: Session) -> int:
    """`hegmctl doctor`: the daemon makes the checks, or this process without a daemon."""
    if session.arguments.flag("nccl"):
        from hegmctl.nccl_proof import prove

        return prove(session)
    if session.arguments.text("gpu") is not None or session.arguments.text("python") is not None:
        raise HegmError(USAGE, "--gpu and --python are for --nccl", "hegmctl doctor --nccl --gpu gpu0,gpu1")
    from hegmctl.answers import DoctorAnswer
    from hegmctl.answers_text import check_text, doctor_summary
    from hegmctl.output import TextSink
    from hegmd.protocol.snapshots import Check

    checks: list[Check] = []

    def on_check(check: Check) -> None:
        checks.append(check)
        if isinstance(session.sink, TextSink):
            session.sink.element(check, check_text)

    try:
        connection = session.connect(DOCTOR_TIMEOUT_S)
    except HegmError as error:
        from hegmctl.node_checks import check_here

        on_check(Check(id="daemon", status="fail", summary=error.message, fix=error.hint))
        try:
            check_here(on_check)
        except HegmError as failure:  # listed like a check, because it is part of what is wrong
            on_check(Check(id="daemon.program", status="fail", summary=failure.message, fix=failure.hint))
    else:
        with connection:
            welcome = connection.welcome
            summary = f"hegmd {welcome.daemon_version} answers at {connection.endpoint.path}"
            on_check(Check(id="daemon", status="ok", summary=summary))
            connection.doctor(on_check)
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail", "skip")}
    answer = DoctorAnswer(checks=tuple(checks), **counts)
    session.sink.answer(answer, doctor_summary)
    return ATTENTION.exit_status if answer.fail else 0


def version(session: Session) -> int:
    """`hegmctl version`; works without a daemon."""
    from hegmctl.answers import VersionAnswer
    from hegmctl.answers_text import version_text
    from hegmctl.endpoint import find_endpoint
    from hegmd import __version__
    from hegmd.protocol.messages import SUPPORTED_VERSIONS, ErrorInfo

    endpoint = find_endpoint(session.arguments.text("socket"))
    welcome: Welcome | None = None
    info: ErrorInfo | None = None
    try:
        with session.connect() as connection:
            welcome = connection.welcome
    except HegmError as error:
        info = ErrorInfo(code=error.code.name, message=error.message, hint=error.hint, facts=error.facts)
    answer = VersionAnswer(
        version=__version__,
        protocols=SUPPORTED_VERSIONS,
        socket=endpoint.path,
        daemon=None if welcome is None else _daemon_version(welcome),
        error=info,
    )
    session.sink.answer(answer, version_text)
    # A missing daemon is part of this answer. An incompatible one is what the command was asked to detect.
    return INCOMPATIBLE.exit_status if info is not None and info.code == INCOMPATIBLE.name else 0


def _daemon_version(welcome: Welcome) -> DaemonVersion:
    from hegmctl.answers import DaemonVersion

    return DaemonVersion(
        version=welcome.daemon_version,
        protocol=welcome.version,
        node=welcome.node,
        simulated=welcome.simulated,
        capabilities=welcome.capabilities,
        limits=welcome.limits,
        you=welcome.you,
        run=welcome.run,
    )


def ping(session: Session) -> int:
    from time import perf_counter

    from hegmctl.answers import PingAnswer
    from hegmctl.answers_text import ping_text

    count = session.arguments.whole("count")
    times_s: list[float] = []
    with session.connect() as connection:
        for _ in range(1 if count is None else count):
            began = perf_counter()
            connection.ping()
            times_s.append(perf_counter() - began)
    answer = PingAnswer(
        version=connection.welcome.daemon_version,
        node=connection.welcome.node,
        socket=connection.endpoint.path,
        round_trips_s=tuple(times_s),
    )
    session.sink.answer(answer, ping_text)
    return 0


def simulate_hold(session: Session) -> int:
    """`hegmctl simulate hold`: hold the memory here, or become the command that holds it."""
    from hegmctl.answers_text import hold_text

    arguments = session.arguments
    with session.connect() as connection:
        reply = connection.simulate_hold(arguments.required("GPU"), arguments.whole("SIZE") or 0)
        if arguments.tail:
            from hegmctl.exec_command import become

            become(arguments.tail, keep=connection.fileno())
        session.sink.element(reply, hold_text)
        connection.wait_for_its_end()


def complete(session: Session) -> int:
    """List candidates for a shell completion. It never writes an error, because the user is typing."""
    from hegmctl.output import write_lines

    try:
        with session.connect(COMPLETION_TIMEOUT_S) as connection:
            what = session.arguments.required("WHAT")
            if what in ("gpus", "places"):
                write_lines([*[gpu.id for gpu in connection.gpus().gpus], *(["cpu"] if what == "places" else [])])
            else:
                jobs = connection.jobs().jobs if what == "jobs" else ()
                names = [name for job in jobs for name in (job.name, job.id)]
                write_lines([*names, *[str(process.pid) for process in connection.processes().processes]])
    except HegmError:
        return 0
    return 0
